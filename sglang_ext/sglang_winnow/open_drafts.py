"""Drafts whose check comes in a later step.

Where only some rows of a batch are verified, each pass that drafts is a step of the scheduler: the other rows get their
tokens one by one, not all of a round at its end. What was drafted stays here from step to step. SGLang sees no token of
these rows before they are checked: their newest token stays the one behind which they began to draft.

All of a batch are checked in the same step. A row that drafts fewer tokens than others begins later, and decodes
densely until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from winnow_kernels.contract.verification import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class OpenDrafts:
    """How many drafts a request has that are to be checked.

    Attributes:
        made: drafts; at least one.
        missing: drafts that follow before the check, as many for all requests of a batch.
    """

    made: int
    missing: int


class DraftPool:
    """The tokens of open drafts, by request slot: those stay on the device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        """``slots`` is how many request slots there are."""
        self._tokens = torch.zeros(slots, MAX_DRAFT_TOKENS, dtype=torch.int64, device=device)

    def read(self, slots: Tensor) -> Tensor:
        """Return what was written last of requests, int64 [rows, ``MAX_DRAFT_TOKENS``]; ``slots`` is int64 [rows]."""
        return self._tokens[slots]

    def write(self, slots: Tensor, tokens: Tensor) -> None:
        """Keep the drafts of requests, int64 [rows, ``MAX_DRAFT_TOKENS``]; any token where there is no draft."""
        self._tokens[slots] = tokens


def drafts_in_steps(reqs: Sequence[Req]) -> bool:
    """Return whether each pass of a batch is a step of its own: not all are verified, or drafts are open from then."""
    if any(req.winnow_state.open_drafts is not None for req in reqs):
        return True
    verified = [req.winnow_state.policy.verify is not None for req in reqs]
    return any(verified) and not all(verified)


def limits_in_steps(limits: Sequence[int], opened: Sequence[OpenDrafts | None]) -> list[int]:
    """Return how many drafts each row has when it is checked; 0 where a row drafts none in this step.

    Args:
        limits: how many tokens each row would draft now if it were alone.
        opened: the drafts that it has.
    """
    passes = next((drafts.missing for drafts in opened if drafts is not None), max(limits))
    return [
        (passes if limit >= passes else 0) if drafts is None else drafts.made + drafts.missing
        for limit, drafts in zip(limits, opened, strict=True)
    ]
