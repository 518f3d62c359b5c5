"""What a decode step adds to the statistics; that it adds the right numbers, ``test_decode`` shows."""

from __future__ import annotations

from tests.kernels.gpu.compiling import Variant, compile_for_hopper


def test_it_compiles_for_hopper() -> None:
    types = {
        "statistics_ptr": "*fp64",
        **dict.fromkeys(("table_ptr", "request_slots_ptr", "counts_ptr"), "*i64"),
        **dict.fromkeys(("lengths_ptr", "kinds_ptr"), "*i32"),
        **dict.fromkeys(("statistics_stride", "table_stride", "heads", "token_bytes"), "i32"),
    }
    kernel = "sglang_winnow.device.accounting:_count_kernel"
    variants = [Variant(kernel, types, {"is_dense": dense, "columns": 8}, num_warps=1) for dense in (False, True)]
    for compiled in compile_for_hopper(variants):
        assert compiled.local_bytes == 0
