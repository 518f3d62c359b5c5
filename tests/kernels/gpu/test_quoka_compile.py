"""The kernels of QUOKA's decode compile for Hopper at real shapes, keep to registers and fit a multiprocessor."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.compiling import SHARED_LIMIT, SPARE_BYTES, compile_launches
from tests.kernels.gpu.quoka_launch import launch
from winnow_kernels.policies.quoka.gpu import launch_of
from winnow_kernels.selection.gpu_top import SORTING_PROGRAMS

# Of a multiprocessor, a program's warps share them.
REGISTERS = 65536


@pytest.mark.parametrize(
    ("head_dim", "group", "bits", "page_size"),
    [
        (128, 4, 2, 16),
        (80, 3, 3, 16),
        pytest.param(64, 8, 2, 16, marks=pytest.mark.full),
        pytest.param(128, 8, 3, 32, marks=pytest.mark.full),
        pytest.param(128, 1, 4, 16, marks=pytest.mark.full),
        pytest.param(256, 16, 2, 32, marks=pytest.mark.full),
        pytest.param(256, 4, 3, 64, marks=pytest.mark.full),
        pytest.param(256, 8, 4, 16, marks=pytest.mark.full),
        pytest.param(96, 5, 2, 64, marks=pytest.mark.full),
    ],
)
def test_hopper_keeps_to_registers(head_dim: int, group: int, bits: int, page_size: int) -> None:
    programs = {
        "_prepare_kernel": 1,
        "_score_kernel": launch_of(head_dim, bits, in_words=True).programs,
        "_list_kernel": 1,
        "_take_kernel": 1,
        "_sort_kernel": SORTING_PROGRAMS,
    }
    compiled = compile_launches(launch, head_dim, group, bits, page_size)
    assert [kernel.kernel.split(":")[1] for kernel in compiled] == list(programs)
    for kernel, count in zip(compiled, programs.values(), strict=True):
        assert kernel.local_bytes <= SPARE_BYTES, kernel
        assert count * (kernel.shared_bytes + 1024) <= SHARED_LIMIT + 1024, kernel
        assert count * kernel.warps * 32 * kernel.registers <= REGISTERS, kernel
        if kernel.kernel.endswith(":_score_kernel"):
            # Codes are multiplied as bytes, on their way while others are.
            assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in kernel.ptx
            assert "cp.async" in kernel.ptx
            # A product is rounded before it is added.
            assert "fma.rn.f32" not in kernel.ptx
