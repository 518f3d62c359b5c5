"""``lowbit_top_k``: a fixed number of tokens, by the shares of the attention that low-bit keys predict.

Beside sinks and the newest tokens, a KV head attends to those that hold most of its query heads' attention, each head's
share by its own softmax, mean over the group; in steps of 1/64 octave, and of equal ones to the first in the context.
What is always attended to is inside the budget, and when everything is (``decode.coded_tokens``).
"""

from __future__ import annotations

from torch import Tensor

from winnow_kernels.decode.coded_tokens import Coded, CodedStep
from winnow_kernels.decode.predicted_attention import PredictedAttention, highest
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK


class LowBitTopKStep(CodedStep[LowBitTopK]):
    """Choose the tokens with the largest shares."""

    def chosen(self, requests: Coded[LowBitTopK], predicted: PredictedAttention) -> Tensor:
        budget = requests.alike.key.tokens(requests.alike.length - 1)
        return highest(predicted.keys(), max(0, budget - len(requests.kept)))
