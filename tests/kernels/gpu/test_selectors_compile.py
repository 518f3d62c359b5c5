"""The selectors' kernels compile for Hopper at real shapes and fit a multiprocessor; one process compiles them all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from tests.kernels.gpu.compiling import SHARED_LIMIT, SPARE_BYTES, compile_launches
from tests.kernels.gpu.selectors import delta_rows, of_other_kinds
from winnow_kernels.attend.gpu import AttendBuffers, Launch
from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.gpu_compaction import Compaction
from winnow_kernels.policies.delta import gpu as delta
from winnow_kernels.policies.quest import gpu as quest
from winnow_kernels.policies.snapkv import gpu as snapkv
from winnow_kernels.policies.sparq import gpu as sparq
from winnow_kernels.policies.streaming_llm import gpu as streaming_llm
from winnow_kernels.selection import gpu_top
from winnow_kernels.selection.gpu_pages import MAX_PAGES, PageBuffers
from winnow_kernels.selection.gpu_top import TopBuffers, TopRows

ROWS, KV_HEADS = 64, 8
CPU: Final = torch.device("cpu")
SELECTION: Final = DeviceSelection.empty(ROWS, KV_HEADS, 512, CPU)
# Head dims, and query heads of a KV head.
SCORED: Final = ((128, 4), (96, 5))
ATTENDED: Final = ((64, 7), (96, 5), (128, 4), (256, 4))
# Of a multiprocessor, a program's warps share them.
REGISTERS: Final = 65536
# Programs on a multiprocessor, where kernels count on more than one.
PROGRAMS: Final = {
    "policies.snapkv.gpu:_select_kernel": snapkv.PROGRAMS,
    "policies.quest.gpu:_score_kernel": quest.SCORING_PROGRAMS,
    "policies.delta.gpu:_token_kernel": delta.SCORING_PROGRAMS,
    "policies.delta.gpu:_page_kernel": delta.SCORING_PROGRAMS,
    "policies.sparq.gpu:_score_kernel": sparq.SCORING_PROGRAMS,
    "selection.gpu_top:_sort_kernel": gpu_top.SORTING_PROGRAMS,
}


def _batch(pages: int) -> DecodeBatch:
    return DecodeBatch.empty(ROWS, pages * 16, 16, CPU)


def _queries(head_dim: int, group: int) -> Tensor:
    return torch.empty(ROWS, KV_HEADS * group, head_dim, dtype=torch.bfloat16)


def _cache(head_dim: int) -> LayerCache:
    return LayerCache(*torch.empty(2, 64, KV_HEADS, head_dim, dtype=torch.bfloat16))


def _launch() -> None:
    streaming_llm.select(_batch(512), of_other_kinds(streaming_llm.StreamingLLMRows, ROWS, CPU), SELECTION)
    snapkv.select(0, _batch(512), snapkv.StoredRows.empty(ROWS, 1, KV_HEADS, 16, CPU), SELECTION)
    for pages, (head_dim, group) in zip((2048, 8192, MAX_PAGES), (*SCORED, SCORED[0]), strict=True):
        bounds = torch.empty(16, KV_HEADS, 2 * head_dim, dtype=torch.bfloat16)
        own, buffers = of_other_kinds(quest.QuestRows, ROWS, CPU), PageBuffers.empty(ROWS, KV_HEADS, pages, CPU)
        quest.select(0, _queries(head_dim, group), bounds, _batch(pages), own, SELECTION, buffers)
    # Keys of 16 bits and of 8.
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        moved = Compaction([LayerCache(*torch.empty(2, 64, KV_HEADS, 128, dtype=dtype))])
        moved.move({0: torch.arange(32).expand(KV_HEADS, -1)}, torch.arange(64), 0)
    _launch_delta()
    top = of_other_kinds(TopRows, ROWS, CPU)
    for head_dim, group in SCORED:
        batch, queries, cache = _batch(512), _queries(head_dim, group), _cache(head_dim)
        in_top = TopBuffers.empty(batch, SELECTION)
        sparq.select(queries, cache, batch, top, top.budgets, SELECTION, in_top, any_by_score=True)


def _launch_delta() -> None:
    rows = delta_rows(ROWS, 1, CPU)
    delta.write_counts(_batch(512), rows, SELECTION.counts[None], 512)
    for head_dim, group in ATTENDED:
        heads, cache, batch = KV_HEADS * group, _cache(head_dim), _batch(64)
        queries = _queries(head_dim, group)
        attending, buffers = AttendBuffers.empty(ROWS, heads, cache), delta.DeltaBuffers.empty(batch, heads)
        delta.attend_and_score(0, queries, cache, batch, rows, 0.125, attending, buffers, torch.empty_like(queries))
        delta.score_tokens(0, batch, rows, attending, buffers)
    for pages in (2048, MAX_PAGES):
        batch = _batch(pages)
        buffers = replace(buffers, pages=PageBuffers.empty(ROWS, 1, pages, CPU))
        delta.select(0, batch, rows, SELECTION.slots, buffers)


def test_kernels_fit_a_multiprocessor_as_often_as_they_are_launched() -> None:
    attended = iter(ATTENDED)
    launched: Counter[str] = Counter()
    for compiled in compile_launches(_launch):
        kernel = compiled.kernel.removeprefix("winnow_kernels.")
        launched[kernel] += 1
        programs = PROGRAMS.get(kernel, 1)
        if kernel == "policies.delta.gpu:_attend_kernel":
            programs = delta.programs_of_multiprocessor(Launch.of(next(attended)[0], 2))
        assert compiled.local_bytes <= SPARE_BYTES, compiled
        assert programs * (compiled.shared_bytes + 1024) <= SHARED_LIMIT + 1024, compiled
        assert programs * compiled.warps * 32 * compiled.registers <= REGISTERS, compiled
        if "quest.gpu:_score" in kernel or "delta.gpu:_attend" in kernel:
            assert "mma" in compiled.ptx, compiled
        if "gpu_compaction" in kernel:
            # All of a block is loaded, in vectors, before any of it is stored.
            loaded, stored = compiled.ptx.rindex("ld.global.v4"), compiled.ptx.index("st.global.v4")
            assert loaded < compiled.ptx.index("bar.sync", loaded) < stored, compiled
    assert next(attended, None) is None
    assert set(PROGRAMS) < set(launched)
    assert launched["policies.streaming_llm.gpu:_select_kernel"] == launched["policies.delta.gpu:_count_kernel"] == 1
    assert launched["decode.gpu_compaction:_move_kernel"] == 2
    assert launched["policies.quest.gpu:_select_kernel"] == 3
    assert launched["policies.delta.gpu:_merge_kernel"] == len(ATTENDED)
    assert launched["policies.delta.gpu:_select_kernel"] == 2
    assert launched["selection.gpu_top:_split_kernel"] == launched["selection.gpu_top:_settle_kernel"] == 2
