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
from typing import Any

import triton
import triton.language as tl

from benchmarks.kernels.tactic_trace.lengths import ServedLengths
from winnow_kernels.policies.tactic.gpu.fit import cut, fit_kernel
from winnow_kernels.policies.tactic.gpu.search import number_of, score_key_of, unique_keys
from winnow_kernels.policies.tactic.gpu.state import (
    CUT_KEY,
    CUT_LAST,
    CUT_TAKEN,
    CUT_TOKENS,
    CUTS,
    HISTOGRAM,
    is_idle,
    shape_of,
)
from winnow_kernels.selection.gpu_threshold import HIGHEST, LOWEST, counted, packed_of

_HISTOGRAM = tl.constexpr(HISTOGRAM)


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
        given_fit_kernel[grid](
            *arguments,
            lengths.tokens[self.layer],
            lengths.shares,
            lengths.clustered,
            **constants,
            shares=shares,
            steps=steps,
        )


@triton.jit  # type: ignore[untyped-decorator]
def given_fit_kernel(
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    cluster_sizes_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    known_ptr: tl.tensor,
    tails_ptr: tl.tensor,
    window_masses_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    fits_ptr: tl.tensor,
    histogram_ptr: tl.tensor,
    head_shares_ptr: tl.tensor,
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    entries_stride: tl.tensor,
    capacity: tl.tensor,
    given_ptr: tl.tensor,
    given_shares_ptr: tl.tensor,
    given_clustered: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    clusters: tl.constexpr,
    known_clusters: tl.constexpr,
    block: tl.constexpr,
    known_block: tl.constexpr,
    fewest: tl.constexpr,
    shares: tl.constexpr,
    steps: tl.constexpr,
) -> None:
    """Do all that ``fit_kernel`` does for one query head, then take what is given.

    Args are those of ``fit_kernel``, and of the layer int32 [shares, steps, query heads] tokens that are taken of
    ``given_clustered`` in clusters, and float64 [shares]. Of a share that is not there nothing is taken.
    """
    fit_kernel(
        queries_ptr, keys_ptr, cluster_sizes_ptr, firsts_ptr, offsets_ptr, table_ptr, lengths_ptr, entries_ptr,
        clustered_ptr, sinks_ptr, shares_ptr, caps_ptr, scores_ptr, masses_ptr, known_ptr, tails_ptr,
        window_masses_ptr, ranks_ptr, cuts_ptr, fits_ptr, histogram_ptr, head_shares_ptr, scale_log2, query_stride,
        slot_stride, head_stride, table_stride, entries_stride, capacity, kv_heads, group, head_dim, dim_block,
        page_size, span, of_span, clusters, known_clusters, block, known_block, fewest,
    )  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, _, tokens, count = shape_of(lengths_ptr, clustered_ptr, sinks_ptr, row, span, of_span)
    if is_idle(share, length, tokens, cap) | (tokens == 0) | (count <= fewest) | (count > block):
        return
    heads: tl.constexpr = kv_heads * group
    of_head = row.to(tl.int64) * heads + head
    given = tokens * 0
    for number in tl.static_range(shares):
        # Another step of the trace for each row and each token: rows of a batch do not all take the same.
        place = (number * steps + (length + row) % steps) * heads + head
        given += tl.where(tl.load(given_shares_ptr + number) == share, tl.load(given_ptr + place), 0)
    wanted = (given.to(tl.int64) * tokens // given_clustered).to(tl.int32)

    numbers = tl.max_contiguous(tl.arange(0, block), 1)
    present = numbers < count
    scores = tl.load(scores_ptr + of_head * clusters + numbers, mask=present, other=0.0)
    sizes_ptr = cluster_sizes_ptr + (row.to(tl.int64) * kv_heads + head // group) * clusters
    sizes = tl.load(sizes_ptr + numbers, mask=present, other=0)
    key, last, taken = tokens * 0 + HIGHEST, tokens * 0 - 1, tokens * 0
    if wanted > 0:
        last_key, start = cut(
            tl.where(present, unique_keys(scores, numbers), LOWEST), tl.where(present, counted(sizes), 0),
            packed_of(count, tokens).to(tl.uint32, bitcast=True), wanted, histogram_ptr + of_head * _HISTOGRAM,
        )  # fmt: skip
        key, last, taken = score_key_of(last_key), number_of(last_key), wanted - start
    cuts_ptr += of_head * CUTS
    # What the fit has stored there comes first.
    tl.debug_barrier()
    tl.store(cuts_ptr + CUT_KEY, key)
    tl.store(cuts_ptr + CUT_LAST, last)
    tl.store(cuts_ptr + CUT_TAKEN, taken)
    tl.store(cuts_ptr + CUT_TOKENS, wanted)
