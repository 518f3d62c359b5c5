"""What each request's attention cost, as the runtime counts it."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from winnow_kernels.attend.gather import Meter
from winnow_kernels.batch import Count
from winnow_kernels.decode.ranks import ALONE, Ranks


class Field(IntEnum):
    """A column of the table. Sums over layers, KV heads and steps unless it says otherwise.

    A KV head of which several ranks have a copy counts once for each.

    Of a request whose drafts are verified, steps and contexts are those that dense decoding of the same tokens would
    have; what was attended to and read is that of drafts and checks.
    """

    STEPS = 0  # decode steps
    DENSE_STEPS = 1  # of them, those that ran dense although the policy is not
    CAPPED_STEPS = 2  # of them, those in which max_tokens cut a selection
    BUDGET = 3  # tokens per KV head, as rounded, in the last step that had one
    CONTEXT = 4  # tokens in context in the last decode step
    DECODE_CONTEXT = 5
    DECODE_ATTENDED = 6
    DECODE_CONTEXT_BYTES = 7
    DECODE_READ_BYTES = 8
    TRAVERSALS = 9
    TERMINATED = 10
    TILES = 11
    SKIPPED_TILES = 12
    ESTIMATED_SHARE = 13  # of the attention mass, summed over layers and steps
    ESTIMATES = 14
    PREFILL_TOKENS = 15  # prompt tokens computed, not summed over layers
    PREFILL_CONTEXT = 16
    PREFILL_ATTENDED = 17
    PREFILL_CONTEXT_BYTES = 18
    PREFILL_READ_BYTES = 19
    INDEX_BUILT_TOKENS = 20  # tokens that this request was the first to need an index of
    VERIFICATIONS = 21  # passes that checked drafts
    DRAFTED = 22  # tokens
    ACCEPTED = 23  # of them
    AUDITED_STEPS = 24
    AUDITED_HEADS = 25  # query heads, summed over layers and audited steps; so are the next three
    AUDITED_SHARE = 26  # of the attention mass
    AUDITED_ERROR = 27  # of the output, relative to dense attention's
    AUDITED_REACHED = 28  # query heads that held the share p
    AUDITED_NEXT_TOKENS = 29  # audited steps whose next token was compared; the next two are sums over these
    AUDITED_KL = 30  # of the next token, in nats
    AUDITED_TOP1 = 31  # steps whose most probable next token is dense attention's


FIELDS = len(Field)
_ALIKE_ON_ALL_RANKS: Final = (
    Field.STEPS,
    Field.DENSE_STEPS,
    Field.CAPPED_STEPS,
    Field.BUDGET,
    Field.CONTEXT,
    Field.PREFILL_TOKENS,
    Field.INDEX_BUILT_TOKENS,
    Field.VERIFICATIONS,
    Field.DRAFTED,
    Field.ACCEPTED,
    Field.AUDITED_STEPS,
    Field.AUDITED_NEXT_TOKENS,
    Field.AUDITED_KL,
    Field.AUDITED_TOP1,
)


class Statistics:
    """A table with one row per request slot.

    Attributes:
        rows: float64 [slots, fields]; exact for counts below 2⁵³. Of heads, those that this rank has.
    """

    def __init__(self, slots: int, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.rows = torch.zeros(slots, FIELDS, dtype=torch.float64, device=device)
        self._ranks = ranks
        # What all ranks have alike comes from the first.
        untold = _ALIKE_ON_ALL_RANKS if ranks.rank > 0 else ()
        self._untold = torch.tensor(untold, dtype=torch.int64, device=device)

    def add(self, slots: Tensor, field: Field, amounts: Tensor | float) -> None:
        """Add ``amounts``, one for each of ``slots``, int64 [requests], distinct."""
        self.rows[slots, field] += amounts

    def set(self, slots: Tensor, field: Field, values: Tensor) -> None:
        """Set a column of ``slots``, int64 [requests]."""
        self.rows[slots, field] = values.to(self.rows.dtype)

    def set_one(self, slot: int, field: Field, value: float) -> None:
        """Set a number of one slot. On a GPU this waits for nothing; to assign to a single element would."""
        self.rows[slot, field].fill_(value)

    def add_decode(self, slots: Tensor, meter: Meter) -> None:
        """Add what a decode step read."""
        counts = torch.stack([getattr(meter, column.name.lower()) for column in Count], dim=1)
        self.rows[slots, Field.DECODE_CONTEXT : Field.SKIPPED_TILES + 1] += counts

    def snapshot(self, slots: Tensor) -> Tensor:
        """Return the rows of ``slots`` with the heads of all ranks, which must all ask: float64 [requests, fields]."""
        rows = self.rows[slots]
        if len(self._untold):
            rows.index_fill_(1, self._untold, 0.0)
        self._ranks.add(rows)
        return rows
