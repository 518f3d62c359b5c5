"""What reads a KV cache in 8 bits, or that of a layer with a soft cap and sinks, compiles for Hopper and fits it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kernels.gpu.compiling import SHARED_LIMIT, SPARE_BYTES, compile_launches
from tests.kernels.gpu.reading_launch import (
    GROUP,
    READERS,
    launch_in_8_bits,
    launch_wide_attention,
    launch_with_cap_and_sinks,
)
from winnow_kernels.attend.gpu import Launch

# What scoring codes puts aside between two pairs, and keeping where a list was too short, as with 16 bits. Checks and
# blocks of prefill have few registers, so that more programs fit. Clustering or rotating keys of 256 numbers takes
# more than all.
LOCAL_BYTES = {
    "score_kernel": 256,
    "keep_kernel": 256,
    "gpu_check:_attend_kernel": 64,
    "attend_blocks_kernel": 64,
    "_lloyd_kernel": 192,
    "_build_kernel": 256,
}


@pytest.mark.full
@pytest.mark.parametrize(("launch_all", "element_size"), [(launch_in_8_bits, 1), (launch_with_cap_and_sinks, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_fit_a_multiprocessor(head_dim: int, launch_all: Callable[[int], None], element_size: int) -> None:
    launch = Launch.of(head_dim, element_size, GROUP)
    programs = {
        "attend_kernel": launch.programs,
        "terminating_attend_kernel": launch.programs_with_termination,
    }
    compiled = compile_launches(launch_all, head_dim, timeout=900)
    for kernel in compiled:
        module, _, name = kernel.kernel.partition(":")
        spilled = LOCAL_BYTES.get(f"{module.rpartition('.')[2]}:{name}", LOCAL_BYTES.get(name, SPARE_BYTES))
        assert kernel.local_bytes <= spilled, kernel
        fitting = programs.get(name, 1)
        assert fitting * (kernel.shared_bytes + 1024) <= SHARED_LIMIT + 1024, kernel
        assert fitting * kernel.warps * 32 * kernel.registers <= 64 << 10, kernel
        if name in programs:
            assert "cp.async" in kernel.ptx
            assert "mma.sync" in kernel.ptx
    assert len(compiled) > len(READERS)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_with_queries_in_float32_fits_a_multiprocessor(head_dim: int) -> None:
    for kernel in compile_launches(launch_wide_attention, head_dim, timeout=900):
        assert kernel.shared_bytes <= SHARED_LIMIT, kernel
