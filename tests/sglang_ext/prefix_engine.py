"""What a scheduler does with requests' KV, on SGLang's own cache, pools and prefill planner, without a model."""

from __future__ import annotations

import inspect
import pkgutil
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ReqKvInfo
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.plugins.hook_registry import _wrap_fn
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_winnow import block_states, chunk_ends, radix
from sglang_winnow.allocator import TorchPagedAllocator
from sglang_winnow.hooks import Hook
from sglang_winnow.sglang_versions.prefill import cached_length, computed_range
from sglang_winnow.sglang_versions.prefix_cache import default_caches, shared_length
from sglang_winnow.sglang_versions.releases import CACHE_CHECKPOINTS, KV_OF_REQUEST, UNIFIED_CACHE, runs
from sglang_winnow.sglang_versions.requests import slot_of
from winnow_kernels.policies.attention_policy import AttentionPolicy

PAGE: Final = 16
CONTEXT: Final = 1024
STATES: Final[dict[str, Any]] = {
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_track_interval": 64,
    # SGLang would look it up in the model's configuration.
    "_mamba_cache_chunk_size": 64,
}
"""How a server of a model with linear attention keeps states: copies in decode, and how long chunks of prefill are."""
CORE_SETTING: Final = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
# The ``cache_salt`` and the ``extra_key`` that a client chose.
Client = tuple[str | None, str | None]
HOOKS: Final = (*radix.HOOKS, *chunk_ends.HOOKS, *block_states.HOOKS)


def tree_cores() -> list[str]:
    """Return in what the running SGLang has its tree."""
    if not runs(UNIFIED_CACHE):
        return ["python"]
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import registered_tree_core_backends  # noqa: PLC0415

    return sorted(registered_tree_core_backends())


def tree_core(cache: Any) -> str:
    """Return in what a cache has its tree."""
    return "rust" if "Rust" in type(getattr(cache, "tree_core", None)).__name__ else "python"


