"""Tactic's selection (``reference``): from centroids to slots without sorting anything.

    1. score  query · centroid and what the keys' spread adds, for the whole group at once; the exact weights' sum of
              the tokens in no cluster
    2. cut    for each query head the step of scores down to which it takes clusters
    3. union  which clusters some query head of a group takes, slice by slice; of the others, what they are predicted
              to weigh, and what a sample of their keys weighs
    4. slots  the slots of the members that are taken, after a look at the slices before

What must be read: of each cluster a centroid, its spread and its size, the keys of the tokens in no cluster, and for
each KV head at most some 600 sampled keys. Beside that each query head writes and reads back 4 bytes a cluster (steps 1
to 3, from the L2 cache mostly), and each KV head 20: what a cluster's size is and where its members begin is looked up
through a row's spans once, in step 1. All but 2 deal a row's clusters out to many programs, so that a single request
keeps the GPU busy; what they take is their chain of dependent loads.

Sinks are tokens in no cluster like those behind all spans: the same programs score and write them.

Where the order matters (``in_order``: early termination, or a cap that cuts), two launches more after the union for a
counting sort (``order``), and where there may be a cap a third, for what it cuts off. Rows that do not need them leave
them at once.

The set of tokens is the reference's, up to rounding. Without ``in_order`` those in no cluster come first, then clusters
by number. A row or KV head that attends to everything has ``WHOLE_TO_THE_END`` for a count: no selection is wider than
three quarters of the longest context.
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
from winnow_kernels.policies.tactic.gpu import cuts as tactic_cuts
from winnow_kernels.policies.tactic.gpu import order as tactic_order
from winnow_kernels.policies.tactic.gpu import scores as tactic_scores
from winnow_kernels.policies.tactic.gpu import slots as tactic_slots
from winnow_kernels.policies.tactic.gpu import union as tactic_union
from winnow_kernels.policies.tactic.gpu.contexts import LARGEST_GROUP
from winnow_kernels.policies.tactic.gpu.cuts import cut_kernel
from winnow_kernels.policies.tactic.gpu.order import lost_kernel, place_kernel, step_kernel
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
)
from winnow_kernels.policies.tactic.gpu.union import union_kernel
from winnow_kernels.policies.tactic.reference import WHOLE_SHARE

MAX_CLUSTERS: Final = 16_384
"""Clusters of a row, at most, and so many that a program holds."""
MAX_TOKENS: Final = MAX_CLUSTERS * CLUSTER_SIZE
"""Tokens of a context, at most."""

# Clusters of 32K tokens; each width is a launch, whose programs leave rows of other widths at once.
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
    scored, kept, cuts, outside, listed, ordered = workspace
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
        clusters.cluster_bytes,
        kv_heads * cache.vector_bytes,
        in_order=in_order,
        num_warps=4,
    )
    for fewest, most in widths_of(block):
        cut_kernel[(query_heads, batch.rows)](
            contexts,
            heads,
            scored,
            kept,
            cuts,
            block=most,
            fewest=fewest,
            num_warps=warps_of(most, tactic_cuts.CLUSTERS_OF_THREAD),
        )
    of_union = min(max(1, tactic_union.SLICES_OF_GROUP // group_block), slices)
    union_kernel[(slices // of_union, kv_heads, batch.rows)](
        attention,
        heads,
        contexts,
        batch.counts,
        scored,
        cuts,
        outside,
        listed,
        cache.vector_bytes + offset_bytes,
        group_block=group_block,
        of_program=of_union,
        in_order=in_order,
        num_warps=4,
    )
    if in_order:
        step_kernel[(tactic_order.STEP_PROGRAMS, kv_heads, batch.rows)](
            contexts, heads, scored, kept, cuts, listed, ordered, group_block=group_block, num_warps=4
        )
        place_kernel[(tactic_order.PLACE_PROGRAMS, kv_heads, batch.rows)](kept, ordered, scored.clusters, num_warps=4)
    if capped:
        lost_kernel[(query_heads, batch.rows)](attention, heads, contexts, scored, cuts, listed, ordered, num_warps=4)
    slot_kernel[(tactic_slots.KEPT_SPLITS + slices, kv_heads, batch.rows)](
        contexts,
        heads,
        batch.counts,
        scored,
        kept,
        cuts,
        outside,
        listed,
        ordered,
        statistics,
        Selected.of(selection),
        offset_bytes,
        of_union=of_union,
        in_order=in_order,
        num_warps=4,
    )
