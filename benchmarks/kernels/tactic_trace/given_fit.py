"""Tactic's fit, after which each query head takes as many tokens as a trace says.

All that the fit does is done as ever, by its own kernel, called from the one here; then the head's place in its list
is sought once more, for the number of tokens given. So the launches of a selection are as many as ever, and one search
is in them that Tactic does not make: what is measured errs on the slow side.

A head takes exactly the tokens given, the last of them from a cluster that is taken in part. What the server says of
the share of the mass that is attended remains what the fit believes of its own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl

from benchmarks.kernels.tactic_trace.lengths import ServedLengths
from winnow_kernels.kernel_arguments import Constant, Heads, Number, Pointer
from winnow_kernels.policies.tactic.gpu.contexts import is_idle, row_at
from winnow_kernels.policies.tactic.gpu.fit import cut_of, fit_kernel
from winnow_kernels.policies.tactic.gpu.state import (
    CUT_KEY,
    CUT_LAST,
    CUT_TAKEN,
    CUT_TOKENS,
    CUTS,
    HISTOGRAM,
    Attention,
    Contexts,
    Fitted,
    Kept,
    Ranked,
    Scored,
)
from winnow_kernels.selection.gpu_threshold import HIGHEST

_HISTOGRAM = tl.constexpr(HISTOGRAM)


class Given(NamedTuple):
    """What query heads take in a layer: for each of some float64 shares and ``steps`` that many tokens of each.

    They are int32 [shares, steps, query heads], of ``clustered`` tokens in clusters.
    """

    tokens: Pointer
    shares: Pointer
    clustered: Number
    number_of_shares: Constant
    steps: Constant


class GivenFit:
    """Stands where ``winnow_kernels.policies.tactic.gpu.selection`` has ``fit_kernel``, and is launched as that is.

    Attributes:
        lengths: what query heads take; needed before the first launch.
        layer: of the launches to come.
    """

    def __init__(self) -> None:
        self.lengths: ServedLengths | None = None
        self.layer = 0

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        lengths = self.lengths
        if lengths is None:
            raise RuntimeError("the fit is launched before it is said how many tokens query heads take")
        _, shares, steps, _ = lengths.tokens.shape
        sizes = (tl.constexpr(shares), tl.constexpr(steps))
        given = Given(lengths.tokens[self.layer], lengths.shares, lengths.clustered, *sizes)
        given_fit_kernel[grid](*arguments, given, **constants)


@triton.jit  # type: ignore[untyped-decorator]
def given_fit_kernel(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    scored: Scored,
    kept: Kept,
    ranked: Ranked,
    fitted: Fitted,
    given: Given,
    block: tl.constexpr,
    known_block: tl.constexpr,
    fewest: tl.constexpr,
) -> None:
    """Do all that ``fit_kernel`` does for one query head, then take what is given.

    Of a share that is not there nothing is taken.
    """
    fit_kernel(attention, heads, contexts, scored, kept, ranked, fitted, block, known_block, fewest)
    head = tl.program_id(0)
    row = row_at(contexts, tl.program_id(1))
    if is_idle(row) | (row.clustered == 0) | (row.clusters <= fewest) | (row.clusters > block):
        return
    query_heads: tl.constexpr = heads.kv_heads * heads.group
    of_head = row.number.to(tl.int64) * query_heads + head
    tokens = row.clustered * 0
    for number in tl.static_range(given.number_of_shares):
        # Another step of the trace for each row and each token: rows of a batch do not all take the same.
        place = (number * given.steps + (row.length + row.number) % given.steps) * query_heads + head
        tokens += tl.where(tl.load(given.shares + number) == row.share, tl.load(given.tokens + place), 0)
    wanted = (tokens.to(tl.int64) * row.clustered // given.clustered).to(tl.int32)

    numbers = tl.max_contiguous(tl.arange(0, block), 1)
    present = numbers < row.clusters
    scores = tl.load(scored.scores + of_head * scored.clusters + numbers, mask=present, other=0.0)
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + head // heads.group
    sizes = tl.load(scored.sizes + of_kv_head * scored.clusters + numbers, mask=present, other=0)
    key, last, taken = wanted * 0 + HIGHEST, wanted * 0 - 1, wanted * 0
    if wanted > 0:
        key, last, taken = cut_of(scores, sizes, row, wanted, ranked.histogram + of_head * _HISTOGRAM)
    cuts_ptr = fitted.cuts + of_head * CUTS
    # What the fit has stored there comes first.
    tl.debug_barrier()
    tl.store(cuts_ptr + CUT_KEY, key)
    tl.store(cuts_ptr + CUT_LAST, last)
    tl.store(cuts_ptr + CUT_TAKEN, taken)
    tl.store(cuts_ptr + CUT_TOKENS, wanted)
