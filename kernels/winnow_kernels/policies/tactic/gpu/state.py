"""What the kernels of ``selection`` hand on to each other, and functions that several of them use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import COUNTS, NO_MASS, Count
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.policies.tactic.reference import LISTED_SHARE, SHARE_STEPS, WHOLE_SHARE, WINDOW_CLUSTERS
from winnow_kernels.selection.gpu_threshold import HIGHEST, weight_of

LARGEST_GROUP: Final = 16
"""Query heads of a KV head: the rows of a tensor core's tile, which smaller groups are padded to."""
TAIL_SPLITS: Final = 2
"""Programs among which the tokens in no cluster are dealt out, of a row and KV head."""
WINDOWS: Final = 2 * WINDOW_CLUSTERS
"""Clusters of a query head's near and far window."""
HISTOGRAM: Final = 2048
"""Bins among which a query head's clusters can be counted."""
SLICE: Final = 128
"""Clusters of a row that are listed together for a KV head."""
RUN: Final = 64
"""Listed clusters of a row and KV head that are put in order among themselves, and then among the others."""

KEPT_BLOCK: Final = CLUSTER_SIZE
"""Tokens in no cluster that are put in order together."""

NOTHING: Final = tl.constexpr(NO_MASS)
GROUP_BLOCK: Final = tl.constexpr(LARGEST_GROUP)
_WHOLE_SHARE = tl.constexpr(WHOLE_SHARE)
_SLICE = tl.constexpr(SLICE)
_COUNTS = tl.constexpr(COUNTS)
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))


class Rank(IntEnum):
    """A number in ``TacticWorkspace.ranks``.

    KNOWN tokens, in KNOWN_CLUSTERS clusters, have exact weights: up to and with those of cluster KNOWN_LAST, whose key
    is KNOWN_KEY and before which KNOWN_START tokens come. Windows hold …_TOKENS, after …_BEFORE others.
    """

    KNOWN = 0
    KNOWN_CLUSTERS = 1
    KNOWN_KEY = 2
    KNOWN_LAST = 3
    KNOWN_START = 4
    NEAR_BEFORE = 5
    NEAR_TOKENS = 6
    FAR_BEFORE = 7
    FAR_TOKENS = 8


class Cut(IntEnum):
    """A number in ``TacticWorkspace.cuts``: a query head takes TOKENS, the last TAKEN of them from cluster LAST."""

    KEY = 0
    LAST = 1
    TAKEN = 2
    TOKENS = 3


class Fit(IntEnum):
    """A number in ``TacticWorkspace.fits``: log2 of the unit of all masses, masses, the curve and its end."""

    REFERENCE = 0
    OUTSIDE = 1
    FIRST = 2
    TOTAL = 3
    A = 4
    B = 5
    END = 6


# The numbers above, as kernels can use them.
RANKS = tl.constexpr(len(Rank))
RANK_KNOWN = tl.constexpr(int(Rank.KNOWN))
RANK_KNOWN_CLUSTERS = tl.constexpr(int(Rank.KNOWN_CLUSTERS))
RANK_KNOWN_KEY = tl.constexpr(int(Rank.KNOWN_KEY))
RANK_KNOWN_LAST = tl.constexpr(int(Rank.KNOWN_LAST))
RANK_KNOWN_START = tl.constexpr(int(Rank.KNOWN_START))
RANK_NEAR_BEFORE = tl.constexpr(int(Rank.NEAR_BEFORE))
RANK_NEAR_TOKENS = tl.constexpr(int(Rank.NEAR_TOKENS))
RANK_FAR_BEFORE = tl.constexpr(int(Rank.FAR_BEFORE))
RANK_FAR_TOKENS = tl.constexpr(int(Rank.FAR_TOKENS))
CUTS = tl.constexpr(len(Cut))
CUT_KEY = tl.constexpr(int(Cut.KEY))
CUT_LAST = tl.constexpr(int(Cut.LAST))
CUT_TAKEN = tl.constexpr(int(Cut.TAKEN))
CUT_TOKENS = tl.constexpr(int(Cut.TOKENS))
FITS = tl.constexpr(len(Fit))
FIT_REFERENCE = tl.constexpr(int(Fit.REFERENCE))
FIT_OUTSIDE = tl.constexpr(int(Fit.OUTSIDE))
FIT_FIRST = tl.constexpr(int(Fit.FIRST))
FIT_TOTAL = tl.constexpr(int(Fit.TOTAL))
FIT_A = tl.constexpr(int(Fit.A))
FIT_B = tl.constexpr(int(Fit.B))
FIT_END = tl.constexpr(int(Fit.END))


