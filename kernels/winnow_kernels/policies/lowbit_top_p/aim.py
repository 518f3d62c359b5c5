"""The predicted share that a selection aims at, so that it holds the share that is asked for.

Tokens are chosen because their predicted scores are high. Of two that score alike, the one whose prediction errs
upwards comes first, so what is chosen holds less than predicted, and the rest more: the winner's curse. It grows with
the error of the codes, and depends little on p and on the length of the context.
"""

from __future__ import annotations

from typing import Final

from winnow_kernels.policies.lowbit_top_p.parameters import WHOLE_ABOVE

LEFT_OUT: Final = {2: 0.89, 3: 0.985, 4: 1.0}
"""By bits of a channel, which part of what p leaves out may be left out as codes predict it.

With that, query heads hold on average about what they would if exact scores chose: measured on keys and queries of real
text, at 7,680 and 32,768 tokens and p from 0.5 to 0.99 (``benchmarks/NOTES.md``, section 13).
"""


def aimed_share(p: float, bits: int) -> float:
    """Return the predicted share to reach with codes of ``bits`` bits where ``p`` is asked for.

    It is no less than p, and above ``WHOLE_ABOVE``, where everything is taken, only if p is.
    """
    return max(p, min(1 - LEFT_OUT[bits] * (1 - p), WHOLE_ABOVE))
