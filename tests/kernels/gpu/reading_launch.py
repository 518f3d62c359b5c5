"""Launching what reads keys or values, with queries in bfloat16, over KV caches of several kinds: to compile it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from tests.kernels.gpu.selectors import delta_rows, of_other_kinds
from winnow_kernels.attend.gpu import AttendBuffers, attend
from winnow_kernels.attend.gpu_check import CheckPartial, attend_new
from winnow_kernels.batch import DecodeBatch, DeviceSelection, ReportedShares
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.cluster_tables import ClusterTables
from winnow_kernels.indexes.gpu_key_pools import KeyPools
from winnow_kernels.indexes.gpu_kmeans import cluster_parts
from winnow_kernels.indexes.key_codes import KeyCodes, is_hadamard, rotation
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.delta import gpu as delta
from winnow_kernels.policies.lowbit_top_p.gpu.layer import Layer
from winnow_kernels.policies.lowbit_top_p.gpu.selection import Launch as CodesLaunch
from winnow_kernels.policies.lowbit_top_p.gpu.selection import select as select_by_codes
from winnow_kernels.policies.lowbit_top_p.gpu.state import Anchors, Policies, Scratch
from winnow_kernels.policies.quest import gpu as quest
from winnow_kernels.policies.quoka.prefill.attention import attend_blocks
from winnow_kernels.policies.quoka.prefill.selection import (
    BlockSelection,
    QuokaPrefillPass,
    QuokaPrefillWorkspace,
    select_blocks,
)
from winnow_kernels.policies.sparq import gpu as sparq
from winnow_kernels.policies.tactic.gpu.selection import select as select_clusters
from winnow_kernels.policies.tactic.gpu.selection import selection_width
from winnow_kernels.policies.tactic.gpu.state import TacticBatch, TacticStatistics, TacticWorkspace
from winnow_kernels.prefill.blocks import Block, PrefillBlocks
from winnow_kernels.selection.gpu_pages import PageBuffers
from winnow_kernels.selection.gpu_top import TopBuffers, TopRows
from winnow_kernels.softmax import Softmax

ROWS, KV_HEADS, GROUP, PAGE, LONGEST, SPAN, NEW_TOKENS = 32, 8, 4, 16, 1024, 1024, 5
SCALE: Final = 0.125
CPU: Final = torch.device("cpu")


def cache_in_8_bits(head_dim: int) -> LayerCache:
    """Return one of ``KV_HEADS`` heads."""
    return LayerCache(*torch.empty(2, 64, KV_HEADS, head_dim, dtype=torch.float8_e4m3fn))


def cache_with_cap_and_sinks(head_dim: int) -> LayerCache:
    """Return one in bfloat16, in which SGLang keeps sink logits, too."""
    softmax = Softmax(50.0, torch.empty(KV_HEADS * GROUP, dtype=torch.bfloat16))
    return LayerCache(*torch.empty(2, 64, KV_HEADS, head_dim, dtype=torch.bfloat16), softmax=softmax)


def _queries(cache: LayerCache, tokens: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(tokens, KV_HEADS * GROUP, cache.head_dim, dtype=dtype)


def _attending(cache: LayerCache) -> AttendBuffers:
    return replace(AttendBuffers.empty(ROWS, KV_HEADS * GROUP, cache), multiprocessors=132)


def _batch() -> DecodeBatch:
    return DecodeBatch.empty(ROWS, LONGEST, PAGE, CPU)


def _selection() -> DeviceSelection:
    return DeviceSelection.empty(ROWS, KV_HEADS, LONGEST, CPU)


def attention(cache: LayerCache, dtype: torch.dtype = torch.bfloat16) -> None:
    """Attend to selections with queries of a ``dtype``, with and without early termination."""
    queries = _queries(cache, dtype=dtype)
    for thresholds in (None, torch.empty(ROWS, 3)):
        attend(
            queries,
            cache,
            _batch(),
            _selection(),
            SCALE,
            thresholds,
            _attending(cache),
            torch.empty_like(queries),
        )


def check(cache: LayerCache) -> None:
    """Attend as a check of drafts does."""
    queries = _queries(cache, ROWS * NEW_TOKENS)
    partial = CheckPartial.empty(len(queries), KV_HEADS * GROUP, cache)
    attend_new(queries, cache, _batch(), SCALE, partial, torch.empty_like(queries))


def own_attention(cache: LayerCache) -> None:
    """Attend at a layer at which DELTA selects."""
    batch, queries = _batch(), _queries(cache)
    delta.attend_and_score(
        0,
        queries,
        cache,
        batch,
        delta_rows(ROWS, 1, CPU),
        SCALE,
        _attending(cache),
        delta.DeltaBuffers.empty(batch, KV_HEADS * GROUP),
        torch.empty_like(queries),
    )


def bounds(cache: LayerCache) -> None:
    """Build the bounds of pages, and score them."""
    index = PageBounds([cache], PageGenerations(64, PAGE, CPU), in_triton=True)
    index.entries.build(torch.empty(4, dtype=torch.int64))
    rows, buffers = of_other_kinds(quest.QuestRows, ROWS, CPU), PageBuffers.empty(ROWS, KV_HEADS, LONGEST // PAGE, CPU)
    quest.select(0, _queries(cache), index.bounds[0], _batch(), rows, _selection(), buffers)


def codes(cache: LayerCache) -> None:
    """Build the codes of keys, and score them."""
    index = KeyCodes([cache], PageGenerations(64, PAGE, CPU), in_triton=True)
    index.turn = rotation(cache.head_dim).to(torch.bfloat16 if is_hadamard(cache.head_dim) else torch.float32)
    index.entries.build(torch.empty(4, dtype=torch.int64))
    numbers = torch.ones(ROWS, dtype=torch.int32)
    policies = Policies(numbers, torch.ones(ROWS, dtype=torch.float64), *[numbers] * 5)
    select_by_codes(
        Layer(0, _queries(cache), index.caches[0], index, _batch(), policies, SCALE),
        Scratch.empty(ROWS, KV_HEADS, GROUP, cache.head_dim, LONGEST, CPU, with_keys=False),
        Anchors.empty(ROWS, KV_HEADS * GROUP, KV_HEADS, torch.arange(ROWS)),
        _selection(),
        ReportedShares.empty(ROWS, KV_HEADS * GROUP, CPU).beliefs,
        numbers,
        in_order=True,
        by_key=False,
        launch=CodesLaunch.of(cache.head_dim, index.bits, GROUP, in_words=True),
    )


def clusters(cache: LayerCache) -> None:
    """Cluster keys, and select clusters."""
    of_span = torch.zeros(1, SPAN // PAGE, dtype=torch.int64)
    tables = ClusterTables.empty(cache, 1, 1, SPAN)
    one, drawn = torch.zeros(1, dtype=torch.int64), torch.zeros(1, SPAN // 16, dtype=torch.int32)
    cluster_parts(KeyPools.of([cache]), of_span, PAGE, one, one, one, drawn, tables)
    batch, longest = DecodeBatch.empty(1, 2**15, PAGE, CPU), 2**15
    select_clusters(
        _queries(cache, 1),
        cache,
        tables.layers()[0],
        batch,
        TacticBatch.empty(1, longest // SPAN, CPU),
        DeviceSelection.empty(1, KV_HEADS, selection_width(longest), CPU),
        TacticWorkspace.empty(1, KV_HEADS * GROUP, KV_HEADS, longest // SPAN, SPAN, CPU),
        TacticStatistics.empty(1, KV_HEADS * GROUP, CPU),
        SCALE,
        in_order=True,
        capped=True,
    )


def channels(cache: LayerCache) -> None:
    """Score keys by a few channels (SparQ)."""
    rows, selection, batch = of_other_kinds(TopRows, ROWS, CPU), _selection(), _batch()
    buffers = TopBuffers.empty(batch, selection)
    sparq.select(_queries(cache), cache, batch, rows, rows.budgets, selection, buffers, any_by_score=True)


def blocks(cache: LayerCache) -> None:
    """Select for a block of QUOKA's prefill, and attend from it."""
    block = Block(0, 256, 256, 384, 0, 16, 8)
    of_pass = PrefillBlocks.of([block], torch.zeros(1, 64, dtype=torch.int32), PAGE)
    queries = _queries(cache, 128)
    own = QuokaPrefillPass.of(
        of_pass, cache, QuokaPrefillWorkspace.empty(KV_HEADS, LONGEST, CPU, 2**22), torch.bfloat16
    )
    select_blocks(queries, cache, own)
    selection = BlockSelection(torch.zeros(1, KV_HEADS, 16, dtype=torch.int32))
    attend_blocks(queries, cache, of_pass, selection, SCALE, torch.empty_like(queries))


READERS: Final[dict[str, Callable[[LayerCache], None]]] = {
    "attention": attention,
    "check": check,
    "own attention": own_attention,
    "bounds": bounds,
    "codes": codes,
    "clusters": clusters,
    "channels": channels,
    "blocks": blocks,
}


def launch_in_8_bits(head_dim: int) -> None:
    """Launch everything on a cache in 8 bits, with heads of this size."""
    for launch in READERS.values():
        launch(cache_in_8_bits(head_dim))


def launch_with_cap_and_sinks(head_dim: int) -> None:
    """Launch everything on a cache in bfloat16 of a layer with a soft cap and sink logits."""
    for launch in READERS.values():
        launch(cache_with_cap_and_sinks(head_dim))


def launch_wide_attention(head_dim: int) -> None:
    """Attend to selections in 8 bits with queries in float32."""
    attention(cache_in_8_bits(head_dim), torch.float32)
