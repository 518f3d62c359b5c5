"""The kernels of the low-bit policies compile for Hopper at real shapes and keep to registers."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.compiling import SHARED_LIMIT, SPARE_BYTES, Compiled, compile_launches
from tests.kernels.gpu.lowbit_launch import launch
from winnow_kernels.cuda.module import compiled as machine_code
from winnow_kernels.policies.lowbit_top_p.gpu.cuda.arguments import Sizes
from winnow_kernels.policies.lowbit_top_p.gpu.cuda.kernels import serves

# What may be put aside once a pair: by scoring between two of them, by keeping where a list was too short.
LOCAL_BYTES = {"score_kernel": 256, "keep_kernel": 256}


def compiled(head_dim: int, group: int, bits: int, page_size: int, by_key: bool) -> list[Compiled]:
    kernels = compile_launches(launch, head_dim, group, bits, page_size, by_key)
    assert any(kernel.kernel.endswith(":score_kernel") for kernel in kernels)
    for kernel in kernels:
        assert kernel.shared_bytes <= SHARED_LIMIT, kernel
        if kernel.kernel.endswith(":score_kernel"):
            # Codes are multiplied as bytes, on their way while others are.
            assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in kernel.ptx
            assert "cp.async" in kernel.ptx
    return kernels


@pytest.mark.parametrize(
    ("head_dim", "group", "by_key"),
    [
        (128, 4, False),
        (128, 8, True),
        (64, 1, False),
        (32, 2, False),
        pytest.param(128, 4, True, marks=pytest.mark.full),
        pytest.param(128, 8, False, marks=pytest.mark.full),
        pytest.param(64, 4, False, marks=pytest.mark.full),
        pytest.param(64, 8, False, marks=pytest.mark.full),
        pytest.param(128, 16, False, marks=pytest.mark.full),
    ],
)
def test_hopper_keeps_to_registers(head_dim: int, group: int, by_key: bool) -> None:
    for kernel in compiled(head_dim, group, 2, 16, by_key):
        assert kernel.local_bytes <= LOCAL_BYTES.get(kernel.kernel.split(":")[1], SPARE_BYTES), kernel


@pytest.mark.full
@pytest.mark.parametrize(
    ("head_dim", "group", "bits", "page_size", "by_key"),
    [
        (128, 1, 2, 16, False),
        (128, 4, 3, 32, False),
        (128, 4, 4, 16, True),
        (256, 4, 2, 16, False),
        (256, 8, 4, 64, False),
        (80, 3, 3, 16, True),
        (96, 5, 2, 64, False),
    ],
)
def test_other_shapes_fit(head_dim: int, group: int, bits: int, page_size: int, by_key: bool) -> None:
    for kernel in compiled(head_dim, group, bits, page_size, by_key):
        assert kernel.local_bytes <= max(LOCAL_BYTES.values()), kernel


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 4), (128, 2), (128, 4), (128, 8)])
def test_hopper_takes_two_blocks_of_cuda_at_once(head_dim: int, group: int, stored: torch.dtype) -> None:
    sizes = Sizes(head_dim, group, 8, 16, stored)
    assert serves(sizes, bits=2)
    # Each block takes a kibibyte more.
    assert 2 * (sizes.list_bytes + 1024) <= SHARED_LIMIT
    for file in ("list.cu", "take.cu"):
        assert machine_code(sizes.source(file), "sm_90")


@pytest.mark.parametrize(
    ("head_dim", "group", "bits", "stored"),
    [
        (128, 4, 3, torch.bfloat16),
        (256, 4, 2, torch.bfloat16),
        (64, 8, 2, torch.bfloat16),
        (96, 4, 2, torch.bfloat16),
        (128, 16, 2, torch.bfloat16),
        (128, 4, 2, torch.float32),
    ],
)
def test_other_shapes_are_left_to_triton(head_dim: int, group: int, bits: int, stored: torch.dtype) -> None:
    assert not serves(Sizes(head_dim, group, 8, 16, stored), bits)
