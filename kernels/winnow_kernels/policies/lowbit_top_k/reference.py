"""``lowbit_top_k``: a fixed number of tokens, by the shares of the attention that low-bit keys predict.

Beside sinks and the newest tokens, a KV head attends to those that hold most of its query heads' attention, each head's
share by its own softmax, mean over the group; in steps of 1/64 octave, and of equal ones to the first in the context.
What is always attended to is inside the budget, and when everything is (``decode.coded_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.cache import Context
from winnow_kernels.decode.coded_tokens import CodedStep
from winnow_kernels.decode.predicted_attention import PredictedAttention, highest
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK


class LowBitTopKStep(CodedStep):
    """Choose the tokens with the largest shares."""

    def __init__(
        self,
        context: Context,
        scale: float,
        termination: Termination | None,
        parameters: Sequence[LowBitTopK],
        codes: KeyCodes,
    ) -> None:
        super().__init__(context, scale, termination, [own.sinks for own in parameters], codes)
        self._budgets = [own.tokens(length - 1) for own, length in zip(parameters, self.lengths, strict=True)]

    def chosen(self, request: int, predicted: PredictedAttention) -> Tensor:
        return highest(predicted.keys(), max(0, self._budgets[request] - len(self.kept[request])))
