"""The selectors' kernels compile for Hopper at real shapes and fit a multiprocessor; one process compiles them all."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from triton import next_power_of_2

from tests.kernels.gpu.compiling import SHARED_LIMIT, Constant, Variant, compile_for_hopper
from winnow_kernels.attend.gpu import Launch
from winnow_kernels.batch import WHOLE, WHOLE_TO_THE_END, Count
from winnow_kernels.policies.delta import gpu as delta
from winnow_kernels.policies.quest import gpu as quest
from winnow_kernels.policies.quoka import gpu as quoka
from winnow_kernels.policies.snapkv import gpu as stored_selection
from winnow_kernels.selection import gpu_top
from winnow_kernels.selection.gpu_pages import MAX_PAGES, warps_of

ROWS, KV_HEADS = 64, 8
PAIRS: Final = {"page_size": 16, "kv_heads": KV_HEADS, "pair_block": ROWS * KV_HEADS}
# Arguments of all kernels by what they are; all others are pointers to int32, or int32.
HALVES: Final = ("queries_ptr", "keys_ptr", "values_ptr", "output_ptr", "bounds_ptr")
FLOATS: Final = (
    "scores_ptr token_scores_ptr partial_outputs_ptr partial_masses_ptr log_sum_exp_ptr reciprocals_ptr".split()
)
# Of a multiprocessor, a program's warps share them.
REGISTERS: Final = 65536
ODD: Final = ("layer", "layers", "pairs", "rows", "kv_heads", "read_stride", "key_bytes")


def _type(name: str) -> str:
    if name in HALVES:
        return "*bf16"
    if name in FLOATS:
        return "*fp32"
    others = {"read_ptr": "*i64", "offsets_ptr": "*i64", "roles_ptr": "*i8", "scale_log2": "fp32"}
    return others.get(name, "*i32" if name.endswith("_ptr") else "i32")


def variant_of(kernel: str, constants: Mapping[str, Constant], warps: int = 4) -> Variant:
    module, _, name = kernel.partition(":")
    names = getattr(import_module(f"winnow_kernels.{module}"), name).arg_names
    types = {each: _type(each) for each in names if each not in constants}
    divisible = [each for each, kind in types.items() if kind == "i32" and each not in ODD]
    return Variant(f"winnow_kernels.{module}:{name}", types, constants, divisible, num_warps=warps)


def _scoring(kernel: str, head_dim: int, group: int, least_group: int) -> Variant:
    group_block = max(least_group, next_power_of_2(group))
    of_heads = {
        "head_dim": head_dim,
        "dim_block": next_power_of_2(head_dim),
        "group": group,
        "group_block": group_block,
    }
    return variant_of(kernel, PAIRS | of_heads | {"block": 64})


def _attending(head_dim: int, group: int) -> tuple[Variant, int]:
    launch = Launch.of(head_dim, 2)
    of_heads = {"head_dim": head_dim, "dim_block": next_power_of_2(head_dim), "group": group}
    of_pairs = {"kv_heads": KV_HEADS, "pair_block": ROWS * KV_HEADS, "page_bits": 4}
    constants = of_heads | of_pairs | {"tiles_ahead": launch.tiles_ahead}
    return variant_of("policies.delta.gpu:_attend_kernel", constants, launch.warps), delta.programs_of_multiprocessor(
        launch
    )


def _selecting(kernel: str, pages: int) -> Variant:
    constants = {"page_size": 16, "pages": pages}
    if "quest" in kernel:
        constants |= {"whole": WHOLE, "to_the_end": WHOLE_TO_THE_END, "bytes_column": int(Count.READ_BYTES)}
    return variant_of(kernel, constants, warps_of(pages))


def test_kernels_fit_a_multiprocessor_as_often_as_they_are_launched() -> None:
    of_stored = PAIRS | {"tile": 64, "whole": WHOLE, "block": 1024}
    of_tokens = {"query_heads": 32, "head_block": 32, "block": 128, "row_block": ROWS}
    launched = [
        (variant_of("policies.streaming_llm.gpu:_select_kernel", {"whole": WHOLE, "page_size": 16, "block": 1024}), 1),
        (variant_of("policies.snapkv.gpu:_select_kernel", of_stored), stored_selection.PROGRAMS),
        (_scoring("policies.quest.gpu:_score_kernel", 128, 4, least_group=16), quest.SCORING_PROGRAMS),
        (_scoring("policies.quest.gpu:_score_kernel", 96, 5, least_group=16), quest.SCORING_PROGRAMS),
        *((_selecting("policies.quest.gpu:_select_kernel", pages), 1) for pages in (2048, 8192, MAX_PAGES)),
        *(_attending(head_dim, group) for head_dim, group in ((64, 7), (96, 5), (128, 4), (256, 4))),
        (
            variant_of(
                "policies.delta.gpu:_merge_kernel",
                {"kv_heads": KV_HEADS, "group": 4, "head_dim": 128, "dim_block": 128},
            ),
            1,
        ),
        (variant_of("policies.delta.gpu:_token_kernel", of_tokens), delta.SCORING_PROGRAMS),
        (
            variant_of("policies.delta.gpu:_page_kernel", {"page_size": 16, "block": 64, "row_block": ROWS}),
            delta.SCORING_PROGRAMS,
        ),
        (variant_of("policies.delta.gpu:_count_kernel", {"page_size": 16}, 1), 1),
        *((_selecting("policies.delta.gpu:_select_kernel", pages), 1) for pages in (2048, MAX_PAGES)),
        (_scoring("policies.quoka.gpu:_score_kernel", 128, 4, least_group=1), quoka.SCORING_PROGRAMS),
        (_scoring("policies.quoka.gpu:_score_kernel", 96, 5, least_group=1), quoka.SCORING_PROGRAMS),
        (variant_of("selection.gpu_top:_split_kernel", {"page_size": 16, "block": 1024, "count_block": 8192}, 8), 1),
        (variant_of("selection.gpu_top:_settle_kernel", {"page_size": 16, "block": 1024}), 1),
        (variant_of("selection.gpu_top:_sort_kernel", PAIRS | {"block": 64}), gpu_top.SORTING_PROGRAMS),
    ]
    variants = [variant for variant, _ in launched]
    for (variant, programs), compiled in zip(launched, compile_for_hopper(variants), strict=True):
        name = (variant.kernel, dict(variant.constants), compiled)
        assert compiled.local_bytes == 0, name
        assert programs * (compiled.shared_bytes + 1024) <= SHARED_LIMIT + 1024, name
        assert programs * variant.num_warps * 32 * compiled.registers <= REGISTERS, name
        if "quest.gpu:_score" in variant.kernel or "delta.gpu:_attend" in variant.kernel:
            assert "mma" in compiled.ptx, name
