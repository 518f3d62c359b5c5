"""What is known of a round of drafts and checks, or of a step of one, before its first pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_winnow.open_drafts import OpenDrafts
from sglang_winnow.round_rows import decoded_tokens, joins_check
from sglang_winnow.round_times import BatchSize
from winnow_kernels.host_tensors import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True, eq=False)
class Round:
    """Who drafts how many tokens, and whether they are checked now.

    Attributes:
        batch: before its first pass.
        on_host: int64 [rows], how many tokens of each row have keys.
        lengths: the same.
        size: of the batch.
        limits: how many tokens each row drafts until it is checked.
        context_length: of the model.
    """

    batch: ScheduleBatch
    on_host: Tensor
    lengths: Sequence[int]
    size: BatchSize
    limits: list[int]
    context_length: int

    @cached_property
    def made(self) -> list[int]:
        """How many drafts each row has from earlier steps: it makes the next one.

        A row that has them all makes the last one once more, where others need a pass that decodes.
        """
        opened = [0 if (drafts := req.winnow_state.open_drafts) is None else drafts.made for req in self.batch.reqs]
        if self._others_join:
            return opened
        return [max(0, min(made, limit - 1)) for made, limit in zip(opened, self.limits, strict=True)]

    @cached_property
    def verified(self) -> list[int]:
        """The rows that draft."""
        return [row for row, limit in enumerate(self.limits) if limit]

    @cached_property
    def only_checks(self) -> bool:
        """Whether nobody drafts any more: all rows take part in the pass that checks, and in no other."""
        return (
            self._others_join
            and bool(self.verified)
            and all(self.limits[row] == self.made[row] for row in self.verified)
        )

    @cached_property
    def checks(self) -> bool:
        """Whether what was drafted is checked at the end."""
        if not self.size.in_steps:
            return bool(self.verified)
        if self._others_join:
            return self.only_checks
        return bool(self.verified) and all(self.limits[row] == self.made[row] + 1 for row in self.verified)

    @cached_property
    def checked(self) -> list[int]:
        """The rows of the pass that checks: those that drafted first."""
        others = [row for row, limit in enumerate(self.limits) if not limit] if self.only_checks else []
        return self.verified + others

    @cached_property
    def decoded(self) -> list[int]:
        """How many tokens each row decodes; 0 where it drafts."""
        if self.size.in_steps:
            return [0 if limit else 1 for limit in self.limits]
        return decoded_tokens(self.batch, self.limits, self.lengths, self.context_length)

    @cached_property
    def _others_join(self) -> bool:
        """Whether the check is a step of its own, in which the rows that did not draft decode a token."""
        batch = self.batch
        if not self.size.in_steps or batch.return_logprob or batch.return_hidden_states:
            return False
        if batch.sampling_info.has_custom_logit_processor:
            return False
        return all(limit or joins_check(req) for req, limit in zip(batch.reqs, self.limits, strict=True))

    def accepted(self) -> Tensor:
        """Return how many tokens each row comes to, int32 [rows]; one or more, not known yet, where it is checked."""
        lengths = self.batch.seq_lens
        if not self.verified:
            return torch.ones_like(lengths, dtype=torch.int32)
        counts = torch.tensor([max(int(self.checks), count) for count in self.decoded], dtype=torch.int32)
        return to_device(counts, lengths.device)

    def note_drafts(self) -> None:
        """Note after it what drafts its rows have that were not checked."""
        made = self.made
        for row in self.verified:
            missing = self.limits[row] - made[row] - 1
            self.batch.reqs[row].winnow_state.open_drafts = None if self.checks else OpenDrafts(made[row] + 1, missing)