@dataclass(frozen=True, eq=False)
class TacticWorkspace:
    """What is handed on from launch to launch, for one layer at a time.

    For a row, 13 bytes a cluster and query head, 48 a cluster and KV head, and 8 KiB a query head: 209 MiB for 32 rows
    of 128K tokens with 32 query and 8 KV heads. What else there is is less than a hundredth of that.

    Attributes:
        scores: float32 [rows, query heads, clusters]; query · centroid, in the steps in which clusters are ranked.
        cluster_sizes: int32 [rows, KV heads, clusters]; members of each cluster, by number.
        cluster_firsts: int32, same shape; where in a head's offsets they begin.
        masses: float32, same shape; of the clusters with exact weights the logarithm (base 2) of the weights' sum.
        known: int32 [rows, query heads, clusters / 4]; the clusters with exact weights.
        tails: float32 [rows, query heads, TAIL_SPLITS, 2]; of the tokens in no cluster: the largest score, and the sum
            of the weights relative to it.
        kept_weights: float32 [rows, query heads, blocks]; of each KEPT_BLOCK tokens in no cluster, from the newest
            back, the logarithm (base 2) of the mean weight. Where the order matters.
        windows: int32 [rows, query heads, WINDOWS]; clusters of both windows.
        window_masses: float32, same shape; logarithms of their masses, as the sample has them.
        histogram: int32 [rows, query heads, HISTOGRAM]; scratch of the searches.
        ranks: int32 [rows, query heads, Rank].
        cuts: int32 [rows, query heads, Cut].
        fits: float64 [rows, query heads, Fit].
        shares: float64 [rows, query heads]; share of the mass that is believed to be attended in this layer.
        totals: int32 [rows, KV heads, clusters / SLICE]; of each slice of a row's clusters those of which something is
            taken, and how many tokens: ``counted`` sums. What is by slice and cluster lies at the front of its slice:
        listed: int32 [rows, KV heads, clusters]; clusters of which something is taken, by number.
        firsts: int32, same shape; where in a head's offsets their members begin.
        starts: int32, same shape; how many tokens the clusters before them in the slice bring.
        needed: int32, same shape; how many members are taken.
        places: int32, same shape; how many tokens come before them (at first: of their run), where the order matters.
        placed: int32 [rows, KV heads]; how many clusters are listed, 0 where the order does not matter.
        steps: int32 [rows, KV heads, clusters]; of these, without gaps between slices, the step of the best share that
            a token has for a query head of the group, and SHARE_STEPS times where they lie in the lists.
        step_sums: int32 [rows, KV heads, clusters / RUN, SHARE_STEPS]; how many tokens are taken of the clusters of
            each run that are in a step or an earlier one.
        targets: int32 [rows, KV heads, clusters]; as ``places``, with the tokens in no cluster that come before.
        kept_placed: int32 [rows, KV heads, 2]; how many tokens in no cluster are put in order, 0 where the order does
            not matter, and how many tokens of clusters are.
        kept_steps: int32 [rows, KV heads, blocks]; the step of the best share that a token of a block has on average.
        kept_sums: int32 [rows, KV heads, SHARE_STEPS]; tokens of blocks in a step or an earlier one.
        kept_targets: int32 [rows, KV heads, blocks]; how many tokens come before a block, those of clusters included.
    """

    scores: Tensor
    cluster_sizes: Tensor
    cluster_firsts: Tensor
    masses: Tensor
    known: Tensor
    tails: Tensor
    kept_weights: Tensor
    windows: Tensor
    window_masses: Tensor
    histogram: Tensor
    ranks: Tensor
    cuts: Tensor
    fits: Tensor
    shares: Tensor
    totals: Tensor
    listed: Tensor
    firsts: Tensor
    starts: Tensor
    needed: Tensor
    places: Tensor
    placed: Tensor
    steps: Tensor
    step_sums: Tensor
    targets: Tensor
    kept_placed: Tensor
    kept_steps: Tensor
    kept_sums: Tensor
    kept_targets: Tensor

    @classmethod
    def empty(
        cls, rows: int, query_heads: int, kv_heads: int, spans: int, span: int, device: torch.device
    ) -> TacticWorkspace:
        """Return space for ``rows`` rows with at most ``spans`` spans of ``span`` tokens each."""
        clusters = block_of(spans * span // CLUSTER_SIZE)
        # A context may end within the span behind the last.
        kept_blocks = (spans + 1) * span // KEPT_BLOCK
        heads, kv = (rows, query_heads), (rows, kv_heads)

        def space(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            scores=space(*heads, clusters, dtype=torch.float32),
            cluster_sizes=space(*kv, clusters),
            cluster_firsts=space(*kv, clusters),
            masses=space(*heads, clusters, dtype=torch.float32),
            known=space(*heads, known_block_of(clusters)),
            tails=space(*heads, TAIL_SPLITS, 2, dtype=torch.float32),
            kept_weights=space(*heads, kept_blocks, dtype=torch.float32),
            windows=space(*heads, WINDOWS),
            window_masses=space(*heads, WINDOWS, dtype=torch.float32),
            histogram=space(*heads, HISTOGRAM),
            ranks=space(*heads, len(Rank)),
            cuts=space(*heads, len(Cut)),
            fits=space(*heads, len(Fit), dtype=torch.float64),
            shares=space(*heads, dtype=torch.float64),
            totals=space(*kv, clusters // SLICE),
            listed=space(*kv, clusters),
            firsts=space(*kv, clusters),
            starts=space(*kv, clusters),
            needed=space(*kv, clusters),
            places=space(*kv, clusters),
            placed=space(*kv),
            steps=space(*kv, clusters),
            step_sums=space(*kv, clusters // RUN, SHARE_STEPS),
            targets=space(*kv, clusters),
            kept_placed=space(*kv, 2),
            kept_steps=space(*kv, kept_blocks),
            kept_sums=space(*kv, SHARE_STEPS),
            kept_targets=space(*kv, kept_blocks),
        )


def block_of(clusters: int) -> int:
    """Return how many clusters a program that looks at all of a row holds: a power of two."""
    return max(128, triton.next_power_of_2(clusters))


def known_block_of(block: int) -> int:
    """Return how many of ``block`` clusters can have exact weights, at most."""
    return int(LISTED_SHARE * block)


@triton.jit  # type: ignore[untyped-decorator]
def shape_of(
    lengths_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    row: tl.tensor,
    span: tl.constexpr,
    of_span: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return of a row the tokens, its sinks, the tokens in clusters behind these, and the number of its clusters."""
    length, end, sinks = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row), tl.load(sinks_ptr + row)
    return length, sinks, tl.maximum(end - sinks, 0), tl.maximum(end // span - sinks // span, 0) * of_span


@triton.jit  # type: ignore[untyped-decorator]
def kept_positions(places: tl.tensor, length: tl.tensor, sinks: tl.tensor) -> tl.tensor:
    """Return the positions of tokens in no cluster at ``places`` of their order: sinks, then the newest first."""
    return tl.where(places < sinks, places, length - 1 - (places - sinks))


@triton.jit  # type: ignore[untyped-decorator]
def span_table(table_ptr: tl.tensor, sinks: tl.tensor, span: tl.constexpr, page_size: tl.constexpr) -> tl.tensor:
    """Return where a row's page table has the first span with clusters, that in which the sinks end."""
    return table_ptr + sinks // span * (span // page_size)


@triton.jit  # type: ignore[untyped-decorator]
def kept_tokens(length: tl.tensor, clustered: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return how many tokens in no cluster are attended to: all, or as many as the cap, if there is one, lets."""
    return tl.minimum(length - clustered, tl.where(cap > 0, cap, length))


@triton.jit  # type: ignore[untyped-decorator]
def exceeds(count: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Return whether ``count`` tokens are so much of the context that all of it is read instead."""
    return count.to(tl.float32) > _WHOLE_SHARE * length.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def united(
    totals_ptr: tl.tensor,
    length: tl.tensor,
    clustered: tl.tensor,
    count: tl.tensor,
    cap: tl.tensor,
    slices: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return what is taken for one KV head of a row that is not idle.

    Args:
        totals_ptr: its slices' totals.
        length: tokens of the row.
        clustered: tokens of the row in clusters.
        count: clusters of the row.
        cap: the row's.
        slices: how many slices a row can have.

    Returns:
        The totals, packed, int32 [slices]; tokens in no cluster that are kept; tokens that are taken of clusters within
        the cap, -1 where the whole context is attended to instead; tokens that are needed of clusters.
    """
    each = tl.arange(0, slices)
    totals = tl.load(totals_ptr + each, mask=each * _SLICE < count, other=0)
    wanted = tl.sum(weight_of(totals), axis=0)
    kept = kept_tokens(length, clustered, cap)
    taken = tl.minimum(wanted, tl.where(cap > 0, cap, length) - kept)
    return totals, kept, tl.where(exceeds(kept + taken, length), -1, taken), wanted


@triton.jit  # type: ignore[untyped-decorator]
def needs_order(taken: tl.tensor, wanted: tl.tensor, is_ordered: tl.tensor) -> tl.tensor:
    """Return whether clusters of which so much is ``taken`` and ``wanted`` must be put in order."""
    return (taken > 0) & ((is_ordered != 0) | (wanted > taken))


@triton.jit  # type: ignore[untyped-decorator]
def is_idle(share: tl.tensor, length: tl.tensor, clustered: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return whether nothing need be scored: not a row of the kind, or one that attends to everything anyway."""
    return (share == 0) | exceeds(kept_tokens(length, clustered, cap), length)


@triton.jit  # type: ignore[untyped-decorator]
def count_read(counts_ptr: tl.tensor, row: tl.tensor, amount: tl.tensor) -> None:
    """Count bytes that a row read."""
    tl.atomic_add(counts_ptr + row * _COUNTS + _READ_BYTES, amount.to(tl.int64), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def through(keys: tl.tensor, places: tl.tensor, key: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Return which clusters come up to and with ``last``, whose key is ``key``; of equal keys the first come first."""
    return (keys > key) | ((keys == key) & (places <= last))


@triton.jit  # type: ignore[untyped-decorator]
def tied(
    keys: tl.tensor,
    weights: tl.tensor,
    places: tl.tensor,
    key: tl.tensor,
    reached: tl.tensor,
    wanted: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return which of the clusters that share a threshold is the last one needed, and what comes before it.

    Args:
        keys: int32 [n].
        weights: [n], not negative.
        places: int32 [n]; the clusters' numbers.
        key: scalar; the threshold.
        reached: scalar; weight of the clusters at or above the threshold, at least ``wanted``.
        wanted: scalar; weight that is needed; the clusters above the threshold have less.
    """
    is_tied = (keys == key) & (weights > 0)
    before = reached - tl.sum(tl.where(is_tied, weights, 0), axis=0)
    last = tl.max(tl.where(is_tied, places, -1), axis=0)
    if tl.sum(is_tied.to(tl.int32), axis=0) > 1:
        missing = wanted - before
        low = tl.min(places, axis=0) - 1
        while low + 1 < last:
            middle = (low + last) // 2
            enough = tl.sum(tl.where(is_tied & (places <= middle), weights, 0), axis=0) >= missing
            last = tl.where(enough, middle, last)
            low = tl.where(enough, low, middle)
        before += tl.sum(tl.where(is_tied & (places < last), weights, 0), axis=0)
    return last, before


@triton.jit  # type: ignore[untyped-decorator]
def places_of(starts_ptr: tl.tensor, tokens: tl.tensor, listed: tl.tensor, most: tl.constexpr) -> tl.tensor:
    """Return to which cluster of a list tokens belong: the last that begins by then.

    Args:
        starts_ptr: how many tokens come before each cluster of the list.
        tokens: int32 [n]; counted through the list.
        listed: scalar; clusters in the list, at most ``most``, a power of two up to 256.
    """
    place = tokens * 0
    for halved in tl.static_range(1, 9):
        if most >> halved > 0:
            later = place + (most >> halved)
            start = tl.load(starts_ptr + later, mask=later < listed, other=HIGHEST)
            place = tl.where(start <= tokens, later, place)
    return place


@triton.jit  # type: ignore[untyped-decorator]
def addresses_of(
    entries_ptr: tl.tensor,
    clusters: tl.tensor,
    is_cluster: tl.tensor,
    kv_head: tl.tensor,
    capacity: tl.tensor,
    of_span: tl.constexpr,
) -> tl.tensor:
    """Return where in a layer's tables of clusters the ``clusters`` of a row are: counted through heads and entries.

    Args:
        entries_ptr: the row's entries.
        clusters: int32; numbers of clusters, counted through the row's spans.
        is_cluster: bool, same shape; elsewhere nothing is read.
        kv_head: scalar.
        capacity: entries of a head.
        of_span: clusters of a span.
    """
    entry = tl.load(entries_ptr + clusters // of_span, mask=is_cluster, other=0).to(tl.int64)
    return (kv_head.to(tl.int64) * capacity + entry) * of_span + clusters % of_span


@triton.jit  # type: ignore[untyped-decorator]
def member_slots(
    firsts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    addresses: tl.tensor,
    clusters: tl.tensor,
    ranks: tl.tensor,
    is_member: tl.tensor,
    kv_head: tl.tensor,
    capacity: tl.tensor,
    of_span: tl.constexpr,
    span: tl.constexpr,
    page_size: tl.constexpr,
) -> tl.tensor:
    """Return the slots of members of clusters, int32; 0 where not ``is_member``. ``table_ptr`` is a ``span_table``."""
    first = tl.load(firsts_ptr + addresses, mask=is_member, other=0)
    offset_ptr = offsets_ptr + kv_head.to(tl.int64) * capacity * span + first + ranks
    offset = tl.load(offset_ptr, mask=is_member, other=0).to(tl.int32)
    return slots_at(table_ptr, clusters // of_span * span + offset, is_member, page_size)


@triton.jit  # type: ignore[untyped-decorator]
def slots_at(table_ptr: tl.tensor, positions: tl.tensor, is_token: tl.tensor, page_size: tl.constexpr) -> tl.tensor:
    """Return the slots at ``positions`` of a row; ``table_ptr`` is its page table."""
    page = tl.load(table_ptr + positions // page_size, mask=is_token, other=0)
    return page * page_size + positions % page_size


@triton.jit  # type: ignore[untyped-decorator]
def keys_at(
    keys_ptr: tl.tensor,
    slots: tl.tensor,
    is_token: tl.tensor,
    slot_stride: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
) -> tl.tensor:
    """Return the keys of a KV head at ``slots``, [n, dim_block]; 0 where not ``is_token`` and beyond the head dim."""
    dims = tl.arange(0, dim_block)
    addresses = keys_ptr + slots.to(tl.int64)[:, None] * slot_stride + dims[None, :]
    return tl.load(addresses, mask=is_token[:, None] & (dims < head_dim)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def group_queries(
    queries_ptr: tl.tensor,
    row: tl.tensor,
    kv_head: tl.tensor,
    row_stride: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
) -> tl.tensor:
    """Return the queries of a KV head's group, [GROUP_BLOCK, dim_block]; 0 in what pads them."""
    heads, dims = tl.arange(0, GROUP_BLOCK), tl.arange(0, dim_block)
    addresses = queries_ptr + row.to(tl.int64) * row_stride + (kv_head * group + heads)[:, None] * head_dim + dims[None]
    return tl.load(addresses, mask=(heads < group)[:, None] & (dims < head_dim)[None], other=0.0)
