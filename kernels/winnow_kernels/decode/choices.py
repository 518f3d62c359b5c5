"""What a step chooses for requests whose lists are of one shape, and what its attention is then believed to hold."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_kernels.attend.reference import Attended
from winnow_kernels.cache import Context
from winnow_kernels.selection.tokens import Selection

K = TypeVar("K", bound=Hashable)
CPU_SCORES: Final = 4096
"""Scores of a query head, of all requests that are computed together on a CPU: more would leave its caches."""
GPU_SCORES: Final = 2**19
"""The same on a GPU, which must have space for it."""
_LOG2_E: Final = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class Alike(Generic[K]):
    """Requests of a batch that differ in their tokens, but not in how many these are: computed together.

    Attributes:
        rows: int64 [requests]; their numbers in the batch.
        is_in: int64 [requests of the batch]; 1 for these, 0 for the others.
        context: of these.
        length: of each context.
        key: what else they agree in.
    """

    rows: Tensor
    is_in: Tensor
    context: Context
    length: int
    key: K

    @classmethod
    def of(cls, context: Context, keys: Sequence[K], tokens_of_score: int = 1) -> list[Alike[K]]:
        """Return all requests of a batch, those together that agree in length and key, as far as that is worth it.

        Args:
            context: of the batch.
            keys: of each request.
            tokens_of_score: how many tokens share a score.
        """
        alike: dict[tuple[int, K], list[int]] = {}
        for row, of_row in enumerate(zip(context.lengths.tolist(), keys, strict=True)):
            alike.setdefault(of_row, []).append(row)
        scores = CPU_SCORES if context.device.type == "cpu" else GPU_SCORES
        return [
            cls(
                some,
                context.lengths.new_zeros(context.requests).index_fill(0, some, 1),
                Context(context.slots[some, :length], context.lengths[some]),
                length,
                key,
            )
            for (length, key), rows in alike.items()
            for some in torch.tensor(rows, device=context.device).split(max(1, scores * tokens_of_score // length))
        ]


def listed(is_in: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of what is in each list, ascending.

    Args:
        is_in: bool [..., n].

    Returns:
        int64 [..., most], beyond a list's end 0; and bool, same shape, false there.
    """
    counts = is_in.sum(-1, keepdim=True)
    is_filled = torch.arange(int(counts.max()), device=is_in.device) < counts
    return torch.zeros_like(is_filled, dtype=torch.int64).masked_scatter_(is_filled, is_in.nonzero()[:, -1]), is_filled


@dataclass(frozen=True)
class Choice:
    """What some requests attend to.

    Attributes:
        slots: int64 [requests, KV heads, width], in order; from ``counts`` on their content means nothing.
        counts: int64 [requests, KV heads].
        selected: float64 [requests, KV heads, group]; logarithm of the mass that this is predicted to have.
        rest: of all else; -inf where everything is selected.
    """

    slots: Tensor
    counts: Tensor
    selected: Tensor
    rest: Tensor

    @classmethod
    def of_everything(cls, context: Context, queries: Tensor) -> Choice:
        """Return that of whole contexts of one length, newest first; ``queries`` are [requests, KV heads, group, …]."""
        slots = context.slots.flip(1)[:, None].expand(-1, queries.shape[1], -1)
        nothing = queries.new_full(queries.shape[:3], -torch.inf, dtype=torch.float64)
        return cls(slots, context.lengths[:, None].expand(slots.shape[:2]), nothing, nothing)

    def or_everything(self, is_whole: Tensor, context: Context) -> Choice:
        """Return the same, but the whole contexts, newest first, where ``is_whole``, bool [requests, KV heads]."""
        counts = context.lengths[:, None].where(is_whole, self.counts)
        width = int(counts.max())
        newest_first = context.slots.flip(1)[:, None, :width]
        slots = newest_first.where(is_whole[..., None], F.pad(self.slots, (0, width - self.slots.shape[2])))
        return Choice(slots, counts, self.selected, self.rest)

    @classmethod
    def of_all(cls, choices: Mapping[Alike[K], Choice]) -> Choice:
        """Return the choices of all requests of a batch as one."""
        width = max(own.slots.shape[2] for own in choices.values())
        parts = [
            (F.pad(c.slots, (0, width - c.slots.shape[2])), c.counts, c.selected, c.rest) for c in choices.values()
        ]
        places = torch.cat([alike.rows for alike in choices]).argsort()
        return cls(*(torch.cat(of_all)[places] for of_all in zip(*parts, strict=True)))

    def selection(self, lengths: Tensor) -> Selection:
        """Return it as a selection from contexts of ``lengths``, int64 [requests]."""
        return Selection(self.slots, self.counts, self.counts == lengths[:, None])

    def believed_share(self, attended: Attended) -> Tensor:
        """Return the share that attention is believed to have read, mean over query heads: float64 [requests]."""
        read = attended.log_sum_exp.double().view_as(self.rest) * _LOG2_E
        is_cut = (attended.read < self.counts)[..., None]
        # What is selected weighs at least as much as what was read of it.
        selected = self.selected.maximum(read).where(is_cut, read)
        unread = (selected - read).exp2() - 1 + (self.rest - read).exp2()
        return (1 / (1 + unread)).mean((1, 2))
