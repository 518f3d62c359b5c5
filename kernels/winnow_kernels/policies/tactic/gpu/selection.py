"""Tactic's selection (``reference``): from centroids to slots without sorting anything.

    1. score  query · centroid and what the keys' spread adds, for the whole group at once; the exact weights' sum of
              the tokens in no cluster
    2. cut    for each query head the step of scores down to which it takes clusters
    3. union  which clusters some query head of a group takes, slice by slice; of the others, what they are predicted
              to weigh, and what a sample of their keys weighs
    4. slots  the slots of the members that are taken, after a look at the slices before

What must be read: of each cluster a centroid, its spread and its size, the keys of the tokens in no cluster, and for
each KV head at most some 600 sampled keys. Beside that each query head writes and reads back 2 bytes a cluster (steps 1
and 3, from the L2 cache mostly). Step 1 counts for each query head the tokens of each step of scores too, modulo
``WINDOW``, so that step 2 reads no clusters; where scores differ so much that this mixes steps up, it counts again. All
but 2 deal a row's clusters out to many programs, so that a single request keeps the GPU busy; what they take is their
chain of dependent loads.

Sinks are tokens in no cluster like those behind all spans: the same programs score and write them.

Where the order matters (``in_order``: early termination, or a cap that cuts), two launches more after the union for a
counting sort (``order``), and where there may be a cap a third, for what it cuts off. Rows that do not need them leave
them at once.

The set of tokens is the reference's, up to rounding. Without ``in_order`` those in no cluster come first, then clusters
by number. A row or KV head that attends to everything has ``WHOLE_TO_THE_END`` for a count: no selection is wider than
three quarters of the longest context.
"""

from __future__ import annotations

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
    SCORED,
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
"""Clusters of a row, at most."""
MAX_TOKENS: Final = MAX_CLUSTERS * CLUSTER_SIZE
"""Tokens of a context, at most."""


def selection_width(longest: int) -> int:
    """Return how wide a selection must be for contexts of ``longest`` tokens."""
    return int(WHOLE_SHARE * longest)


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
        queries: [rows, query heads, head dim], of the dtype of the keys; strided by row and head.
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
    group_block = triton.next_power_of_2(group)
    slices = scored.clusters.value // SLICE
    offset_bytes = clusters.firsts.element_size() + clusters.offsets.element_size()

    tiles = triton.cdiv(rows.entries.shape[1] * clusters.sizes.shape[2], SCORED)
    score_kernel[(TAIL_SPLITS + tiles, kv_heads, batch.rows)](
        attention,
        heads,
        contexts,
        batch.counts,
        scored,
        kept,
        clusters.cluster_bytes,
        clusters.span_bytes,
        kv_heads * cache.vector_bytes,
        group_block=max(tactic_scores.MIN_GROUP, group_block),
        in_order=in_order,
        num_warps=4,
    )
    cut_kernel[(query_heads, batch.rows)](contexts, heads, scored, kept, cuts, num_warps=tactic_cuts.WARPS)
    union_kernel[(slices, kv_heads, batch.rows)](
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
        in_order=in_order,
        num_warps=tactic_union.WARPS,
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
        in_order=in_order,
        num_warps=4,
    )
