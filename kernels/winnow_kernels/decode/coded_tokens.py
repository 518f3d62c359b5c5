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
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from winnow_kernels.attend import dense
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import Attended, group
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.contract.fields import Sparse
from winnow_kernels.decode.choices import Alike, Choice, listed
from winnow_kernels.decode.predicted_attention import LOWEST_KEY, PredictedAttention
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.indexes.key_codes import BLOCK, KeyCodes, RoundedQueries, bytes_of_key
from winnow_kernels.selection.tokens import Selection
from winnow_kernels.softmax import capped

WINDOW: Final = 64
"""Newest tokens, at least, that are always attended to."""
WHOLE_SHARE: Final = 0.75
"""A KV head that would attend to more than this share of the context attends to all of it."""
P = TypeVar("P", bound=Sparse)
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


@dataclass(frozen=True, eq=False)
class Coded(Generic[P]):
    """Requests that are computed together, whose key are their parameters.

    Attributes:
        alike: the requests.
        scored: how many first tokens are scored by codes.
        sinks: how many of these are always attended to.
        kept: int64 [n]; positions of the tokens that are always attended to, in order.
        blocks: int64 [requests, n]; where the codes are of those that are scored.
    """

    alike: Alike[P]
    scored: int
    sinks: int
    kept: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, alike: Alike[P], codes: KeyCodes) -> Coded[P]:
        """Return what ``codes`` know of requests."""
        size, device = codes.generations.page_size, alike.rows.device
        scored = scored_tokens(alike.length, size)
        sinks = kept_sinks(alike.key.sinks, scored)
        kept = torch.cat((torch.arange(alike.length - 1, scored - 1, -1), torch.arange(sinks))).to(device)
        return cls(alike, scored, sinks, kept, codes.blocks_of(alike.context.slots[:, :scored:size] // size))


class CodedStep(DecodeStep, Generic[P]):
    """Attend to sinks, to the newest tokens, and to what is chosen of the others by their predicted scores.

    Attributes:
        index_built_tokens: for each request, the tokens of the pages whose codes this step had to compute.
        requests: the requests, by what is computed together.
    """

    def __init__(
        self, context: Context, scale: float, termination: Termination | None, parameters: Sequence[P], codes: KeyCodes
    ) -> None:
        super().__init__(context, scale, termination)
        self._codes = codes
        size = codes.generations.page_size
        # Those of the window's pages, too: a later step scores them.
        pages = [
            codes.generations.complete_pages(context, row, n - 1) for row, n in enumerate(context.lengths.tolist())
        ]
        self.index_built_tokens = [size * codes.ensure(of_request) for of_request in pages]
        self.requests = [Coded.of(alike, codes) for alike in Alike.of(context, parameters)]
        self._estimated_share = torch.zeros(context.requests, dtype=torch.float64, device=context.device)
        self._choice: Choice

    @property
    def estimated_share(self) -> Tensor:
        """The share of attention mass that is believed to have been attended: float64 [requests].

        A mean over query heads, summed over the layers so far; 1 where everything was attended to.
        """
        return self._estimated_share

    @abstractmethod
    def chosen(self, requests: Coded[P], predicted: PredictedAttention) -> Tensor:
        """Return which of some requests' other tokens to attend to: bool [requests, KV heads, tokens]."""

    def select(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Selection:
        grouped = group(queries, cache.kv_heads)
        choices = {own.alike: self._choose(own, layer, grouped[own.alike.rows], cache, meter) for own in self.requests}
        self._choice = Choice.of_all(choices)
        return self._choice.selection(self.context.lengths)

    def _choose(self, own: Coded[P], layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Choice:
        alike, kept, most = own.alike, len(own.kept), WHOLE_SHARE * own.alike.length
        if kept > most:
            return Choice.of_everything(alike.context, queries)
        code_bytes = bytes_of_key(cache.head_dim, self._codes.bits) * own.scored
        meter.count_bytes(alike.is_in * round(cache.kv_heads * (cache.vector_bytes * kept + code_bytes)))
        keys = dense.take(cache.keys, alike.context.slots[:, own.kept]).float().permute(0, 2, 3, 1)
        cap = cache.softmax.cap
        exact = capped(queries @ keys * (self.scale * _LOG2_E), cap, _LOG2_E)
        scores = self._codes.scores(layer, RoundedQueries.of(queries, self.scale), own.blocks)
        predicted = PredictedAttention.of(exact, capped(scores[..., own.sinks :], cap, _LOG2_E))
        selected = self.chosen(own, predicted)
        counts = selected.sum(-1) + kept
        is_whole = counts > most
        others, is_other = listed(selected & ~is_whole[..., None])
        share = predicted.held(others, is_other).masked_fill_(is_whole[..., None], 1.0)
        if self.termination is not None:
            order = predicted.order().gather(-1, others).where(is_other, LOWEST_KEY)
            others = others.gather(-1, order.argsort(descending=True, stable=True))
        positions = torch.cat((own.kept.expand(*others.shape[:2], -1), own.sinks + others), -1)
        total = predicted.total[..., 0]
        choice = Choice(alike.context.slots_at(positions), counts, total + share.log2(), total + (1 - share).log2())
        return choice.or_everything(is_whole, alike.context)

    def note(self, selection: Selection, attended: Attended) -> None:
        self._estimated_share += self._choice.believed_share(attended)

    def count(self, statistics: Statistics, table_rows: Tensor, layers: int) -> None:
        statistics.add(table_rows, Field.ESTIMATED_SHARE, self._estimated_share)
        statistics.add(table_rows, Field.ESTIMATES, float(layers))
