"""What Tactic's kernels find in long lists of clusters and on the fitted curve, against sorting and adding up."""

from __future__ import annotations

from math import ceil

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import COUNTS, Count, DecodeBatch
from winnow_kernels.indexes.cluster_tables import Tables
from winnow_kernels.kernel_arguments import Heads, Rows
from winnow_kernels.policies.tactic.gpu.fit import Curve, _place_on_curve, cut
from winnow_kernels.policies.tactic.gpu.ranks import rank_kernel
from winnow_kernels.policies.tactic.gpu.search import number_of, score_key_of, unique_keys
from winnow_kernels.policies.tactic.gpu.state import (
    HISTOGRAM,
    WINDOWS,
    Contexts,
    Entries,
    Rank,
    Ranked,
    Scored,
    TacticBatch,
    known_block_of,
)
from winnow_kernels.selection.gpu_threshold import LOWEST, counted, packed_of

BLOCK, SPAN, OF_SPAN = 2048, 1024, 64
KINDS = ["normal", "few steps", "equal", "wide", "two modes", "one far above", "large in front", "gap near", "gap far"]


@triton.jit  # type: ignore[untyped-decorator]
def _cuts(
    scores_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    brackets_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    found_ptr: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    block: tl.constexpr,
) -> None:
    numbers = tl.arange(0, block)
    present = numbers < count
    keys = tl.where(present, unique_keys(tl.load(scores_ptr + numbers, mask=present, other=0.0), numbers), LOWEST)
    packed = tl.where(present, counted(tl.load(sizes_ptr + numbers, mask=present, other=0)), 0)
    all_packed = packed_of(count, tokens).to(tl.uint32, bitcast=True)
    key, start = cut(keys, packed, all_packed, tl.load(wanted_ptr + tl.program_id(0)), brackets_ptr)
    found_ptr += tl.program_id(0) * 3
    tl.store(found_ptr, number_of(key))
    tl.store(found_ptr + 1, start)
    tl.store(found_ptr + 2, score_key_of(key))


@triton.jit  # type: ignore[untyped-decorator]
def _places(curves_ptr: tl.tensor, known_ptr: tl.tensor, found_ptr: tl.tensor) -> None:
    case = tl.program_id(0)
    a, b, wanted = (
        tl.load(curves_ptr + case * 3),
        tl.load(curves_ptr + case * 3 + 1),
        tl.load(curves_ptr + case * 3 + 2),
    )
    known, end = tl.load(known_ptr + case * 2), tl.load(known_ptr + case * 2 + 1)
    tl.store(found_ptr + case, _place_on_curve(Curve(a, b), known, end, wanted))


