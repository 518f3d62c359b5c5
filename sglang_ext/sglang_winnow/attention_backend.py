"""SGLang's attention backend ``winnow``: batches in which every request has its own policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from sglang_winnow.borrowed_slots import borrowed
from sglang_winnow.decode_plan import DecodePlan
from sglang_winnow.dense_pass_plan import DensePassPlan
from sglang_winnow.forward_pass import context_of, scaled_output, scaled_queries, window_of, write_keys_and_values
from sglang_winnow.key_bits import index_settings
from sglang_winnow.mixed_plan import MixedPlan
from sglang_winnow.prefill_plan import PrefillPlan
from sglang_winnow.refusals import attention_layers, refuse_what_is_not_served
from sglang_winnow.released_prompts import is_due, release
from sglang_winnow.request_state import RequestState, RequestTable
from sglang_winnow.softmaxes import layer_cache
from sglang_winnow.verification_plan import Accepted, VerificationPlan
from winnow_kernels.cache import Context
from winnow_kernels.decode.compaction import compact, room_for
from winnow_kernels.decode.request import PromptSelection
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.pool_indexes import Indexes

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


_Plan = DecodePlan | PrefillPlan | MixedPlan | VerificationPlan | DensePassPlan


class WinnowAttentionBackend(AttentionBackend):
    """Attention by the policy of each request.

    A forward pass has one plan, made before its first layer: which rows go together, and where their tokens lie.
    """

    def __init__(self, runner: ModelRunner) -> None:
        refuse_what_is_not_served(runner)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.device = torch.device(runner.device)
        layers = attention_layers(runner)
        self._scale = layers[0].scaling
        self._last_layer = layers[-1].layer_id
        self._full_layers = [layer.layer_id for layer in layers if window_of(layer) is None]
        caches = [
            replace(layer_cache(self.token_to_kv_pool, layer), windowed=layer.layer_id not in self._full_layers)
            for layer in layers
        ]
        self.indexes = Indexes(caches, runner.page_size, self.device, index_settings())
        self.statistics = Statistics(self.req_to_token_pool.req_to_token.shape[0], self.device)
        self.requests = RequestTable(self.statistics, len(layers) - len(self._full_layers))
        self._plan: _Plan | None = None
        self._attends_densely = False
        self._decoding = 0

    def note(self, requests: Sequence[Req], _batch: ForwardBatch, decoding: int) -> None:
        """Note the requests of a batch, before its forward pass and in the order of the passes.

        Args:
            requests: in the order of their rows.
            decoding: how many of them, the last ones, decode in a pass in which others are prefilled.
        """
        self.requests.begin(requests)
        self._decoding = decoding

    def can_decode_ahead(self, _states: Sequence[RequestState], _length_bounds: Sequence[int]) -> bool:
        """Return whether a decode pass could be launched before lengths are known: here they always are."""
        return True

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a forward pass."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self._plan = None
            return
        if self._attends_densely:
            self._plan = DensePassPlan(self._context(forward_batch))
            return
        if mode.is_target_verify():
            # Pages that drafts had filled may have been indexed.
            self.indexes.generations.rewritten(forward_batch.out_cache_loc)
        else:
            self.indexes.generations.written(forward_batch.out_cache_loc)
        if mode.is_decode() or self._decoding:
            self._release_prompts(forward_batch)
        context = self._context(forward_batch)
        rows = range(forward_batch.batch_size)
        if mode.is_target_verify():
            slots = forward_batch.req_pool_indices
            states = [self.requests[slot] for slot in slots.tolist()]
            width = forward_batch.spec_info.num_tokens_per_req
            self._plan = VerificationPlan(context, width, slots, states, self.statistics)
        elif mode.is_decode():
            self._plan = self._decode(forward_batch, context, rows)
        elif self._decoding:
            # From 0.5.19 on SGLang calls a mixed batch an extended one by now.
            first = len(rows) - self._decoding
            self._plan = MixedPlan(
                self._prefill(forward_batch, context, rows[:first]), self._decode(forward_batch, context, rows[first:])
            )
        else:
            self._plan = self._prefill(forward_batch, context, rows)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend with one query a request. Returns [requests, query heads × head dim].

        ``sinks`` are the sink logits of the layer, [query heads].
        """
        assert isinstance(self._plan, DecodePlan | DensePassPlan)
        return self._forward(self._plan, q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend with the new tokens of each request, one after another. Returns [tokens, query heads × head dim].

        ``sinks`` are the sink logits of the layer, [query heads].
        """
        assert isinstance(self._plan, PrefillPlan | MixedPlan | VerificationPlan)
        return self._forward(self._plan, q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def _forward(
        self,
        plan: _Plan,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if save_kv_cache:
            write_keys_and_values(self.token_to_kv_pool, layer, forward_batch, k, v)
        cache = layer_cache(self.token_to_kv_pool, layer, sinks)
        queries = scaled_queries(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), layer, cache)
        output = plan.attend(layer.layer_id, queries, cache, layer.scaling, window_of(layer))
        output = scaled_output(output, layer, cache)
        if layer.layer_id == self._last_layer:
            plan.finish()
        return output.flatten(1)

    def accept(self, accepted: Accepted) -> None:
        """Note what the last pass that checks has ``accepted``."""
        assert isinstance(self._plan, VerificationPlan)
        self._plan.accept(accepted)

    @property
    def compared(self) -> list[int]:
        """The rows of the last pass whose next token is to be compared with dense attention's."""
        return self._plan.compared if isinstance(self._plan, DecodePlan | MixedPlan) else []

    @contextmanager
    def attending_densely(self, slots: Tensor) -> Iterator[None]:
        """Let the decode passes within attend to everything, count nothing, and leave the KV cache as it was.

        Args:
            slots: int64 [requests]; those that the passes write.
        """
        plan, self._attends_densely = self._plan, True
        try:
            with borrowed(slots, self.indexes.caches):
                yield
        finally:
            self._plan, self._attends_densely = plan, False

    def _context(self, batch: ForwardBatch) -> Context:
        return context_of(batch, self.req_to_token_pool.req_to_token, self.indexes.caches[0].slots)

    def _release_prompts(self, batch: ForwardBatch) -> None:
        """Let the requests that decode for the first time give back what they will not read again of their prompts."""
        first = batch.batch_size - self._decoding if self._decoding else 0
        for slot in batch.req_pool_indices[first:].tolist():
            if (state := self.requests[slot]) is not None and is_due(state, self._full_layers):
                assert state.kept is not None
                room = room_for(state.kept.kept)
                row, page_size = self.req_to_token_pool.req_to_token[slot], self.indexes.page_size
                release(state, row, room, page_size, partial(self._move, state.kept, room))

    def _move(self, kept: PromptSelection, room: int, prompt: Tensor, begin: int) -> None:
        self.indexes.generations.written(prompt[begin : begin + room])
        kept.moved = compact(kept.kept, self.indexes.caches, prompt, begin)

    def _decode(self, batch: ForwardBatch, context: Context, rows: range) -> DecodePlan:
        slots = batch.req_pool_indices[rows.start : rows.stop]
        return DecodePlan(
            context if len(rows) == context.requests else context.rows(list(rows)),
            batch.seq_lens_cpu[rows.start : rows.stop].tolist(),
            slots,
            [self.requests[slot] for slot in slots.tolist()],
            self._scale,
            self.indexes,
            self.statistics,
        )

    def _prefill(self, batch: ForwardBatch, context: Context, rows: range) -> PrefillPlan:
        slots = batch.req_pool_indices[rows.start : rows.stop]
        return PrefillPlan(
            context if len(rows) == context.requests else context.rows(list(rows)),
            slots,
            [self.requests[slot] for slot in slots.tolist()],
            batch.extend_prefix_lens_cpu[rows.start : rows.stop],
            batch.extend_seq_lens_cpu[rows.start : rows.stop],
            self.indexes,
            self.statistics,
            layers=self._full_layers,
        )
