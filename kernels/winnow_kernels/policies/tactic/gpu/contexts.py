"""What a kernel knows of a row, and where its tokens and the members of its clusters lie."""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl

from winnow_kernels.attend.gpu_softmax import soft_capped
from winnow_kernels.batch import COUNTS, NO_MASS, Count
from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.indexes.cluster_tables import Tables
from winnow_kernels.kernel_arguments import Heads, Number, Rows, Vectors
from winnow_kernels.policies.tactic.gpu.state import SLICE, Attention, Contexts
from winnow_kernels.policies.tactic.reference import WHOLE_SHARE
from winnow_kernels.selection.gpu_slots import slots_at
from winnow_kernels.selection.gpu_threshold import HIGHEST, weight_of

LARGEST_GROUP: Final = 16
"""Query heads of a KV head: the rows of a tensor core's tile, which smaller groups are padded to."""

NOTHING: Final = tl.constexpr(NO_MASS)
GROUP_BLOCK: Final = tl.constexpr(LARGEST_GROUP)
COUNTED: Final = tl.constexpr(48 * STEPS)
"""Steps from the highest down of which tokens are counted: 48 octaves lower all of a context weighs next to nothing."""
LOWEST_STEP: Final = tl.constexpr(-(2**30))
"""Below all steps."""
_WHOLE_SHARE = tl.constexpr(WHOLE_SHARE)
_SLICE = tl.constexpr(SLICE)
_COUNTS = tl.constexpr(COUNTS)
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))


class Row(NamedTuple):
    """A row of the batch: all its tokens, its sinks, those ``clustered`` behind these, and its ``clusters``.

    ``share`` is 0 in a row of another kind, ``cap`` where there is none.
    """

    number: Number
    share: Number
    cap: Number
    length: Number
    sinks: Number
    clustered: Number
    clusters: Number