def scores_of(kind: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    scores = torch.randn(count, generator=generator)
    scores = {
        "normal": 40 + 3 * scores,
        "few steps": scores.round(),
        "equal": torch.full_like(scores, -3.5),
        "wide": scores * 10.0 ** (scores.roll(1) * 10).clamp(-15, 15),
        "two modes": scores + 100 * (torch.rand(count, generator=generator) < 0.09),
        "one far above": scores + 1000 * (torch.arange(count) == 77),
        "large in front": scores,
        # The gap is in a window: once no guess in it told anything, and the search had no end.
        "gap near": scores + 300 * (scores.argsort(descending=True).argsort() < ceil(0.1 * count)),
        "gap far": scores + 300 * (scores.argsort(descending=True).argsort() < ceil(0.6 * count)),
    }[kind]
    return (scores.view(torch.int32) >> 14 << 14).view(torch.float32)


def sizes_of(kind: str, scores: Tensor, tokens: int) -> Tensor:
    """Sizes, some of them 0, that sum to ``tokens``."""
    generator = torch.Generator().manual_seed(1)
    shares = torch.rand(len(scores), generator=generator)
    if kind == "large in front":
        shares = scores.exp()
    shares = shares * (torch.rand(len(scores), generator=generator) > 0.05)
    ends = (shares.double().cumsum(0) * (tokens / shares.double().sum())).round().int()
    return torch.diff(ends, prepend=ends.new_zeros(1))


def keys_of(scores: Tensor) -> Tensor:
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@pytest.mark.parametrize(
    ("kind", "count"), [*((kind, BLOCK) for kind in KINDS), ("normal", 1344), ("large in front", 1344), ("equal", 64)]
)
def test_ranks_and_cuts(kind: str, count: int, device: torch.device) -> None:
    tokens = count // OF_SPAN * SPAN
    scores = scores_of(kind, count)
    sizes = sizes_of(kind, scores, tokens)
    order = scores.argsort(descending=True, stable=True)
    ends = sizes[order].cumsum(0)
    starts = ends - sizes[order]

    def filled(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, BLOCK - count)).to(device)

    def numbers(*shape: int) -> Tensor:
        return torch.full(shape, -9, dtype=torch.int32, device=device)

    def scalars(*values: float, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    counts = torch.zeros(1, COUNTS, dtype=torch.int64, device=device)
    rows = Rows.of(DecodeBatch.empty(1, 16, 16, device))._replace(lengths=scalars(tokens + 100))
    asked = TacticBatch.empty(1, 1, device)._replace(clustered=scalars(tokens), p=scalars(0.5, dtype=torch.float64))
    nowhere = torch.empty(0, dtype=torch.int32, device=device)
    tables = Tables(nowhere, nowhere, nowhere, nowhere, 1, tl.constexpr(SPAN), tl.constexpr(OF_SPAN))
    ranks, known, windows = numbers(len(Rank)), numbers(known_block_of(BLOCK)), numbers(WINDOWS)
    searches = numbers(HISTOGRAM)
    rank_kernel[(1, 1)](
        Contexts(rows, asked, Entries(asked.entries, 1), tables),
        Heads.sized(1, 1, 16),
        counts,
        Scored(filled(scores), filled(sizes), nowhere, tl.constexpr(BLOCK)),
        Ranked(ranks, known, nowhere, windows, nowhere, searches, tl.constexpr(known_block_of(BLOCK))),
        10,
        block=BLOCK,
        fewest=-1,
        num_warps=4,
    )
    listed = ceil(count / 4)
    wanted = min(ceil(0.02 * tokens), int(ends[listed - 1]))
    last = int((ends < wanted).sum())
    near, far = max(ceil(0.1 * count) - 2, 0), min(ceil(0.6 * count) - 2 + 4, count) - 4
    expected = {
        Rank.KNOWN: wanted,
        Rank.KNOWN_CLUSTERS: last + 1,
        Rank.KNOWN_KEY: int(keys_of(scores)[order[last]]),
        Rank.KNOWN_LAST: int(order[last]),
        Rank.KNOWN_START: int(starts[last]),
        Rank.NEAR_BEFORE: int(starts[near]),
        Rank.NEAR_TOKENS: int(ends[near + 3] - starts[near]),
        Rank.FAR_BEFORE: int(starts[far]),
        Rank.FAR_TOKENS: int(ends[far + 3] - starts[far]),
    }
    assert {rank: int(ranks[rank]) for rank in Rank} == expected
    assert sorted(known[: last + 1].tolist()) == sorted(order[: last + 1].tolist())
    of_windows = torch.cat([order[near : near + 4], order[far : far + 4]])
    assert windows.tolist() == of_windows.tolist()
    assert int(counts[0, Count.READ_BYTES]) == 10 * (wanted + int(sizes[of_windows].clamp_max(16).sum()))

    sought = [1, wanted + 1, tokens // 20, tokens // 8, tokens // 3, tokens // 2, int(ends[far]), tokens]
    found = numbers(len(sought), 3)
    _cuts[(len(sought),)](
        filled(scores), filled(sizes), searches, scalars(*sought), found, count, tokens, BLOCK, num_warps=4
    )
    for tokens_sought, of_cut in zip(sought, found.tolist(), strict=True):
        place = int((ends < tokens_sought).sum())
        assert of_cut == [int(order[place]), int(starts[place]), int(keys_of(scores)[order[place]])]


def test_places_on_the_curve(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    curves, ranges, expected = [], [], []
    for case in range(60):
        known = int(torch.randint(1, 3000, (), generator=generator))
        last = known + int(torch.randint(1, 60_000, (), generator=generator))
        a, b, share = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        a, b = (0.0, b) if case % 10 == 0 else (a * 10.0 ** (case % 7 - 3), (b - 0.6) * 1e-4)
        end = last if b >= 0 else max(known, min(last, int(a / -b)))
        places = torch.arange(known + 1, end + 1, dtype=torch.float64)
        sums = (a / places + b).cumsum(0)
        wanted = share * float(sums[-1]) if len(sums) else 1.0
        curves.append([a, b, wanted])
        ranges.append([known, end])
        expected.append(min(known + int((sums < wanted).sum()) + 1, end))
    found = torch.zeros(len(expected), dtype=torch.int32, device=device)
    curves_there = torch.tensor(curves, dtype=torch.float64, device=device)
    _places[(len(expected),)](curves_there, torch.tensor(ranges, dtype=torch.int32, device=device), found)
    assert found.tolist() == expected
