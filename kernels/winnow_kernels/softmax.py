"""What some models change of attention's softmax: a bound on its scores, and a sink that takes a part of it.

- **Soft cap** (Gemma 2): a scaled score s becomes cap · tanh(s ÷ cap) before the softmax.
- **Sink logits** (gpt-oss): each query head has one more score, learned, that belongs to no token. It takes its part of
  the softmax and has no value, so that a head can attend to nothing.

With a sink logit z and tokens whose scores have the log-sum-exp m, outputs are those without a sink times
σ(m − z) = exp(m) ÷ (exp(m) + exp(z)). So a sink is applied once, after all parts of a context have been merged.

Log-sum-exps, shares of the attention, and what selectors predict of them are of tokens alone, here and everywhere: what
a sink takes is on neither side. A share of 0.9 means that an output is made of nine tenths of the mass of all tokens,
however much the sink takes. Of less mass a sink leaves less: σ(m + log p − z) of an output over tokens that hold the
share p, which is at least p times σ(m − z).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Softmax:
    """What a layer's softmax has beside tokens' scores.

    Attributes:
        cap: what bounds scaled scores; None for none.
        sink_logits: floats [query heads], of any dtype; None for no sinks.
    """

    cap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def cap_log2(self) -> float | None:
        """The cap of scores to base 2; None for none."""
        return None if self.cap is None else self.cap * math.log2(math.e)

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing."""
        return self.cap is None and self.sink_logits is None

    def kept_by_sinks(self, log_sum_exp: Tensor) -> Tensor | None:
        """Return what sinks leave of outputs over tokens that weigh ``log_sum_exp``, [..., query heads]; None if all.

        Returns:
            float, shape of ``log_sum_exp``.
        """
        return None if self.sink_logits is None else torch.sigmoid(log_sum_exp - self.sink_logits.float())

    def with_sinks(self, outputs: Tensor, log_sum_exp: Tensor) -> Tensor:
        """Return attention's outputs with sinks, given those over all tokens without.

        Args:
            outputs: [..., query heads, head dim].
            log_sum_exp: [..., query heads]; natural logarithm, of the tokens' scores.

        Returns:
            Like ``outputs``.
        """
        kept = self.kept_by_sinks(log_sum_exp)
        return outputs if kept is None else (outputs * kept[..., None]).to(outputs.dtype)


PLAIN: Final = Softmax()
"""The softmax of most models."""


def capped(scores: Tensor, cap: float | None, unit: float = 1.0) -> Tensor:
    """Return scaled scores with a soft cap; themselves without one.

    Args:
        scores: of any shape.
        cap: bounds the scores; None for no cap.
        unit: as what a score of 1 is written in ``scores``: log2 e where these are logarithms to base 2.
    """
    return scores if cap is None else (scores / (cap * unit)).tanh() * (cap * unit)
