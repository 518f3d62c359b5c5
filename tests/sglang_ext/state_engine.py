"""As ``prefix_engine``, of a model with linear attention: SGLang's cache and pools that have states beside the KV.

A state is noted as the KV of all tokens before it: what it depends on, and how far it has come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache_components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_winnow.sglang_versions.prefill import computed_range
from tests.sglang_ext.prefix_engine import CONTEXT, PAGE, STATES, Engine, committed_length

INTERVAL: Final = STATES["mamba_track_interval"]
LINEAR_LAYERS: Final = (0, 1, 2, 4, 5, 6)
MAX_RUNNING: Final = 16
STATES_OF_REQUEST: Final = 3
"""That in which it runs, and two copies."""


def state_pool(states: int) -> HybridReqToTokenPool:
    """Return SGLang's pool of request slots, with so many small states."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=8, n_groups=1, num_heads=1, head_dim=8, state_size=8, conv_kernel=4
    )
    parameters = Mamba2CacheParams(
        shape=shape, layers=list(LINEAR_LAYERS), dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    )
    return HybridReqToTokenPool(
        size=MAX_RUNNING,
        mamba_size=states,
        mamba_spec_state_size=MAX_RUNNING,
        max_context_len=CONTEXT,
        device="cpu",
        enable_memory_saver=False,
        cache_params=parameters,
        mamba_layer_ids=list(LINEAR_LAYERS),
        enable_mamba_extra_buffer=True,
    )


@dataclass
class StateEngine(Engine):
    """A scheduler's cache, with a note in each slot and in each state.

    Attributes:
        states: how many there is room for.
        state_notes: by the slot of a state.
    """

    states: int = 60
    state_notes: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def _request_pool(self) -> Any:
        return state_pool(self.states)

    def _cache(self) -> Any:
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            enable_mamba_extra_buffer=True,
        )
        parameters.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
        return UnifiedRadixCache(parameters)

    def _take_slot(self, req: Any) -> None:
        if (missing := STATES_OF_REQUEST - self.pool.mamba_allocator.available_size()) > 0:
            self.cache.evict(EvictParams(num_tokens=0, mamba_num=missing))
        super()._take_slot(req)

    def compute(self, req: Any) -> None:
        super().compute(req)
        start, end = computed_range(req)
        batch: Any = SimpleNamespace(req_to_token_pool=self.pool, tree_cache=self.cache)
        entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)
        own = int(req.mamba_pool_idx)
        if req.mamba_cow_src_index is not None:
            self.state_notes[own] = self.state_notes[int(req.mamba_cow_src_index)]
            req.mamba_cow_src_index, req.mamba_needs_clear = None, False
        elif req.mamba_needs_clear:
            self.state_notes[own], req.mamba_needs_clear = (), False
        assert len(self.state_notes[own]) == start
        self.state_notes[own] += tuple(self.notes_of(req, end)[start:])
        if entry.track_mask:
            self.state_notes[entry.track_index] = self.state_notes[own][: req.mamba_last_track_seqlen]

    def decode(self, req: Any, count: int) -> None:
        batch: Any = SimpleNamespace(req_to_token_pool=self.pool, spec_algorithm=SimpleNamespace(is_none=lambda: True))
        processor: Any = SimpleNamespace()
        processor._mamba_check_track_boundary = partial(
            SchedulerBatchResultProcessor._mamba_check_track_boundary, processor
        )
        own = int(req.mamba_pool_idx)
        for _ in range(count):
            super().decode(req, 1)
            length = committed_length(req)
            self.state_notes[own] += (self.notes_of(req, length)[-1],)
            if length % INTERVAL == 0:
                copy = int(req.mamba_ping_pong_track_buffer[req.mamba_next_track_idx])
                self.state_notes[copy] = self.state_notes[own]
            SchedulerBatchResultProcessor._mamba_prefix_cache_update(processor, req, batch, SimpleNamespace(), 0)

    def assert_state_is_its_own(self, req: Any) -> None:
        """Check that a request's state has come as far as its KV, and depends on no other.

        Of an answer that is kept, a later turn may compute some tokens anew, and take over the KV that is there.
        """
        state, kv = self.state_notes[int(req.mamba_pool_idx)], self.notes_of(req, committed_length(req))
        if req.winnow_state.policy.keeps_sparse_answer:
            assert [note[:2] for note in state] == [note[:2] for note in kv]
        else:
            assert list(state) == kv

    def assert_nothing_lost(self, running: list[Any]) -> None:
        super().assert_nothing_lost(running)
        cached = self.cache.mamba_evictable_size() + self.cache.mamba_protected_size()
        own = STATES_OF_REQUEST * len(running)
        assert self.pool.mamba_allocator.available_size() + cached + own == self.states