@dataclass
class Engine:
    """A scheduler's cache, with a note in each slot of how its KV was computed."""

    tokens: int = 4096
    disable: bool = False

    def __post_init__(self) -> None:
        self.pool = self._request_pool()
        self.allocator = TorchPagedAllocator(
            self.tokens, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
        )
        self.cache = self._cache()
        self.notes: dict[int, Any] = {}
        self.computed: dict[Any, list[tuple[int, int]]] = {}
        self.clients: dict[Any, Client] = {}

    def _request_pool(self) -> Any:
        return ReqToTokenPool(16, CONTEXT, "cpu", enable_memory_saver=False)

    def _cache(self) -> Any:
        parameters = CacheInitParams(
            disable=self.disable,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
        )
        name = default_caches()[-1 if self.disable else 0]
        if "unified" in name:
            from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: PLC0415

            parameters.tree_components = (ComponentType.FULL,)
        return pkgutil.resolve_name(name)(parameters)

    def request(
        self,
        prompt: list[int],
        policy: AttentionPolicy | None = None,
        client: Client = (None, None),
    ) -> Any:
        parameters = SamplingParams(max_new_tokens=64, ignore_eos=self.disable)
        parameters.normalize(None)
        salt, extra_key = client
        salted = "cache_salt" in inspect.signature(Req).parameters
        req = Req("r", "", array("q", prompt), parameters, **({"cache_salt": salt} if salted else {}))
        if not salted:
            # Until SGLang tells the two apart, it puts one before the other.
            extra_key = f"{salt or ''}{extra_key or ''}" or None
        policy = policy or AttentionPolicy()
        req.extra_key = radix.namespace_of(policy, extra_key, PAGE)
        req.winnow_state = SimpleNamespace(
            policy=policy, prompt_length=len(prompt), releases=policy.decode.releases_prompt, released=None
        )
        self.clients[req] = client
        return req

    def prefill(self, req: Any, chunk: int | Iterator[int] = 256) -> int:
        """Prefill a request; return how many tokens of it were in the cache."""
        sizes = iter(lambda: chunk, None) if isinstance(chunk, int) else chunk
        req.init_next_round_input(self.cache)
        cached = cached_length(req)
        self.computed[req] = []
        while True:
            adder = self.adder(next(sizes))
            result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
            if req in adder.can_run_list:
                break
            assert result == AddReqResult.OTHER
        chunked = adder.new_chunked_req
        self.compute(req)
        while chunked is not None:
            self.insert_running(req, chunked=True)
            assert cached_length(req) == computed_range(req)[1]
            req.init_next_round_input()
            chunked = self.adder(next(sizes)).add_chunked_req(req)
            self.compute(req)
        req.output_ids.append(1)
        self.insert_running(req)
        return cached

    def adder(self, chunk: int) -> Any:
        return PrefillAdder(PAGE, self.cache, self.allocator, None, 1.0, 16384, chunk)

    def compute(self, req: Any) -> None:
        start, end = computed_range(req)
        new = end - start
        if self.allocator.available_size() < new + PAGE:
            self.cache.evict(EvictParams(num_tokens=new + PAGE))
        prefix = self._prefix(req, start)
        if slot_of(req) is None:
            self._take_slot(req)
        row = self.pool.req_to_token[slot_of(req)]
        row[:start] = prefix.int()
        last = prefix[-1:].long() if start else torch.tensor([-1])
        starts, ends = torch.tensor([start]), torch.tensor([end])
        slots = self.allocator.alloc_extend(starts, starts, ends, ends, last, new)
        assert slots is not None
        row[start:end] = slots.int()
        self.computed[req].append((start, end))
        ids = list(req.full_untruncated_fill_ids)
        for position, slot in zip(range(start, end), slots.tolist(), strict=True):
            self._note(slot, req, prefilled(req.winnow_state.policy, ids, position, start, end))
        self._commit(req, end)

    def _take_slot(self, req: Any) -> None:
        self.pool.alloc([req])

    def _prefix(self, req: Any, length: int) -> Any:
        if not runs(CACHE_CHECKPOINTS):
            return req.prefix_indices
        if slot_of(req) is None:
            return self.cache.prefix_device_indices(req) if length else torch.tensor([])
        return self.pool.req_to_token[slot_of(req), :length].clone()

    def _commit(self, req: Any, length: int) -> None:
        if runs(KV_OF_REQUEST):
            req.kv.kv_committed_len = req.kv.kv_allocated_len = length
        else:
            req.kv_committed_len = length
            req.kv = ReqKvInfo(kv_allocated_len=length, swa_evicted_seqlen=0)

    def decode(self, req: Any, count: int) -> None:
        for _ in range(count):
            length = committed_length(req) + 1
            if self.allocator.available_size() < PAGE:
                self.cache.evict(EvictParams(num_tokens=PAGE))
            row = self.pool.req_to_token[slot_of(req)]
            slots = self.allocator.alloc_decode(
                torch.tensor([length]), torch.tensor([length]), row[length - 2][None].long()
            )
            assert slots is not None
            row[length - 1] = slots.int()
            ids = [*req.origin_input_ids, *req.output_ids]
            policy = req.winnow_state.policy
            note = dense_note(ids, length - 1) if policy.is_dense else ("generated", policy, id(req), length)
            self._note(int(slots), req, note)
            self._commit(req, length)
            req.output_ids.append(length % 5)

    def _note(self, slot: int, req: Any, note: object) -> None:
        self.notes[slot] = (self.clients[req], _sharing(req.winnow_state.policy), note)

    def insert_running(self, req: Any, chunked: bool = False) -> None:
        if runs(CACHE_CHECKPOINTS):
            common.checkpoint_kv_cache(req, self.cache)
        else:
            common.maybe_cache_unfinished_req(req, self.cache, chunked=chunked)

    def end(self, req: Any) -> None:
        """End a request as one that has its answer."""
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        self._release(req, insert=True)

    def abort(self, req: Any) -> None:
        req.finished_reason = FINISH_ABORT()
        self._release(req, insert=False)

    def retract(self, req: Any) -> None:
        self._release(req, insert=False)
        req.reset_for_retract()

    def _release(self, req: Any, insert: bool) -> None:
        common.release_kv_cache(req, self.cache, **{"checkpoint" if runs(CACHE_CHECKPOINTS) else "is_insert": insert})

    def notes_of(self, req: Any, count: int) -> list[Any]:
        return [self.notes[slot] for slot in self.pool.req_to_token[slot_of(req), :count].tolist()]

    def assert_nothing_lost(self, running: list[Any]) -> None:
        own = sum(-(-committed_length(req) // PAGE) * PAGE - shared_length(req) for req in running)
        cached = 0 if self.disable else self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + cached + own == self.tokens


def committed_length(req: Any) -> int:
    """Return how many tokens of a request have KV."""
    return int(req.kv.kv_committed_len if runs(KV_OF_REQUEST) else req.kv_committed_len)


def dense_note(ids: list[int], position: int) -> object:
    return ("dense", tuple(ids[: position + 1]))


def prefilled(policy: AttentionPolicy, ids: list[int], position: int, start: int, end: int) -> object:
    """Return what determines the KV of a token that a chunk from ``start`` to ``end`` computed."""
    block = getattr(policy.prefill, "block", None)
    if block is None:
        return dense_note(ids, position)
    first = position // block * block
    last = min(first + block, end)
    # Queries of a block that are in the chunk choose for it together.
    return (policy.prefill, tuple(ids[:last]), max(first, start))


def alone(policy: AttentionPolicy, prompt: list[int], client: Client = (None, None)) -> list[Any]:
    """Return the notes of a prompt on a cold server that prefills it in one piece."""
    notes = (prefilled(policy, prompt, position, 0, len(prompt)) for position in range(len(prompt)))
    return [(client, _sharing(policy), note) for note in notes]


def _sharing(policy: AttentionPolicy) -> AttentionPolicy | None:
    """Return the policy with which requests share what they decoded sparsely; None if they share with other policies.

    What they prefill afterwards is theirs alone, too: it has attended to it.
    """
    return policy if policy.keeps_sparse_answer else None


def server_arguments() -> ServerArgs:
    """Return the arguments of a server; what they say of states counts where a model has some."""
    arguments = ServerArgs(model_path="dummy", page_size=PAGE)
    for name, value in STATES.items():
        setattr(arguments, name, value)
    return arguments


@contextmanager
def hooked(hooks: tuple[Hook, ...] = HOOKS) -> Iterator[None]:
    """Have hooks in force."""
    set_global_server_args_for_scheduler(server_arguments())
    with pytest.MonkeyPatch.context() as patch:
        for hook in hooks:
            owner, _, name = hook.target.rpartition(".")
            target = pkgutil.resolve_name(owner)
            patch.setattr(target, name, _wrap_fn(getattr(target, name), hook.function, hook.kind))
        yield
