"""One prefill pass: the new tokens of each request, with the prefix it already has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sglang_winnow.request_policy import dense_until, kept_by
from sglang_winnow.request_state import RequestState
from winnow_kernels.attend.dense import prefill
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.declaration import ALWAYS
from winnow_kernels.decode.request import PromptSelection
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.quoka.reference import PrefillReads, quoka_prefill

# Queries that are taken to share a read of keys and values in dense prefill: as many as share one by QUOKA's default.
DENSE_BLOCK: Final = 128


@dataclass(frozen=True)
class Chunk:
    """What one request computes in this pass: tokens ``start`` to ``end``, from row ``first_row`` of the batch on.

    Attributes:
        number: of the request in the batch.
        state: the request's; None for one that is not counted.
        table_row: int64 [1]; its request slot.
        slots: int64 [end]; KV slots of its tokens.
        quoka: parameters, if QUOKA prefills it.
        counted: the tokens whose prefill counts.
    """

    number: int
    state: RequestState | None
    table_row: Tensor
    slots: Tensor
    start: int
    end: int
    first_row: int
    quoka: QuokaPrefill | None
    counted: range

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.end - self.start)


@dataclass(frozen=True)
class _Observed:
    """A chunk with queries that may be kept, to vote for what is kept of the prompt.

    Attributes:
        kept: by the request.
        prompt_length: tokens of the prompt.
        votes: whether the queries that are kept vote in this pass: requests that wait for their first step would
            otherwise hold those of all layers.
    """

    chunk: Chunk
    kept: PromptSelection
    prompt_length: int
    votes: bool


class PrefillPlan:
    """Where each request's new tokens lie in the batch, and how they attend.

    Attributes:
        chunks: of the requests, in their order.
    """

    def __init__(
        self,
        context: Context,
        table_rows: Tensor,
        states: Sequence[RequestState | None],
        prefix_lengths: Sequence[int],
        new_lengths: Sequence[int],
        indexes: Indexes,
        statistics: Statistics,
        *,
        with_norms: bool = True,
        layers: Sequence[int] | None = None,
    ) -> None:
        """With ``with_norms`` the index of key norms is built that QUOKA's ``attend`` reads.

        ``layers`` are the numbers of those with full attention, on which policies act; None for all.
        """
        self._indexes = indexes
        self._statistics = statistics
        self._dense_layers = 0
        self.chunks: list[Chunk] = []
        row = 0
        for i, (state, start, new) in enumerate(zip(states, prefix_lengths, new_lengths, strict=True)):
            end = start + new
            quoka = _quoka(state)
            slots = context.slots[i, :end]
            self.chunks.append(
                Chunk(i, state, table_rows[i : i + 1], slots, start, end, row, quoka, _counted(state, start, end))
            )
            row += new
            if quoka is not None and with_norms:
                built = indexes[KeyNorms].ensure(indexes.generations.complete_pages(context, i, start))
                statistics.add(table_rows[i : i + 1], Field.INDEX_BUILT_TOKENS, built * indexes.page_size)
        self._observed: list[_Observed] = []
        for chunk in self.chunks:
            if (state := chunk.state) is not None:
                statistics.add(chunk.table_row, Field.PREFILL_TOKENS, len(chunk.counted))
                state.begin_prefill(chunk.end)
                state.prefilled = max(state.prefilled, chunk.counted.stop)
                sparse_from = dense_until(state, indexes.page_size) + 1
                if state.kept is None and sparse_from <= ALWAYS:
                    state.kept = kept_by(state, range(len(indexes.caches)) if layers is None else layers)
                if state.kept is not None:
                    votes = chunk.end >= state.prompt_length and state.prompt_length + 1 >= sparse_from
                    self._observed.append(_Observed(chunk, state.kept, state.prompt_length, votes))

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        """Return the attention output of a layer: [tokens, query heads, head dim], as ``queries``.

        Args:
            layer: its number.
            queries: the new tokens of all requests, one request after another.
            cache: the layer's KV cache, with the new tokens in it.
            scale: what scores are multiplied by before the softmax.
            window: the layer's sliding window in tokens; such a layer is dense for every request and not counted.
        """
        output = torch.empty_like(queries)
        for chunk in self.chunks:
            own = queries[chunk.rows]
            if window is not None or chunk.quoka is None:
                output[chunk.rows] = prefill(own, chunk.slots, cache, scale, window)
            else:
                norms = self._indexes[KeyNorms].reciprocals[layer]
                output[chunk.rows], reads = quoka_prefill(own, chunk.slots, cache, scale, chunk.quoka, norms)
            if window is None and chunk.counted and chunk.quoka is not None:
                self.count(chunk, reads)
        if window is None:
            self.note(layer, queries, scale)
        return output

    @property
    def is_dense(self) -> bool:
        """Whether all requests attend to everything: SGLang's own backends can compute that."""
        return all(chunk.quoka is None for chunk in self.chunks)

    def note(self, layer: int, queries: Tensor, scale: float) -> None:
        """Keep of a layer's ``queries`` what policies need later; call once for each layer that is counted.

        The layer's keys and values must be in the cache.
        """
        self._dense_layers += 1
        for observed in self._observed:
            self._observe(observed, layer, queries[observed.chunk.rows], scale)

    def finish(self) -> None:
        """Count what dense requests have read; call after the last layer."""
        cache = self._indexes.caches[0]
        for chunk in self.chunks:
            if chunk.counted and chunk.quoka is None:
                reads = PrefillReads.of_dense(chunk.counted.start, chunk.counted.stop, DENSE_BLOCK, cache)
                self.count(chunk, reads, self._dense_layers)

    def count(self, chunk: Chunk, reads: PrefillReads, layers: int = 1) -> None:
        """Count what a request has read in each of ``layers`` layers."""
        amounts = {
            Field.PREFILL_CONTEXT: reads.context,
            Field.PREFILL_ATTENDED: reads.attended,
            Field.PREFILL_CONTEXT_BYTES: reads.context_bytes,
            Field.PREFILL_READ_BYTES: reads.read_bytes,
        }
        for field, amount in amounts.items():
            self._statistics.add(chunk.table_row, field, amount * layers)

    def _observe(self, observed: _Observed, layer: int, queries: Tensor, scale: float) -> None:
        """Keep the queries that vote, until they have voted."""
        chunk, kept = observed.chunk, observed.kept
        if layer in kept.kept:
            return
        kept.record(layer, queries, chunk.start)
        if observed.votes:
            read = Meter(1, queries.device)
            kept.vote(layer, self._indexes.caches[layer], chunk.slots[: observed.prompt_length], scale, read)
            self._statistics.add(chunk.table_row, Field.DECODE_READ_BYTES, read.read_bytes)


def _quoka(state: RequestState | None) -> QuokaPrefill | None:
    if state is None or not isinstance(policy := state.policy.prefill, QuokaPrefill):
        return None
    return policy


def _counted(state: RequestState | None, start: int, end: int) -> range:
    """Return the tokens whose prefill counts: the prompt's, each once."""
    if state is None:
        return range(0)
    first = max(start, state.prefilled)
    return range(first, max(first, min(end, state.prompt_length)))
