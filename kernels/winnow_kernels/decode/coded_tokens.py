"""Steps that predict every token's score from low-bit codes of its key, and attend to some of them.

- Sinks, in whole blocks of codes, and the newest tokens, at least 64 and back to where a page begins, are always
  attended to. Their scores are exact.
- A KV head that would read more than three quarters of the context attends to all of it, newest first: to read
  everything in a row costs less than to look most of it up. Where what is always kept is so much by itself, nothing is
  scored.
- Order, for early termination: the newest tokens back to the oldest of those always kept, the sinks, then the others by
  the share of the mass that they are predicted to hold, mean over the group, in steps of 1/4 octave; of equal ones the
  first in the context.
- The reported share is of what was read, and its mass is exact: attention itself yields it. Only the mass of what was
  not read is predicted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import torch
from torch import Tensor

from winnow_kernels.attend import dense
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import Attended, group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.predicted_attention import PredictedAttention
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.indexes.key_codes import BLOCK, KeyCodes, RoundedQueries, bytes_of_key
from winnow_kernels.selection.tokens import Selection

WINDOW: Final = 64
"""Newest tokens, at least, that are always attended to."""
WHOLE_SHARE: Final = 0.75
"""A KV head that would attend to more than this share of the context attends to all of it."""
_LOG2_E: Final = 1.4426950408889634


def scored_tokens(length: int, page_size: int) -> int:
    """Return how many first tokens of a context are not always attended to, but for the sinks among them."""
    return max(0, length - WINDOW) // page_size * page_size


def kept_sinks(sinks: int, scored: int) -> int:
    """Return how many first tokens are always attended to as sinks, of those that are not by themselves."""
    return min(-(-sinks // BLOCK) * BLOCK, scored)


def tokens_read(wanted: int, sinks: int, length: int, page_size: int) -> int:
    """Return how many tokens a KV head reads that may read ``wanted``: more if more are always kept, or all."""
    scored = scored_tokens(length, page_size)
    tokens = max(min(wanted, length), length - scored + kept_sinks(sinks, scored))
    return length if tokens > WHOLE_SHARE * length else tokens


def read_whole_until(wanted: int) -> int:
    """Return the longest context that is read whole by a KV head that may read ``wanted`` tokens."""
    return ceil(wanted / WHOLE_SHARE) - 1


@dataclass(frozen=True)
class _Choice:
    """What one request attends to.

    Attributes:
        positions: of each KV head, in order.
        selected: float64 [KV heads, group]; logarithm of the mass that this is predicted to have.
        rest: of all else; -inf where everything is selected.
    """

    positions: list[Tensor]
    selected: Tensor
    rest: Tensor


class CodedStep(DecodeStep):
    """Attend to sinks, to the newest tokens, and to what is chosen of the others by their predicted scores.

    Attributes:
        lengths: of the contexts.
        index_built_tokens: for each request, the tokens of the pages whose codes this step had to compute.
        kept: for each request, int64 [n]; positions of the tokens that are always attended to, in order.
    """

    def __init__(
        self, context: Context, scale: float, termination: Termination | None, sinks: Sequence[int], codes: KeyCodes
    ) -> None:
        super().__init__(context, scale, termination)
        self._codes = codes
        size = codes.generations.page_size
        self.lengths: list[int] = context.lengths.tolist()
        self._scored = [scored_tokens(length, size) for length in self.lengths]
        self._sinks = [kept_sinks(own, scored) for own, scored in zip(sinks, self._scored, strict=True)]
        # Those of the window's pages, too: a later step scores them.
        pages = [codes.generations.complete_pages(context, row, n - 1) for row, n in enumerate(self.lengths)]
        self.index_built_tokens = [size * codes.ensure(of_request) for of_request in pages]
        of_pages = zip(pages, self._scored, strict=True)
        self._blocks = [dense.span_of(codes.blocks_of(own[: scored // size])) for own, scored in of_pages]
        self.kept = [
            torch.cat((torch.arange(length - 1, scored - 1, -1), torch.arange(own))).to(context.device)
            for length, scored, own in zip(self.lengths, self._scored, self._sinks, strict=True)
        ]
        self._estimated_share = torch.zeros(context.requests, dtype=torch.float64, device=context.device)
        self._is_row = torch.eye(context.requests, dtype=torch.int64, device=context.device)
        self._selected, self._rest = self._estimated_share, self._estimated_share

    @property
    def estimated_share(self) -> Tensor:
        """The share of attention mass that is believed to have been attended: float64 [requests].

        A mean over query heads, summed over the layers so far; 1 where everything was attended to.
        """
        return self._estimated_share

    @abstractmethod
    def chosen(self, request: int, predicted: PredictedAttention) -> Tensor:
        """Return which of a request's other tokens to attend to: bool [KV heads, tokens]."""

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        grouped = group(queries, cache.kv_heads)
        choices = [self._choice(row, layer, grouped[row], cache, meter) for row in range(self.context.requests)]
        counts = torch.tensor([[len(head) for head in own.positions] for own in choices], device=queries.device)
        slots = counts.new_zeros(*counts.shape, int(counts.max()))
        for row, own in enumerate(choices):
            for head, positions in enumerate(own.positions):
                slots[row, head, : len(positions)] = self.context.slots[row].index_select(0, positions)
        self._selected = torch.stack([own.selected for own in choices])
        self._rest = torch.stack([own.rest for own in choices])
        return Selection(slots, counts, counts == self.context.lengths[:, None])

    def _choice(self, row: int, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> _Choice:
        length, kept, sinks = self.lengths[row], self.kept[row], self._sinks[row]
        if len(kept) > WHOLE_SHARE * length:
            nothing = queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float64)
            return _Choice([self._newest_first(row)] * cache.kv_heads, nothing, nothing)
        code_bytes = bytes_of_key(cache.head_dim, self._codes.bits) * self._scored[row]
        meter.count_bytes(self._is_row[row] * round(cache.kv_heads * (cache.vector_bytes * len(kept) + code_bytes)))
        keys = cache.keys.index_select(0, self.context.slots[row].index_select(0, kept)).float().permute(1, 2, 0)
        scores = self._codes.scores(layer, RoundedQueries.of(queries, self.scale), self._blocks[row])
        predicted = PredictedAttention.of(queries @ keys * (self.scale * _LOG2_E), scores[..., sinks:])
        selected = self.chosen(row, predicted)
        order = predicted.order() if self.termination is not None else None
        positions, held = [], []
        for head, tokens in enumerate((selected.sum(-1) + len(kept)).tolist()):
            if tokens > WHOLE_SHARE * length:
                positions.append(self._newest_first(row))
                held.append(scores.new_ones(queries.shape[1], dtype=torch.float64))
                continue
            own = selected[head].nonzero().flatten()
            held.append(predicted.held(head, own))
            if order is not None:
                own = own[order[head][own].argsort(descending=True, stable=True)]
            positions.append(torch.cat((kept, sinks + own)))
        share, total = torch.stack(held), predicted.total[..., 0]
        return _Choice(positions, total + share.log2(), total + (1 - share).log2())

    def _newest_first(self, row: int) -> Tensor:
        return torch.arange(self.lengths[row] - 1, -1, -1, device=self.context.device)

    def note(self, selection: Selection, attended: Attended) -> None:
        read = attended.log_sum_exp.double().unflatten(1, self._rest.shape[1:]) * _LOG2_E
        is_cut = (attended.read < selection.counts)[..., None]
        # What is selected weighs at least as much as what was read of it.
        selected = self._selected.maximum(read).where(is_cut, read)
        unread = (selected - read).exp2() - 1 + (self._rest - read).exp2()
        self._estimated_share += (1 / (1 + unread)).mean((1, 2))

    def count(self, statistics: Statistics, table_rows: Tensor, layers: int) -> None:
        statistics.add(table_rows, Field.ESTIMATED_SHARE, self._estimated_share)
        statistics.add(table_rows, Field.ESTIMATES, float(layers))
