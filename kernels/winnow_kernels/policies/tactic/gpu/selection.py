"""Tactic's selection (``reference``): from centroids to slots without sorting anything.

    1. score   query · centroid for the whole group at once, and the exact weights' sum of the tokens in no cluster
    2. rank    for each query head the clusters of its first 2 % of tokens and of its two windows, by threshold
    3. sample  the exact weights of their members; a cluster that several query heads look at is read once
    4. fit     for each query head how many tokens it takes
    5. union   of which clusters some query head of a group takes something, slice by slice, and how much
    6. slots   the slots of the members that are taken, after a look at the slices before

What must be read: of each cluster a centroid, of each KV head once the sampled keys that some query head of its group
needs, and the keys of the tokens in no cluster: with one centroid for 16 keys, 2 % of exact weights and half of them
shared, 3 % and about 2.5 % of what dense attention reads. ``DecodeBatch.counts`` counts more, what the reference
counts: a sampled key for each query head. Beside that each query head writes and reads back 4 bytes a cluster (steps
1 to 5, from the L2 cache mostly), and each KV head 8: what a cluster's size is and where its members begin is looked up
through a row's spans once, in step 1. All but 2 and 4 deal a row's clusters out to many programs, so that a single
request keeps the GPU busy; what they take is their chain of dependent loads.

Sinks are tokens in no cluster like those behind all spans: the same programs score and write them.

Where the order matters (``in_order``: early termination, or a cap that cuts), two launches more after the union for a
counting sort (``order``), and where there may be a cap a third, for what is left
of the share (``order_capped``). Rows that do not need them leave them at once.

The set of tokens is the reference's, up to rounding (``fit``). Without ``in_order`` those in
no cluster come first, then clusters by number.
A row or KV head that attends to everything has ``WHOLE_TO_THE_END`` for a count: no selection is wider than three
quarters of the longest context.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import triton
from torch import Tensor

from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.cluster_tables import LayerClusters
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.kernel_arguments import Heads, Selected
from winnow_kernels.policies.tactic.gpu import fit as tactic_fit
from winnow_kernels.policies.tactic.gpu import order as tactic_order
from winnow_kernels.policies.tactic.gpu import ranks as tactic_ranks
from winnow_kernels.policies.tactic.gpu import scores as tactic_scores
from winnow_kernels.policies.tactic.gpu import slots as tactic_slots
from winnow_kernels.policies.tactic.gpu import union as tactic_union
from winnow_kernels.policies.tactic.gpu.contexts import LARGEST_GROUP
from winnow_kernels.policies.tactic.gpu.fit import fit_kernel
from winnow_kernels.policies.tactic.gpu.order import place_kernel, step_kernel
from winnow_kernels.policies.tactic.gpu.order_capped import capped_share_kernel
from winnow_kernels.policies.tactic.gpu.ranks import rank_kernel
from winnow_kernels.policies.tactic.gpu.samples import SLICE as SAMPLED_SLICE
from winnow_kernels.policies.tactic.gpu.samples import sample_kernel
from winnow_kernels.policies.tactic.gpu.scores import score_kernel
from winnow_kernels.policies.tactic.gpu.slots import slot_kernel
from winnow_kernels.policies.tactic.gpu.state import (
    SLICE,
    TAIL_SPLITS,
    Attention,
    Contexts,
    TacticBatch,
    TacticStatistics,
    TacticWorkspace,
    known_block_of,
)
from winnow_kernels.policies.tactic.gpu.union import union_kernel
from winnow_kernels.policies.tactic.reference import WHOLE_SHARE

MAX_CLUSTERS: Final = 16_384
"""Clusters of a row, at most, and so many that a program holds."""
MAX_TOKENS: Final = MAX_CLUSTERS * CLUSTER_SIZE
"""Tokens of a context, at most."""

# Clusters of 32K tokens; each width is a launch of two kernels, whose programs leave rows of other widths at once.
_NARROWEST: Final = 2048
_WIDER: Final = 4


def selection_width(longest: int) -> int:
    """Return how wide a selection must be for contexts of ``longest`` tokens."""
    return int(WHOLE_SHARE * longest)


def widths_of(block: int) -> list[tuple[int, int]]:
    """Return by how many clusters rows are told apart, each from more than the first up to the second number.

    A program costs what its block costs, however few of it are there: a server's block is that of its longest context.
    """
    widths = [-1]
    width = _NARROWEST
    while width < block:
        widths.append(width)
        width *= _WIDER
    return list(pairwise([*widths, block]))


def warps_of(block: int, clusters_of_thread: int) -> int:
    """Return the warps of a program that holds ``block`` clusters, so many in a thread if it can.

    Of ``MAX_CLUSTERS``, twice what 128K of context need, some spill nevertheless.
    """
    return min(32, max(4, block // (32 * clusters_of_thread)))


def select(
    queries: Tensor,
    cache: LayerCache,
    clusters: LayerClusters,
    batch: DecodeBatch,
    rows: TacticBatch,
    selection: DeviceSelection,
    workspace: TacticWorkspace,
    statistics: TacticStatistics,
    scale: float,
    *,
    in_order: bool,
    capped: bool,
) -> None:
    """Write the slots and counts of the kind's rows in one layer; count what is read, and what is believed.

    Args:
        queries: [rows, query heads, head dim], contiguous in the last two dimensions, of the dtype of the keys.
        cache: the layer's KV cache; keys contiguous in the last dimension.
        clusters: the layer's index.
        batch: the batch.
        rows: parameters of its rows.
        selection: what is written to, at least ``selection_width`` wide.
        workspace: for as many rows, heads and spans.
        statistics: what is added to.
        scale: what scores are multiplied by before the softmax.
        in_order: whether some row may be ``by_priority`` or capped; without it no row is put in order.
        capped: whether some row may have a cap; ``in_order`` must be true then.

    Raises:
        ValueError: the selection is too narrow, the group or the contexts are too large, or ``capped`` is said
            without ``in_order``.
    """
    kv_heads, width = selection.slots.shape[1:]
    query_heads = queries.shape[1]
    group = query_heads // kv_heads
    if batch.longest > MAX_TOKENS:
        raise ValueError(f"batch: contexts of at most {MAX_TOKENS} tokens, not {batch.longest}")
    if width < selection_width(batch.longest):
        raise ValueError(f"selection: must have room for {selection_width(batch.longest)} tokens; it has for {width}")
    if group > LARGEST_GROUP:
        raise ValueError(f"queries: at most {LARGEST_GROUP} query heads for a KV head; there are {group}")
    if capped and not in_order:
        raise ValueError("capped: what a cap cuts depends on the order, so in_order must be true")

    attention, heads = Attention.of(queries, cache, scale), Heads.of(query_heads, cache)
    contexts = Contexts.of(batch, rows, clusters)
    scored, kept, ranked, fitted, listed, ordered = workspace
    block, group_block = scored.clusters.value, triton.next_power_of_2(group)
    slices = block // SLICE
    offset_bytes = clusters.firsts.element_size() + clusters.offsets.element_size()

    programs = triton.cdiv(rows.entries.shape[1] * clusters.sizes.shape[2], tactic_scores.OF_PROGRAM)
    score_kernel[(TAIL_SPLITS + programs, kv_heads, batch.rows)](
        attention,
        heads,
        contexts,
        batch.counts,
        scored,
        kept,
        clusters.cluster_bytes * clusters.sizes.shape[2],
        kv_heads * cache.vector_bytes,
        in_order=in_order,
        num_warps=4,
    )
    for fewest, most in widths_of(block):
        rank_kernel[(query_heads, batch.rows)](
            contexts,
            heads,
            batch.counts,
            scored,
            ranked,
            cache.vector_bytes + offset_bytes,
            block=most,
            fewest=fewest,
            num_warps=warps_of(most, tactic_ranks.CLUSTERS_OF_THREAD),
        )
    sample_kernel[(block // SAMPLED_SLICE + 2 * group, kv_heads, batch.rows)](
        attention, heads, contexts, scored, ranked, listed, num_warps=4
    )
    for fewest, most in widths_of(block):
        fit_kernel[(query_heads, batch.rows)](
            attention,
            heads,
            contexts,
            scored,
            kept,
            ranked,
            fitted,
            block=most,
            known_block=known_block_of(most),
            fewest=fewest,
            num_warps=warps_of(most, tactic_fit.CLUSTERS_OF_THREAD),
        )
    union_slices = min(max(1, tactic_union.SLICES_OF_GROUP // group_block), slices)
    union_kernel[(slices // union_slices, kv_heads, batch.rows)](
        contexts,
        heads,
        scored,
        fitted,
        listed,
        group_block=group_block,
        of_program=union_slices,
        num_warps=4,
    )
    if in_order:
        step_kernel[(tactic_order.STEP_PROGRAMS, kv_heads, batch.rows)](
            contexts, heads, *workspace, attention.scale_log2, group_block=group_block, num_warps=4
        )
        place_kernel[(tactic_order.PLACE_PROGRAMS, kv_heads, batch.rows)](kept, ordered, scored.clusters, num_warps=4)
    if capped:
        capped_share_kernel[(query_heads, batch.rows)](
            attention, heads, contexts, scored, ranked, fitted, listed, ordered, num_warps=4
        )
    slot_kernel[(tactic_slots.KEPT_SPLITS + slices, kv_heads, batch.rows)](
        contexts,
        heads,
        batch.counts,
        scored,
        kept,
        fitted,
        listed,
        ordered,
        statistics,
        Selected.of(selection),
        offset_bytes,
        in_order=in_order,
        num_warps=4,
    )
