"""The selection of the low-bit policies in Triton against the references: the same tokens, order, bytes and masses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.gpu.lowbit_cases import DTYPE, Asked, Case, Selected, check, selected
from tests.kernels.gpu.selectors import cache_on, check_untouched
from tests.kernels.parameters import lowbit_top_k_parameters, lowbit_top_p_parameters
from winnow_kernels.batch import WHOLE_TO_THE_END
from winnow_kernels.cache import LayerCache
from winnow_kernels.policies.lowbit_top_p.gpu.cuda import arguments as cuda_arguments
from winnow_kernels.policies.lowbit_top_p.gpu.cuda import kernels as cuda_kernels
from winnow_kernels.policies.lowbit_top_p.gpu.state import WAS_OPEN, Anchors
from winnow_kernels.softmax import Softmax

# More than what one program scores, lists and puts in order; on a GPU more than any of a loop's rounds, too.
LONG, FACTOR, EXAMPLES = (1100, 1, 10) if INTERPRETED else (70_000, 20, 60)
# Groups, head dims, bits and page sizes, each value once at least.
IN_CUDA = pytest.mark.parametrize("in_cuda", [False, True], ids=["triton", "cuda"])
SHAPES = [
    (2, 4, 64, 2, 16),
    (1, 1, 96, 3, 32),
    (1, 3, 128, 4, 16),
    (1, 7, 80, 2, 64),
    (2, 2, 256, 2, 16),
    (1, 8, 128, 2, 64),
    (1, 16, 64, 3, 32),
    (1, 4, 80, 4, 16),
]

SHAPES_IN_CUDA = [
    (2, 4, 64, 2, 16),
    (1, 1, 64, 2, 32),
    (3, 4, 128, 2, 64),
    (1, 3, 128, 2, 16),
    (2, 7, 128, 2, 16),
    (1, 8, 128, 2, 128),
]


def top_p(
    p: float, min_tokens: int = 0, max_tokens: int | None = None, sinks: int = 16, ordered: bool = False
) -> Asked:
    return Asked(lowbit_top_p_parameters(p, min_tokens, max_tokens, sinks), ordered)


def top_k(budget: int | None, ratio: float | None = None, sinks: int = 16, ordered: bool = False) -> Asked:
    return Asked(lowbit_top_k_parameters(budget, ratio, sinks), ordered)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "bits", "page_size", "in_cuda"),
    [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in SHAPES_IN_CUDA],
)
def test_shares_of_every_shape_are_the_references(
    kv_heads: int, group: int, head_dim: int, bits: int, page_size: int, in_cuda: bool, device: torch.device
) -> None:
    # What is long, of another kind, kept whole, and a single token.
    asked = [top_p(0.7), None, top_p(0.9, sinks=0), top_p(0.9)]
    lengths = [LONG, 300, 90, 1]
    case = Case.of(device, lengths, asked, kv_heads, group, head_dim, bits, page_size, in_cuda=in_cuda)
    got = selected(case)
    check(case, got)
    assert (got.selection.counts[0] > 64).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("stored", [torch.float16, torch.float8_e4m3fn])
def test_shares_of_other_caches_in_cuda_are_the_references(
    stored: torch.dtype, head_dim: int, device: torch.device
) -> None:
    # So many kept tokens of the first row that a warp takes several times sixteen.
    asked = [top_p(0.6, sinks=120), top_p(0.8)]
    lengths = [LONG, 300 * FACTOR]
    case = Case.of(device, lengths, asked, 2, 4, head_dim, page_size=64, in_cuda=True, stored=stored)
    got = selected(case)
    check(case, got)
    assert (got.selection.counts > 64).all()


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "bits", "page_size"), SHAPES[::3])
def test_budgets_of_every_shape_are_the_references(
    kv_heads: int, group: int, head_dim: int, bits: int, page_size: int, device: torch.device
) -> None:
    asked = [top_k(200 * FACTOR), None, top_k(None, 0.5, sinks=0, ordered=True), top_k(60), top_k(64)]
    case = Case.of(device, [LONG, 300, 321 * FACTOR, 200, 70], asked, kv_heads, group, head_dim, bits, page_size)
    got = selected(case)
    check(case, got)
    assert (got.selection.counts[0] == 200 * FACTOR).all()


@pytest.mark.parametrize(("sharpness", "soft_cap"), [(1.0, 1.0), (3.0, 2.0), (30.0, 50.0)])
@pytest.mark.parametrize("by_key", [False, True])
def test_scores_with_a_soft_cap(by_key: bool, sharpness: float, soft_cap: float, device: torch.device) -> None:
    # As few on a GPU, whose tanh is not torch's to the last bit: of many scores some are in the middle of two steps.
    shares = [top_p(0.3), None, top_p(0.5, ordered=True), top_p(0.6, max_tokens=130, sinks=0)]
    budgets = [top_k(100), None, top_k(130, ordered=True), top_k(None, 0.3, sinks=0)]
    lengths = [500, 300, 433, 390]
    case = Case.of(device, lengths, budgets if by_key else shares, 2, 3, sharpness=sharpness)
    bounded = replace(case, cache=replace(case.cache, softmax=Softmax(soft_cap)))
    got, plain = selected(bounded), selected(case)
    check(bounded, got)
    assert not torch.equal(got.selection.slots, plain.selection.slots)


@IN_CUDA
def test_every_row_gets_what_it_asks_for(in_cuda: bool, device: torch.device) -> None:
    asked = [
        top_p(0.1),
        top_p(0.1, min_tokens=200 * FACTOR, sinks=0),
        top_p(0.6, sinks=40, ordered=True),
        top_p(0.999),
        top_p(1.0),
        top_p(1.0, max_tokens=150 * FACTOR),
        top_p(0.9, max_tokens=130 * FACTOR, sinks=0, ordered=True),
        # A cap that cuts nothing, one that would be read whole, and one below what is always kept.
        top_p(0.3, max_tokens=300 * FACTOR),
        top_p(0.999, max_tokens=330 * FACTOR),
        top_p(0.9, min_tokens=16, max_tokens=40, sinks=40),
        None,
        top_p(0.5, min_tokens=10_000 * FACTOR),
    ]
    lengths = [FACTOR * (400 + 3 * row) for row in range(len(asked))]
    case = Case.of(device, lengths, asked, in_cuda=in_cuda)
    got = selected(case)
    check(case, got)
    assert got.capped.tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0]
    assert got.selection.counts[[3, 4, 8, 11], 0].tolist() == [WHOLE_TO_THE_END] * 4
    assert got.selection.counts[[1, 5, 6], 0].tolist() >= [200 * FACTOR, 150 * FACTOR, 130 * FACTOR]


@pytest.mark.parametrize("ordered", [False, True])
def test_of_equal_keys_a_budget_takes_the_first(ordered: bool, device: torch.device) -> None:
    lengths = [400 * FACTOR, 500 * FACTOR]
    slots = 1000 * FACTOR
    cache = random_cache(slots, 1, 64, dtype=DTYPE)
    # All pages alike.
    keys = cache.keys[:16].repeat(-(-slots // 16), 1, 1)[:slots]
    queries = 2 * random_queries(2, 4, 64, seed=1)
    # All tokens of the second row alike.
    queries[1] = 0
    own = cache_on(device, LayerCache(keys, cache.values))
    context = scattered_context(lengths, slots)
    asked = [top_k(200 * FACTOR, ordered=ordered), top_k(150 * FACTOR, ordered=ordered)]
    case = Case.with_keys(own, context, queries.to(device, DTYPE), asked)
    got = selected(case)
    check(case, got)
    newest = lengths[1] - (lengths[1] - 64) // 16 * 16
    first = case.context.slots[1, : 150 * FACTOR - newest]
    assert torch.equal(got.selection.slots[1, 0, newest : 150 * FACTOR].long(), first)


# Masses of marks that do not reach are never used.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("by_key", "in_cuda"), [(False, False), (False, True), (True, False)])
def test_a_key_that_beats_all_others(by_key: bool, in_cuda: bool, device: torch.device) -> None:
    asked = [top_k(200), top_k(150)] if by_key else [top_p(0.5), top_p(0.9, min_tokens=150)]
    case = Case.of(device, [700, 500], asked, kv_heads=2, group=4, in_cuda=in_cuda)
    slot = case.context.slots[:, 83]
    case.cache.keys[slot, 0] = (8.0 * case.queries[:, 0].float()).to(case.cache.keys.dtype)
    case.index.generations.written(slot // 16 * 16)
    case.index.ensure(slot // 16)
    got = selected(case)
    assert began_anew(case, got)
    check(case, got)
    again = selected(case, got.anchors)
    # Next time it is known in Triton, where units of mass do not begin at what is kept.
    assert began_anew(case, again) == in_cuda
    check(case, again)


def began_anew(case: Case, got: Selected) -> bool:
    return bool(got.scratch.open.any() if case.in_cuda else got.scratch.any_open)


def assert_equal(one: Selected, other: Selected) -> None:
    assert torch.equal(one.selection.counts, other.selection.counts)
    assert torch.equal(one.selection.slots, other.selection.slots)
    torch.testing.assert_close(one.beliefs, other.beliefs, rtol=0, atol=2e-6)
    assert torch.equal(one.capped, other.capped)
    assert torch.equal(one.read_bytes, other.read_bytes)


MIXED_P = [top_p(0.6), top_p(0.9, max_tokens=200), None, top_p(0.3, min_tokens=150, ordered=True)]
MIXED_K = [top_k(200), top_k(150, ordered=True), None, top_k(100)]
MIXED_LENGTHS = [450, 700, 300, 400]
MIXED = pytest.mark.parametrize(
    ("asked", "in_cuda"),
    [(MIXED_P, False), (MIXED_P, True), (MIXED_K, False)],
    ids=["shares", "shares in cuda", "budgets"],
)


def anchors_at(case: Case, top: int, cut: int, end: int, key: int) -> Anchors:
    anchors = case.no_anchors()
    anchors.tops.fill_(top)
    anchors.cuts.fill_(cut)
    anchors.ends.fill_(end)
    anchors.keys.fill_(key)
    return anchors


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@MIXED
def test_the_last_step_changes_nothing(asked: list[Asked | None], in_cuda: bool, device: torch.device) -> None:
    lengths = [FACTOR * length for length in MIXED_LENGTHS]
    case = Case.of(device, lengths, asked, sharpness=3.0, in_cuda=in_cuda)
    first = selected(case)
    check(case, first)
    assert_equal(selected(case, first.anchors), first)
    # Those of other requests: far higher and far lower steps, and cuts and keys above and below all.
    others = ((5000, 220, 4000, 1500), (-5000, 0, 0, 0), (150, 200, 4000, 1530), (150, 200, -4000, 1530))
    for top, cut, end, key in others:
        other = selected(case, anchors_at(case, top, cut, end, key))
        assert_equal(other, first)
        if cut > 0 and (end > 0 or not in_cuda):
            assert WAS_OPEN in (other.scratch.key_open if case.by_key else other.scratch.open)


@IN_CUDA
def test_everything_is_taken_whatever_another_request_took(in_cuda: bool, device: torch.device) -> None:
    # So few tokens hold nearly all that a cap cuts where there is next to nothing.
    asked = [top_p(0.9995, max_tokens=290 * FACTOR)]
    case = Case.of(device, [FACTOR * 400], asked, sharpness=8.0, in_cuda=in_cuda)
    first = selected(case)
    check(case, first)
    assert first.selection.counts.tolist() == [[290 * FACTOR]]
    assert_equal(selected(case, anchors_at(case, 0, 100, 0, 0)), first)


def test_a_warp_takes_more_than_it_has_room_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_arguments, "STEPS_KEPT", 512)
    monkeypatch.setattr(cuda_kernels, "_TILES_TAKEN", 1 << 20)
    asked = [top_p(0.9995, max_tokens=290), top_p(0.5)]
    case = Case.of(device, [2 * LONG, 2 * LONG], asked, sharpness=1.0, in_cuda=True)
    check(case, selected(case))


@IN_CUDA
def test_the_lowest_cut_of_the_last_steps_is_remembered(in_cuda: bool, device: torch.device) -> None:
    case = Case.of(device, [FACTOR * 500], [top_p(0.8)], sharpness=3.0, in_cuda=in_cuda)

    def remembered(anchors: Anchors) -> tuple[Tensor, Tensor]:
        after = selected(case, anchors).anchors
        return after.cuts[after.slots], after.ends[after.slots]

    own, own_ends = remembered(case.no_anchors())
    assert (own > 3).all()
    cuts, ends = remembered(anchors_at(case, 0, 2, -4000, 0))
    assert (cuts == 3).all()
    assert not in_cuda or (ends == -3999).all()
    cuts, ends = remembered(anchors_at(case, 0, 250, 4000, 0))
    assert torch.equal(cuts, own)
    assert not in_cuda or torch.equal(ends, own_ends)


@MIXED
def test_neighbours_change_nothing(asked: list[Asked | None], in_cuda: bool, device: torch.device) -> None:
    lengths = [FACTOR * length for length in MIXED_LENGTHS]
    case = Case.of(device, lengths, asked, kv_heads=2, seed=3, in_cuda=in_cuda)
    together = selected(case)
    assert_equal(selected(case, rows_at_once=3), together)
    for row, own in enumerate(asked):
        if own is None:
            check_untouched(together.selection, row)
            continue
        alone = selected(case.row(row))
        assert torch.equal(alone.selection.counts[0], together.selection.counts[row])
        for head, count in enumerate(alone.selection.counts[0].tolist()):
            slots = together.selection.slots[row, head, : max(0, count)]
            assert torch.equal(alone.selection.slots[0, head, : max(0, count)], slots)
        assert torch.equal(alone.beliefs[0], together.beliefs[row])
        assert alone.read_bytes[0] == together.read_bytes[row]


@IN_CUDA
def test_a_selection_that_has_no_room_is_the_whole_context(in_cuda: bool, device: torch.device) -> None:
    asked = [top_p(0.5, min_tokens=200 * FACTOR)]
    case = Case.of(device, [500 * FACTOR], asked, in_cuda=in_cuda)
    assert selected(case, width=150 * FACTOR).selection.counts.tolist() == [[WHOLE_TO_THE_END]]


SHARES = {
    "lengths": st.lists(st.integers(1, 400 * FACTOR), min_size=1, max_size=3),
    "p": st.floats(0.01, 1.0),
    "sinks": st.integers(0, 100),
    "least": st.integers(0, 200 * FACTOR),
    "cap": st.none() | st.integers(1, 300 * FACTOR),
    "sharpness": st.floats(0.0, 6.0),
    "seed": st.integers(0, 1000),
}


def check_shares(
    lengths: list[int],
    p: float,
    sinks: int,
    least: int,
    cap: int | None,
    sharpness: float,
    seed: int,
    *,
    in_cuda: bool,
) -> None:
    device = torch.device("cpu" if INTERPRETED else "cuda")
    asked = [top_p(p, least, cap, sinks)] * len(lengths)
    case = Case.of(device, lengths, asked, sharpness=sharpness, seed=seed, in_cuda=in_cuda)
    check(case, selected(case))


# Where rounding differs, a token may be of another step.
@given(arguments=st.fixed_dictionaries(SHARES))
@settings(max_examples=EXAMPLES, derandomize=True)
def test_any_share_is_the_references(arguments: dict[str, Any]) -> None:
    check_shares(**arguments, in_cuda=False)


@given(arguments=st.fixed_dictionaries(SHARES))
@settings(max_examples=3 * EXAMPLES, derandomize=True)
def test_any_share_in_cuda_is_the_references(arguments: dict[str, Any]) -> None:
    check_shares(**arguments, in_cuda=True)


@given(
    length=st.integers(65, 600 * FACTOR),
    budget=st.integers(1, 400 * FACTOR),
    sinks=st.integers(0, 100),
    ordered=st.booleans(),
    sharpness=st.floats(0.0, 6.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=EXAMPLES, derandomize=True)
def test_any_budget_is_the_references(
    length: int, budget: int, sinks: int, ordered: bool, sharpness: float, seed: int
) -> None:
    device = torch.device("cpu" if INTERPRETED else "cuda")
    case = Case.of(device, [length], [top_k(budget, sinks=sinks, ordered=ordered)], sharpness=sharpness, seed=seed)
    check(case, selected(case))