@triton.jit  # type: ignore[untyped-decorator]
def row_at(contexts: Contexts, row: tl.tensor) -> Row:
    """Return what is known of ``row``."""
    asked = contexts.asked
    share, cap = tl.load(asked.p + row), tl.load(asked.caps + row)
    length, end = tl.load(contexts.rows.lengths + row), tl.load(asked.clustered + row)
    sinks = tl.load(asked.sinks + row)
    clustered = tl.maximum(end - sinks, 0)
    span: tl.constexpr = contexts.tables.span
    clusters = tl.maximum(end - sinks // span * span, 0) // (span // contexts.tables.of_span)
    return Row(row, share, cap, length, sinks, clustered, clusters)


@triton.jit  # type: ignore[untyped-decorator]
def kept_positions(places: tl.tensor, row: Row) -> tl.tensor:
    """Return the positions of tokens in no cluster at ``places`` of their order: sinks, then the newest first."""
    return tl.where(places < row.sinks, places, row.length - 1 - (places - row.sinks))


@triton.jit  # type: ignore[untyped-decorator]
def table_of(rows: Rows, row: Row) -> tl.tensor:
    """Return a row's page table."""
    return rows.page_table + row.number * rows.table_stride


@triton.jit  # type: ignore[untyped-decorator]
def span_table(contexts: Contexts, row: Row) -> tl.tensor:
    """Return where a row's page table has the first span with clusters, that in which the sinks end."""
    span: tl.constexpr = contexts.tables.span
    return table_of(contexts.rows, row) + row.sinks // span * (span // contexts.rows.page_size)


@triton.jit  # type: ignore[untyped-decorator]
def kept_tokens(row: Row) -> tl.tensor:
    """Return how many tokens in no cluster are attended to: all, or as many as the cap, if there is one, lets."""
    return tl.minimum(row.length - row.clustered, tl.where(row.cap > 0, row.cap, row.length))


@triton.jit  # type: ignore[untyped-decorator]
def exceeds(count: tl.tensor, row: Row) -> tl.tensor:
    """Return whether ``count`` tokens are so much of the context that all of it is read instead."""
    return count.to(tl.float32) > _WHOLE_SHARE * row.length.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def united(
    totals_ptr: tl.tensor, row: Row, clusters: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return what is taken for one KV head of a row that is not idle.

    Args:
        totals_ptr: its slices' totals.
        row: the row.
        clusters: how many a row can have.

    Returns:
        The totals, packed, int32 [slices]; tokens in no cluster that are kept; tokens that are taken of clusters within
        the cap, -1 where the whole context is attended to instead; tokens that are needed of clusters.
    """
    each = tl.arange(0, clusters // _SLICE)
    totals = tl.load(totals_ptr + each, mask=each * _SLICE < row.clusters, other=0)
    wanted = tl.sum(weight_of(totals), axis=0)
    kept = kept_tokens(row)
    taken = tl.minimum(wanted, tl.where(row.cap > 0, row.cap, row.length) - kept)
    return totals, kept, tl.where(exceeds(kept + taken, row), -1, taken), wanted


@triton.jit  # type: ignore[untyped-decorator]
def needs_order(taken: tl.tensor, wanted: tl.tensor, is_ordered: tl.tensor) -> tl.tensor:
    """Return whether clusters of which so much is ``taken`` and ``wanted`` must be put in order."""
    return (taken > 0) & ((is_ordered != 0) | (wanted > taken))


@triton.jit  # type: ignore[untyped-decorator]
def is_idle(row: Row) -> tl.tensor:
    """Return whether nothing need be scored: not a row of the kind, or one that attends to everything anyway."""
    return (row.share == 0) | exceeds(kept_tokens(row), row)


@triton.jit  # type: ignore[untyped-decorator]
def count_read(counts_ptr: tl.tensor, row: Row, amount: tl.tensor) -> None:
    """Count bytes that a row read."""
    tl.atomic_add(counts_ptr + row.number * _COUNTS + _READ_BYTES, amount.to(tl.int64), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def places_of(starts_ptr: tl.tensor, tokens: tl.tensor, listed: tl.tensor, most: tl.constexpr) -> tl.tensor:
    """Return to which cluster of a list tokens belong: the last that begins by then.

    Args:
        starts_ptr: how many tokens come before each cluster of the list.
        tokens: int32 [n]; counted through the list.
        listed: scalar; clusters in the list, at most ``most``, a power of two up to 4,096.
    """
    place = tokens * 0
    for halved in tl.static_range(1, 13):
        if most >> halved > 0:
            later = place + (most >> halved)
            start = tl.load(starts_ptr + later, mask=later < listed, other=HIGHEST)
            place = tl.where(start <= tokens, later, place)
    return place


@triton.jit  # type: ignore[untyped-decorator]
def addresses_of(
    contexts: Contexts, row: Row, clusters: tl.tensor, is_cluster: tl.tensor, kv_head: tl.tensor
) -> tl.tensor:
    """Return where in a layer's tables ``clusters`` of a row are, by number: counted through heads and entries.

    Nothing is read where not ``is_cluster``.
    """
    of_span: tl.constexpr = contexts.tables.of_span
    entries_ptr = contexts.entries.pointer + row.number * contexts.entries.row_stride
    entry = tl.load(entries_ptr + clusters // of_span, mask=is_cluster, other=0).to(tl.int64)
    return (kv_head.to(tl.int64) * contexts.tables.capacity + entry) * of_span + clusters % of_span


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(
    contexts: Contexts, row: Row, begin: tl.tensor, tile: tl.constexpr, kv_head: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return where in a layer's tables ``tile`` clusters of a row are, from number ``begin`` on, some of which it has.

    Returns:
        A scalar, int64; and [tile], to be added. Behind the row's last cluster any that can be read.
    """
    of_span: tl.constexpr = contexts.tables.of_span
    each = tl.arange(0, tile)
    if of_span % tile == 0:
        # All of one span: its place is looked up once, and what lies there is contiguous.
        entry = tl.load(contexts.entries.pointer + row.number * contexts.entries.row_stride + begin // of_span)
        base = (kv_head.to(tl.int64) * contexts.tables.capacity + entry) * of_span + begin % of_span
        return base, each
    else:  # noqa: RET505 - Triton compiles only the branch taken, and needs to see that there is no other
        number = tl.minimum(begin + each, row.clusters - 1)
        return kv_head.to(tl.int64) * 0, addresses_of(contexts, row, number, number >= 0, kv_head)


@triton.jit  # type: ignore[untyped-decorator]
def offsets_of(tables: Tables, kv_head: tl.tensor) -> tl.tensor:
    """Return where a head's offsets begin."""
    return tables.offsets + kv_head.to(tl.int64) * tables.capacity * tables.span


@triton.jit  # type: ignore[untyped-decorator]
def member_slots(
    contexts: Contexts, table_ptr: tl.tensor, offset_ptr: tl.tensor, clusters: tl.tensor, is_member: tl.tensor
) -> tl.tensor:
    """Return the slots of members of ``clusters``, int32; 0 where not ``is_member``.

    Args:
        contexts: of the batch.
        table_ptr: the row's ``span_table``.
        offset_ptr: of each member, where its offset lies.
        clusters: int32; numbers of clusters.
        is_member: bool.
    """
    offset = tl.load(offset_ptr, mask=is_member, other=0).to(tl.int32)
    position = clusters // contexts.tables.of_span * contexts.tables.span + offset
    return slots_at(table_ptr, position, is_member, contexts.rows.page_size)


@triton.jit  # type: ignore[untyped-decorator]
def keys_at(attention: Attention, kv_head: tl.tensor, slots: tl.tensor, is_token: tl.tensor, heads: Heads) -> tl.tensor:
    """Return the keys of a KV head at ``slots``, [n, dim_block], in the queries' dtype.

    They are 0 where not ``is_token`` and beyond the head dim.
    """
    keys = attention.keys
    dims = tl.arange(0, heads.dim_block)
    keys_ptr = keys.pointer + kv_head * keys.head_stride
    addresses = keys_ptr + slots.to(tl.int64)[:, None] * keys.row_stride + dims[None, :]
    vectors = tl.load(addresses, mask=is_token[:, None] & (dims < heads.head_dim)[None, :], other=0.0)
    return vectors.to(attention.queries.pointer.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def scaled(attention: Attention, products: tl.tensor) -> tl.tensor:
    """Return the scores, to base 2, of products of queries and keys, or centroids; capped if they are."""
    scores = products * attention.scale_log2
    if attention.cap_log2 is not None:
        scores = soft_capped(scores, attention.cap_log2)
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def group_queries(queries: Vectors, row: Row, kv_head: tl.tensor, heads: Heads, group_block: tl.constexpr) -> tl.tensor:
    """Return the queries of a KV head's group, [group_block, dim_block]; 0 in what pads them."""
    members, dims = tl.arange(0, group_block), tl.arange(0, heads.dim_block)
    of_members = (kv_head * heads.group + members)[:, None] * queries.head_stride
    addresses = queries.pointer + row.number.to(tl.int64) * queries.row_stride + of_members + dims[None]
    return tl.load(addresses, mask=(members < heads.group)[:, None] & (dims < heads.head_dim)[None], other=0.0)
