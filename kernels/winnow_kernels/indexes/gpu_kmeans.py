"""K-means of spans on a GPU (``winnow_kernels.indexes.kmeans``): spans × layers × KV heads problems in one launch.

One program clusters the keys of one span, or part of it, and KV head. Its centroids and sums stay in registers and
shared memory; the keys, 256 KiB for 1,024 of 128 numbers in half precision, do not fit beside them and are read again
in every iteration, from the L2 cache where the programs at work leave room for it. Assignment and sums are matrix
products on tensor cores: centroids times keys, then, as attention does with its weights, labels as rows of zeros and
ones times the same keys.
There are no atomic additions, and a problem's keys are added in the order of their positions: what comes out depends on
nothing but them.

Costs of a problem of 1,024 keys of 128 numbers in 64 clusters, with 10 iterations: 336 MFLOP and 2.6 MB of keys read. A
model of the shape of Llama-3.1-8B has 8,192 problems at 32K tokens: 2.75 TFLOP, 21 GB if every read goes to memory: 3
and 6 ms at an H100's limits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.indexes.cluster_tables import ClusterTables, Tables
from winnow_kernels.indexes.gpu_key_pools import KeyPools, Pools, layer_keys
from winnow_kernels.indexes.kmeans import ITERATIONS
from winnow_kernels.kernel_arguments import Constant, Pointer

_TILE: Final = 64
"""Keys that are assigned at a time."""
_STAGES: Final = 2
_MAX_NUMBERS: Final = 16384
"""Numbers of all centroids of a problem, padded, that registers hold."""
_NUMBERS_OF_FOUR_WARPS: Final = 8192


class Parts(NamedTuple):
    """Parts of spans to be clustered, each of ``tokens`` tokens; see ``cluster_parts``."""

    pages: Pointer
    entries: Pointer
    begins: Pointer
    left_out: Pointer
    drawn: Pointer
    page_size: Constant
    tokens: Constant
    clusters: Constant


def fits(clusters: int, head_dim: int) -> bool:
    """Return whether a program can hold ``clusters`` centroids."""
    return _padded(clusters) * triton.next_power_of_2(head_dim) <= _MAX_NUMBERS


def cluster_parts(
    pools: KeyPools,
    pages: Tensor,
    page_size: int,
    entries: Tensor,
    begins: Tensor,
    left_out: Tensor,
    drawn: Tensor,
    tables: ClusterTables,
    iterations: int = ITERATIONS,
) -> None:
    """Cluster the keys of spans, or of parts of them, all equally long, in all layers; three launches.

    Args:
        pools: every layer's keys.
        pages: integers [n, pages of a part], contiguous.
        page_size: tokens of a page.
        entries: integers [n]; where in ``tables`` the clusters of each part's span are; no two parts the same place.
        begins: integers [n]; offset of a part's first token in its span, a multiple of its length.
        left_out: integers [n]; how many of a part's first tokens are in no cluster.
        drawn: integers [n, clusters], contiguous; which keys of a part are its first centroids
            (``kmeans.drawn_behind``).
        tables: of all layers, contiguous.
        iterations: at least 1.

    Raises:
        ValueError: a program cannot hold as many centroids.
    """
    clusters, head_dim = drawn.shape[1], tables.centroids.shape[4]
    tokens = pages.shape[1] * page_size
    if not fits(clusters, head_dim):
        raise ValueError(f"drawn: {clusters} centroids of {head_dim} numbers are too many for one program")
    grid = (len(pages) * pools.kv_heads, pools.layers)
    constants = (tl.constexpr(number) for number in (page_size, tokens, clusters))
    parts = Parts(pages, entries, begins, left_out, drawn, *constants)
    arguments = (pools.arguments, parts, Tables.of(tables))
    blocks = {
        "block_clusters": _padded(clusters),
        "block_dim": triton.next_power_of_2(head_dim),
        "tile": _tile(tokens),
        "num_warps": _warps(clusters, head_dim),
        "num_stages": _STAGES,
    }
    _lloyd_kernel[grid](*arguments, iterations, **blocks)
    _spread_kernel[grid](*arguments, **blocks)
    _order_kernel[grid](*arguments, block_tokens=triton.next_power_of_2(tokens), num_warps=4)


def _padded(clusters: int) -> int:
    # A matrix product on tensor cores has at least 16 rows.
    return max(16, triton.next_power_of_2(clusters))


def _warps(clusters: int, head_dim: int) -> int:
    return 4 if _padded(clusters) * triton.next_power_of_2(head_dim) <= _NUMBERS_OF_FOUR_WARPS else 8


def _tile(tokens: int) -> int:
    """Return how many keys are assigned at a time: 64, or the greatest power of two that divides all."""
    return min(_TILE, tokens & -tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _place(pools: Pools, parts: Parts, tables: Tables) -> tl.tensor:
    """Return where a program's clusters lie, counted through the entries of all heads and layers; int64."""
    entry = tl.load(parts.entries + tl.program_id(0) // pools.kv_heads).to(tl.int64)
    head = tl.program_id(0) % pools.kv_heads
    return (tl.program_id(1).to(tl.int64) * pools.kv_heads + head) * tables.capacity + entry


@triton.jit  # type: ignore[untyped-decorator]
def _keys_at(
    pools: Pools,
    keys_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    positions: tl.tensor,
    first: tl.tensor,
    page_size: tl.constexpr,
    block_dim: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return the keys at ``positions`` of a span: ``dtype`` [positions, block_dim]; 0 for those before ``first``."""
    slots = tl.load(pages_ptr + positions // page_size).to(tl.int64) * page_size + positions % page_size
    dims = tl.arange(0, block_dim)
    addresses = keys_ptr + slots[:, None] * pools.slot_stride + dims[None, :]
    keys = tl.load(addresses, mask=(positions >= first)[:, None] & (dims < pools.head_dim)[None, :], other=0.0)
    return keys.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _lloyd_kernel(
    pools: Pools,
    parts: Parts,
    tables: Tables,
    iterations: tl.tensor,
    block_clusters: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write one problem's centroids, sizes and firsts, and the labels of its keys; any of those left out."""
    # float32 is for comparison with the reference, and must not be cut to tf32.
    dtype: tl.constexpr = tables.centroids.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32"
    tokens: tl.constexpr = parts.tokens
    clusters: tl.constexpr = parts.clusters
    place = _place(pools, parts, tables)
    number = tl.program_id(0) // pools.kv_heads
    begin = tl.load(parts.begins + number).to(tl.int32)
    # Labels become offsets in a second launch.
    labels_ptr = tables.offsets + place * tables.span + begin
    pages_ptr = parts.pages + number * (tokens // parts.page_size)
    left_out = tl.load(parts.left_out + number).to(tl.int32)
    keys_ptr = layer_keys(pools.addresses, pools.first, tl.program_id(1))
    keys_ptr += tl.program_id(0) % pools.kv_heads * pools.head_stride
    cluster = tl.arange(0, block_clusters)
    is_cluster = cluster < clusters
    drawn_ptr = parts.drawn + number * clusters + cluster
    drawn = tl.load(drawn_ptr, mask=is_cluster, other=-1).to(tl.int32)
    centroids = _keys_at(pools, keys_ptr, pages_ptr, drawn, 0, parts.page_size, block_dim, dtype)
    sizes = tl.zeros([block_clusters], tl.int32)
    for _ in range(iterations):
        # Read anew, for it would find no room in registers.
        is_filled = tl.load(drawn_ptr, mask=is_cluster, other=-1) >= 0
        norms = centroids.to(tl.float32)
        half_norms = tl.where(is_filled, tl.sum(norms * norms, 1) / 2, float("inf"))
        sums = tl.zeros([block_clusters, block_dim], tl.float32)
        sizes = tl.zeros([block_clusters], tl.int32)
        for start in range(0, tokens, tile):
            positions = start + tl.arange(0, tile)
            keys = _keys_at(pools, keys_ptr, pages_ptr, positions, left_out, parts.page_size, block_dim, dtype)
            products = tl.dot(centroids, tl.trans(keys), input_precision=precision)
            labels = tl.argmin(half_norms[:, None] - products, 0)
            is_member = cluster[:, None] == labels[None, :]
            sums = tl.dot(is_member.to(dtype), keys, sums, input_precision=precision)
            sizes += tl.sum(is_member.to(tl.int32), 1)
            tl.store(labels_ptr + positions, labels.to(labels_ptr.dtype.element_ty))
        # Keys that are left out are read as zeros: they add to no sum, and all count for one cluster.
        sizes -= tl.where(cluster == tl.argmin(half_norms, 0), left_out, 0)
        means = (sums / tl.maximum(sizes, 1).to(tl.float32)[:, None]).to(dtype)
        centroids = tl.where((sizes > 0)[:, None], means, centroids)
    dims = tl.arange(0, block_dim)
    place_of_cluster = place * tables.of_span + begin // (tokens // clusters) + cluster
    tl.store(
        tables.centroids + place_of_cluster[:, None] * pools.head_dim + dims[None, :],
        centroids,
        mask=is_cluster[:, None] & (dims < pools.head_dim)[None, :],
    )
    tl.store(tables.sizes + place_of_cluster, sizes.to(tables.sizes.dtype.element_ty), mask=is_cluster)
    first = place % tables.capacity * tables.span + begin + tl.cumsum(sizes) - sizes
    tl.store(tables.firsts + place_of_cluster, first.to(tl.int32), mask=is_cluster)


@triton.jit  # type: ignore[untyped-decorator]
def _spread_kernel(
    pools: Pools,
    parts: Parts,
    tables: Tables,
    block_clusters: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the spreads of one problem, from centroids, sizes and labels, and directions where it is a span's first."""
    dtype: tl.constexpr = tables.centroids.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32"
    tokens: tl.constexpr = parts.tokens
    place = _place(pools, parts, tables)
    number = tl.program_id(0) // pools.kv_heads
    begin = tl.load(parts.begins + number).to(tl.int32)
    labels_ptr = tables.offsets + place * tables.span + begin
    pages_ptr = parts.pages + number * (tokens // parts.page_size)
    left_out = tl.load(parts.left_out + number).to(tl.int32)
    keys_ptr = layer_keys(pools.addresses, pools.first, tl.program_id(1))
    keys_ptr += tl.program_id(0) % pools.kv_heads * pools.head_stride
    cluster = tl.arange(0, block_clusters)
    dims = tl.arange(0, block_dim)
    is_cluster = cluster < parts.clusters
    place_of_cluster = place * tables.of_span + begin // (tokens // parts.clusters) + cluster
    centroids = tl.load(
        tables.centroids + place_of_cluster[:, None] * pools.head_dim + dims[None, :],
        mask=is_cluster[:, None] & (dims < pools.head_dim)[None, :],
        other=0.0,
    )
    sums = tl.zeros([block_clusters], tl.float32)
    of_elements = tl.zeros([block_dim], tl.float32)
    for start in range(0, tokens, tile):
        positions = start + tl.arange(0, tile)
        keys = _keys_at(pools, keys_ptr, pages_ptr, positions, left_out, parts.page_size, block_dim, dtype)
        labels = tl.load(labels_ptr + positions).to(tl.int32)
        is_member = (labels[:, None] == cluster[None, :]) & (positions >= left_out)[:, None]
        # Rows with a single one: each key's centroid.
        own = tl.dot(is_member.to(dtype), centroids, input_precision=precision)
        # Keys that are left out are read as zeros, and have none.
        squares = (keys.to(tl.float32) - own) * (keys.to(tl.float32) - own)
        of_elements += tl.sum(squares, 0)
        sums += tl.sum(tl.where(is_member, tl.sum(squares, 1)[:, None], 0.0), 0)
    sizes = tl.load(tables.sizes + place_of_cluster, mask=is_cluster, other=0).to(tl.int32)
    spreads = sums / tl.maximum(sizes, 1).to(tl.float32)
    tl.store(tables.spreads + place_of_cluster, spreads.to(tl.bfloat16), mask=is_cluster)
    if begin == 0:
        mean = tl.sum(of_elements, 0) / pools.head_dim
        directions = tl.where(mean > 0, of_elements / tl.maximum(mean, 1e-30), 1.0)
        directions_ptr = tables.directions + place * pools.head_dim + dims
        tl.store(directions_ptr, directions.to(tl.bfloat16), mask=dims < pools.head_dim)


@triton.jit  # type: ignore[untyped-decorator]
def _order_kernel(pools: Pools, parts: Parts, tables: Tables, block_tokens: tl.constexpr) -> None:
    """Replace one problem's labels by the offsets of its keys, label by label, and in each by position.

    Keys that are in no cluster, the first, come last.
    """
    clusters: tl.constexpr = parts.clusters
    number = tl.program_id(0) // pools.kv_heads
    begin = tl.load(parts.begins + number).to(tl.int32)
    offsets_ptr = tables.offsets + _place(pools, parts, tables) * tables.span + begin
    places = tl.arange(0, block_tokens)
    labels = tl.load(offsets_ptr + places, mask=places < parts.tokens, other=clusters).to(tl.int32)
    is_left_out = places < tl.load(parts.left_out + number).to(tl.int32)
    labels = tl.where(is_left_out, clusters, labels)
    offsets = (begin + places).to(offsets_ptr.dtype.element_ty)
    # No other thread may write over a label that has not been read.
    tl.debug_barrier()
    first = 0
    for cluster in range(clusters):
        is_member = labels == cluster
        ends = first + tl.cumsum(is_member.to(tl.int32))
        tl.store(offsets_ptr + ends - 1, offsets, mask=is_member)
        first = tl.max(ends)
    tl.store(offsets_ptr + first + places, offsets, mask=is_left_out)
