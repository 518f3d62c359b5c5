"""The first draft of a batch's next round, which is made before the host knows what the last check has come to.

What the scheduler does between two rounds takes milliseconds, in which a GPU would have nothing to do. So the pass that
makes the next round's first drafts is launched right behind the check: what it begins with is on the device. Where the
batch has changed by then, it was in vain: the round begins anew, and writes over what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_winnow.round_rows import asks_for_tokens_alone
from winnow_kernels.contract.verification import MAX_DRAFT_TOKENS
from winnow_kernels.host_tensors import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult


@dataclass(frozen=True, eq=False)
class DraftsAhead:
    """What the pass has come to.

    Attributes:
        reqs: of its rows.
        tokens: int64 [rows], the drafts.
        result: of the pass.
    """

    reqs: Sequence[Req]
    tokens: Tensor
    result: GenerationBatchResult

    def of(self, reqs: Sequence[Req], limits: Sequence[int]) -> Tensor | None:
        """Return the first drafts of a round's rows, int64 [rows]; None if it has others, or one that drafts none."""
        places = {id(req): place for place, req in enumerate(self.reqs)}
        if not all(limits) or any(id(req) not in places for req in reqs):
            return None
        own = [places[id(req)] for req in reqs]
        if own == list(range(len(self.reqs))):
            return self.tokens
        return self.tokens[to_device(torch.tensor(own), self.tokens.device)]


def can_draft_ahead(batch: ScheduleBatch, limits: Sequence[int], lengths: Sequence[int], context_length: int) -> bool:
    """Return whether the next round's first drafts could follow from what is on the device.

    They could if all rows draft, as far as is known, and tokens depend on nothing that the host keeps. SGLang has room
    for as many tokens behind a context as a round yields at most.

    Args:
        batch: in a round.
        limits: how many tokens each row drafts in it.
        lengths: of the rows before the round, tokens whose keys are written.
        context_length: of the model.
    """
    if not all(limits) or max(limits) == MAX_DRAFT_TOKENS:
        return False
    info = batch.sampling_info
    if batch.return_hidden_states or info.has_custom_logit_processor or info.logit_bias is not None:
        return False
    if max(length + limit for length, limit in zip(lengths, limits, strict=True)) + 1 >= context_length:
        return False
    goes_on = any(
        req.sampling_params.max_new_tokens - len(req.output_ids) > limit + 1
        for req, limit in zip(batch.reqs, limits, strict=True)
    )
    return goes_on and all(map(asks_for_tokens_alone, batch.reqs))
