"""One pass that checks drafts: the newest accepted token of each request and its drafts, densely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_winnow.request_state import RequestState
from winnow_kernels.attend.dense import prefill
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.statistics import Field, Statistics


class Accepted(NamedTuple):
    """What a pass that checks has come to: of each row that has drafted, and of those that decoded a token beside them.

    Attributes:
        tokens: int64 [requests], the drafts that stand, and one more token.
        drafted: int64 [requests], the drafts that were checked.
        rests: int64 [requests], 1 where nothing was drafted although the policy is not dense.
    """

    tokens: Tensor
    drafted: Tensor
    rests: Tensor


class VerificationPlan:
    """Where each request's unchecked tokens lie in the batch. They attend causally to everything.

    Call ``attend`` for each layer, then ``finish``, and ``accept`` when it is known which drafts stand.
    """

    def __init__(
        self,
        context: Context,
        new_tokens: int,
        table_rows: Tensor,
        states: Sequence[RequestState | None],
        statistics: Statistics,
    ) -> None:
        """
        Args:
            context: of the requests, with the unchecked tokens.
            new_tokens: that are checked, of each request: the last ones of its context.
            table_rows: int64 [requests], their rows in the statistics.
            states: of the requests.
            statistics: what the requests' attention costs.
        """
        self._context = context
        self._slots = [slots[:length] for slots, length in zip(context.slots, context.lengths.tolist(), strict=True)]
        self._new_tokens = new_tokens
        self._table_rows = table_rows
        self._observers = [None if state is None else state.checked for state in states]
        self._statistics = statistics
        self._meter = Meter(context.requests, context.device)
        self._heads = self._bytes = 0

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        """Return the attention output of a layer: [tokens, query heads, head dim], as ``queries``."""
        parts = list(zip(queries.split(self._new_tokens), self._slots, strict=True))
        if window is None:
            for observer, (own, slots) in zip(self._observers, parts, strict=True):
                if observer is not None:
                    observer.observe(layer, own, slots, cache, scale)
            # A token's K and V are read once for all that is checked.
            self._meter.count_attended(self._context.lengths * cache.kv_heads, cache)
            self._heads += cache.kv_heads
            self._bytes += cache.kv_heads * 2 * cache.vector_bytes
        return torch.cat([prefill(own, slots, cache, scale, window) for own, slots in parts])

    def finish(self) -> None:
        """Add what was read to the statistics."""
        self._statistics.add_decode(self._table_rows, self._meter)

    def accept(self, accepted: Accepted) -> None:
        """Count the steps that dense decoding would have taken to what the check has ``accepted``."""
        lengths = self._context.lengths
        count_accepted(
            self._statistics, self._table_rows, lengths, self._new_tokens, accepted, self._heads, self._bytes
        )


def count_accepted(
    statistics: Statistics,
    table_rows: Tensor,
    lengths: Tensor,
    new_tokens: int,
    accepted: Accepted,
    heads: int,
    token_bytes: int,
) -> None:
    """Count a check, the steps that dense decoding would have taken to what it has come to, and their contexts.

    Args:
        statistics: what is added to.
        table_rows: int64 [requests], their rows there.
        lengths: int64 [requests], of their contexts, with all that was checked.
        new_tokens: that were checked, of each.
        accepted: what it has come to.
        heads: KV heads of all layers.
        token_bytes: bytes of a token's keys and values in all layers.
    """
    first, tokens = lengths - new_tokens + 1, accepted.tokens
    contexts = tokens * first + tokens * (tokens - 1) // 2
    statistics.add(table_rows, Field.STEPS, tokens)
    statistics.add(table_rows, Field.DENSE_STEPS, accepted.rests)
    statistics.add(table_rows, Field.VERIFICATIONS, (accepted.drafted > 0).double())
    statistics.add(table_rows, Field.ACCEPTED, tokens - 1)
    statistics.add(table_rows, Field.DECODE_CONTEXT, contexts * heads)
    statistics.add(table_rows, Field.DECODE_CONTEXT_BYTES, contexts * token_bytes)
    statistics.set(table_rows, Field.CONTEXT, first + tokens - 1)
