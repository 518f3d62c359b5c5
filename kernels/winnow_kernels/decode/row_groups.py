"""Steps in which some rows attend otherwise than others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter

Attend = Callable[[Tensor, Meter], Tensor]
"""Returns the attention output of some rows, given their queries and a meter of their own."""


def attend_rows(rows: Sequence[int], attend: Attend, queries: Tensor, meter: Meter, output: Tensor) -> None:
    """Attend with some rows of a step; put their outputs and counts where these belong.

    Args:
        rows: numbers of the rows; nothing happens without any.
        attend: what these rows do.
        queries: [requests, query heads, head dim] of the whole step.
        meter: of the whole step.
        output: like ``queries``; filled in at ``rows``.
    """
    if not rows:
        return
    if len(rows) == len(queries):
        output.copy_(attend(queries, meter))
        return
    own = meter.of_rows(len(rows))
    indices = list(rows)
    output[indices] = attend(queries[indices], own)
    meter.add(own, indices)


def termination_of(termination: Termination | None, rows: Sequence[int]) -> Termination | None:
    """Return the thresholds of some rows of a step."""
    if termination is None:
        return None
    indices = list(rows)
    return Termination(termination.scale[indices], termination.direction[indices], termination.patience[indices])
