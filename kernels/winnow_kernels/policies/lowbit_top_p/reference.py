"""``lowbit_top_p``: the fewest tokens that hold a share p of the attention, as low-bit keys predict it.

A policy of this project. It decides token by token, like the top-p oracle, from predicted scores (``KeyCodes``) instead
of exact ones: no clusters, no samples, no fitted curve. What is always attended to, when everything is, and in which
order is ``decode.coded_tokens``'s to say.

- A query head takes all other tokens from the step of scores on with which the mass reaches the share that p aims at
  (``aim``), and so many that they are ``min_tokens`` with what is always kept, if there are as many. A KV head attends
  to the union over its group.
- A cap keeps what comes first in order, and no less than what is always kept.
- p above 0.999 takes everything: what is left out would be less than what predicted scores are wrong by.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.cache import Context
from winnow_kernels.decode.coded_tokens import WHOLE_SHARE, Coded, CodedStep
from winnow_kernels.decode.predicted_attention import LOWEST_KEY, PredictedAttention, highest
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.lowbit_top_p.aim import aimed_share
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP


class LowBitTopPStep(CodedStep[LowBitTopP]):
    """Choose the tokens with which each query head's mass reaches the share that p aims at."""

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        parameters: Sequence[LowBitTopP],
        codes: KeyCodes,
    ) -> None:
        super().__init__(context, scale, termination, parameters, codes)
        self._capped = torch.zeros(context.requests, dtype=torch.bool, device=context.device)

    @property
    def capped(self) -> Tensor:
        """Where ``max_tokens`` has cut a selection in some layer so far: bool [requests]."""
        return self._capped

    def chosen(self, requests: Coded[LowBitTopP], predicted: PredictedAttention) -> Tensor:
        alike, parameters, kept = requests.alike, requests.alike.key, len(requests.kept)
        least = alike.length if parameters.takes_all else parameters.min_tokens
        selected = predicted.reaching(aimed_share(parameters.p, self._codes.bits), least - kept).any(-2)
        most = max(kept, parameters.max_tokens or alike.length)
        is_cut = selected.sum(-1, keepdim=True) > most - kept
        # Where what the cap leaves would be read whole, it leaves all.
        if most > WHOLE_SHARE * alike.length or not bool(is_cut.any()):
            return selected
        self._capped[alike.rows] |= is_cut.any(1)[:, 0]
        best = highest(predicted.order().where(selected, LOWEST_KEY), most - kept)
        return best.where(is_cut, selected)

    def count(self, statistics: Statistics, table_rows: Tensor, layers: int) -> None:
        super().count(statistics, table_rows, layers)
        statistics.add(table_rows, Field.CAPPED_STEPS, self._capped)
