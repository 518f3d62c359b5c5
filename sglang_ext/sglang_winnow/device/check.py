"""Attention of the passes that check drafts on CUDA: dense, from several tokens of every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from sglang_winnow.device.decode import DeviceDecode
from sglang_winnow.device.layers import ModelLayers
from sglang_winnow.forward_pass import scaled_output, scaled_queries, write_keys_and_values
from sglang_winnow.verification_plan import Accepted, count_accepted
from winnow_kernels.attend.gpu_check import CheckPartial, attend_new
from winnow_kernels.cache import LayerCache
from winnow_kernels.contract.verification import MAX_CHECKED_TOKENS
from winnow_kernels.decode.gpu_page_table import copy_page_table
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.pages import PageGenerations

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class CheckBackend(AttentionBackend):
    """Dense attention from the newest accepted token of each row and the drafts behind it, as many in every row."""

    def __init__(
        self,
        layers: ModelLayers,
        caches: Sequence[LayerCache],
        windowed: Mapping[int, LayerCache],
        scale: float,
        query_heads: int,
        pool: Any,
        table: Tensor,
        decode: DeviceDecode,
        generations: PageGenerations,
        statistics: Statistics,
    ) -> None:
        """
        Args:
            layers: of the model.
            caches: the KV cache of every layer with full attention.
            windowed: that of the others, by SGLang's number.
            scale: what scores are multiplied by before the softmax.
            query_heads: of a layer.
            pool: SGLang's KV cache, which is written to.
            table: int32 [request slots, positions]; the KV slot of each token of a request.
            decode: the server's decode steps, whose buffers are free while a pass checks.
            generations: of the pool's pages.
            statistics: what requests cost.
        """
        self._layers = layers
        self._caches = caches
        self._windowed = windowed
        self._scale = scale
        # Models ask for it, such as gpt-oss, which writes keys and values by itself.
        self.token_to_kv_pool = pool
        self._table = table
        self._decode = decode
        self._generations = generations
        self.statistics = statistics
        self._partial = CheckPartial.empty(MAX_CHECKED_TOKENS, query_heads, caches[0])
        self._step: Step = decode.buffers.largest
        self._width = 1
        self._own_tokens: Tensor | None = None

    def note(self, requests: Sequence[Req], batch: ForwardBatch, _decoding: int) -> None:
        """Note which tokens of a pass are its rows' own, and the parameters of requests that have had no decode pass.

        A check of others may be the first pass of a request that decodes.
        """
        self._own_tokens = batch.spec_info.own_tokens
        self._decode.own([request.winnow_state for request in requests])

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a pass that no CUDA graph serves."""
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make nothing: buffers are those of decode steps."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a row of padding, which sees nothing before its last token."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Prepare a pass, outside of its CUDA graph."""
        del in_capture
        slots = forward_batch.req_pool_indices
        self._step = step = self._decode.buffers[len(slots)]
        self._width = len(forward_batch.input_ids) // len(slots)
        step.request_slots.copy_(slots)
        # Of rows of padding nothing is looked at.
        step.checked.fill_(self._width if self._own_tokens is None else 1)
        if self._own_tokens is not None:
            step.checked[: len(self._own_tokens)] = self._own_tokens
        copy_page_table(self._table, step.request_slots, forward_batch.seq_lens, step.batch)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Begin a pass, captured: pages that drafts had filled may have been indexed."""
        self._generations.rewritten(forward_batch.out_cache_loc)
        if self._decode.observers:
            self._decode.gather_parameters(self._step)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> Tensor:
        """Attend with the new tokens of each request, one after another. Returns [tokens, query heads × head dim]."""
        if save_kv_cache:
            write_keys_and_values(self.token_to_kv_pool, layer, forward_batch, k, v)
        place = self._layers.place(layer.layer_id)
        cache = self._windowed[layer.layer_id] if place is None else self._caches[place]
        queries = scaled_queries(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), layer, cache)
        output = torch.empty_like(queries)
        if place is None:
            window = self._layers.windows[layer.layer_id]
            step = self._step
            attend_new(
                queries,
                cache,
                step.batch,
                self._scale,
                self._partial,
                output,
                window=window,
                own_tokens=step.checked,
            )
        else:
            self._attend(place, queries, output)
        return scaled_output(output, layer, cache).flatten(1)

    def _attend(self, place: int, queries: Tensor, output: Tensor) -> None:
        cache, step = self._caches[place], self._step
        observers = self._decode.observers
        at_once = min([step.rows, *(observer.rows_observed(self._width, step) for observer in observers)])
        for rows, part in step.parts(at_once):
            tokens = slice(rows.start * self._width, rows.stop * self._width)
            sums = [own for observer in observers if (own := observer.page_sums(self._width, part)) is not None]
            assert len(sums) <= 1
            attend_new(
                queries[tokens],
                cache,
                part.batch,
                self._scale,
                self._partial,
                output[tokens],
                page_sums=sums[0] if sums else None,
                own_tokens=part.checked,
            )
            for observer in observers:
                observer.observe(place, self._width, part, rows, step, self._partial)
        for observer in observers:
            observer.observed(place, self._width, step)

    def accept(self, accepted: Accepted) -> None:
        """Count the last pass, and the steps that dense decoding would have taken to what it has ``accepted``."""
        step, statistics, rows = self._step, self.statistics, len(accepted.tokens)
        slots, lengths = step.request_slots[:rows], step.batch.lengths[:rows].long()
        heads = sum(cache.kv_heads for cache in self._caches)
        token_bytes = heads * 2 * self._caches[0].vector_bytes
        # Of a row that has drafted nothing, the tokens that fill it up are not its own.
        read = torch.where(accepted.drafted > 0, lengths, lengths - self._width + 1)
        statistics.add(slots, Field.DECODE_ATTENDED, read * heads)
        statistics.add(slots, Field.DECODE_READ_BYTES, read * token_bytes)
        count_accepted(statistics, slots, lengths, self._width, accepted, heads, token_bytes)
