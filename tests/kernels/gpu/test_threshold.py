"""Thresholds against sorting."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.gpu.compiling import Variant, compile_for_hopper
from winnow_kernels.selection.gpu_threshold import LOWEST, leading, ordered, threshold

BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator]
def _order(scores_ptr: tl.tensor, keys_ptr: tl.tensor, block: tl.constexpr) -> None:
    places = tl.arange(0, block)
    tl.store(keys_ptr + places, ordered(tl.load(scores_ptr + places)))


@triton.jit  # type: ignore[untyped-decorator]
def _threshold(
    keys_ptr: tl.tensor, weights_ptr: tl.tensor, wanted_ptr: tl.tensor, found_ptr: tl.tensor, block: tl.constexpr
) -> None:
    places = tl.arange(0, block)
    found = threshold(tl.load(keys_ptr + places), tl.load(weights_ptr + places), tl.load(wanted_ptr))
    tl.store(found_ptr, found)


@triton.jit  # type: ignore[untyped-decorator]
def _thresholds(
    keys_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    found_ptr: tl.tensor,
    of_rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    rows = tl.arange(0, of_rows)
    places = rows[:, None] * block + tl.arange(0, block)
    found = threshold(tl.load(keys_ptr + places), tl.load(weights_ptr + places), tl.load(wanted_ptr + rows))
    tl.store(found_ptr + rows, found)


@triton.jit  # type: ignore[untyped-decorator]
def _leading(
    keys_ptr: tl.tensor, present: tl.tensor, count: tl.tensor, marked_ptr: tl.tensor, block: tl.constexpr
) -> None:
    places = tl.arange(0, block)
    marked = leading(tl.load(keys_ptr + places), places < present, count)
    tl.store(marked_ptr + places, marked.to(tl.int8))


def keys_of(scores: Tensor) -> Tensor:
    """What ``ordered`` returns, in torch."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def expected_threshold(keys: Tensor, weights: Tensor, wanted: int) -> int:
    in_order = keys.argsort(descending=True, stable=True)
    before = weights[in_order].cumsum(0) < wanted
    return int(keys[in_order[int(before.sum())]]) if not before.all() else LOWEST.value


def scores_of(kind: str, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, generator=generator)
    return {
        "normal": scores,
        "ties": (scores * 2).round() / 2,
        "equal": torch.full_like(scores, 3.5),
        "wide": scores * 10.0 ** (scores.roll(1) * 10).clamp(-30, 30),
        "infinite": scores.where(scores < 1, torch.inf).where(scores > -1, -torch.inf),
    }[kind]


KINDS = ["normal", "ties", "equal", "wide", "infinite"]


def test_keys_compare_as_scores_do(device: torch.device) -> None:
    special = torch.tensor([-torch.inf, -1e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1e-38, 1.0, 1e38, torch.inf])
    scores = torch.cat([special, scores_of("wide", BLOCK - len(special), 0)]).to(device)
    keys = torch.empty(BLOCK, dtype=torch.int32, device=device)
    _order[(1,)](scores, keys, BLOCK)
    assert torch.equal(keys[:, None] < keys, scores[:, None] < scores)
    assert torch.equal(keys, keys_of(scores))


@pytest.mark.parametrize("kind", KINDS)
def test_threshold(kind: str, device: torch.device) -> None:
    keys = keys_of(scores_of(kind, BLOCK, 1))
    weights = torch.randint(0, 40, (BLOCK,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    found = torch.zeros(1, dtype=torch.int32, device=device)
    for wanted in [1, 100, 1000, int(weights.sum()) + 1]:
        wanted_there = torch.tensor([wanted], dtype=torch.int32, device=device)
        _threshold[(1,)](keys.to(device), weights.to(device), wanted_there, found, BLOCK)
        assert int(found) == expected_threshold(keys, weights, wanted)


def test_several_rows_at_once(device: torch.device) -> None:
    keys = torch.stack([keys_of(scores_of(kind, BLOCK, 3)) for kind in KINDS[:4]])
    weights = torch.randint(0, 3, keys.shape, generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    wanted = torch.tensor([1, 64, 100, 1000], dtype=torch.int32)
    found = torch.zeros(4, dtype=torch.int32, device=device)
    _thresholds[(1,)](keys.to(device), weights.to(device), wanted.to(device), found, 4, BLOCK)
    rows = zip(keys, weights, wanted.tolist(), strict=True)
    assert found.tolist() == [expected_threshold(of_keys, of_weights, sought) for of_keys, of_weights, sought in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_leading(kind: str, device: torch.device) -> None:
    keys = keys_of(scores_of(kind, BLOCK, 5))
    marked = torch.zeros(BLOCK, dtype=torch.int8, device=device)
    for present, count in [(BLOCK, 0), (BLOCK, 1), (BLOCK, 100), (200, 150), (30, 30), (30, 31), (0, 5)]:
        _leading[(1,)](keys.to(device), present, count, marked, BLOCK)
        in_order = keys[:present].argsort(descending=True, stable=True)
        assert marked.nonzero()[:, 0].tolist() == sorted(in_order[:count].tolist())


def test_a_block_of_256k(device: torch.device) -> None:
    keys = keys_of(scores_of("normal", 16384, 7))
    marked = torch.zeros(16384, dtype=torch.int8, device=device)
    _leading[(1,)](keys.to(device), 16000, 500, marked, 16384, num_warps=32)
    assert set(marked.nonzero()[:, 0].tolist()) == set(keys[:16000].topk(500).indices.tolist())


def test_hopper_needs_no_local_memory() -> None:
    pointers = {"keys_ptr": "*i32", "weights_ptr": "*i32", "wanted_ptr": "*i32", "found_ptr": "*i32"}
    one = Variant(f"{__name__}:_threshold", pointers, {"block": 8192}, num_warps=8)
    longest = Variant(
        f"{__name__}:_leading",
        {"keys_ptr": "*i32", "present": "i32", "count": "i32", "marked_ptr": "*i8"},
        {"block": 16384},
        num_warps=32,
    )
    for compiled in compile_for_hopper([one, longest]):
        assert compiled.local_bytes == 0
