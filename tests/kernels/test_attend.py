"""Attention over a selection, with and without early termination, against a plain float64 version."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.kernels.attention_float64 import attend_head, attend_head_until_settled
from tests.kernels.caches import SOFTMAXES, random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.parameters import termination_at
from winnow_kernels.attend.early_termination import Termination, probe_of
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import attend
from winnow_kernels.cache import Context
from winnow_kernels.selection.tokens import Selection

SLOTS, DIM = 4096, 64
SCALE = DIM**-0.5


def _random_selection(context: Context, kv_heads: int, counts: list[list[int]], seed: int) -> Selection:
    """Distinct tokens in random order; entries beyond the counts lie beyond the pool."""
    generator = torch.Generator().manual_seed(seed)
    width = max(max(row) for row in counts)
    slots = torch.full((context.requests, kv_heads, width), SLOTS)
    for request, row in enumerate(counts):
        for head, count in enumerate(row):
            order = torch.randperm(int(context.lengths[request]), generator=generator)[:count]
            slots[request, head, :count] = context.slots[request, order]
    return Selection(slots, torch.tensor(counts))


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 4), (1, 8), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_equals_the_plain_version(kv_heads: int, group: int, dtype: torch.dtype, softmax: str) -> None:
    cache = random_cache(SLOTS, kv_heads, DIM, dtype=dtype)
    cache = replace(cache, softmax=random_softmax(softmax, kv_heads * group))
    sinks = cache.softmax.sink_logits
    context = scattered_context([700, 33, 1], SLOTS)
    counts = [[300 + head for head in range(kv_heads)], [33] * kv_heads, [1] * kv_heads]
    selection = _random_selection(context, kv_heads, counts, seed=1)
    queries = random_queries(3, kv_heads * group, DIM).to(dtype)
    meter = Meter(3, torch.device("cpu"))

    attended = attend(queries, cache, selection, SCALE, meter)

    assert attended.output.dtype == dtype
    for request, row in enumerate(counts):
        for head, count in enumerate(row):
            slots = selection.slots[request, head, :count]
            of_group = slice(head * group, (head + 1) * group)
            output, mass = attend_head(
                queries[request, of_group],
                cache.keys[slots, head],
                cache.values[slots, head],
                SCALE,
                cache.softmax.cap,
                None if sinks is None else sinks[of_group],
            )
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(attended.output[request, of_group].double(), output, atol=tolerance, rtol=0)
            torch.testing.assert_close(attended.log_sum_exp[request, of_group].double(), mass, atol=1e-4, rtol=0)
    assert meter.attended.tolist() == [sum(row) for row in counts]
    assert meter.read_bytes.tolist() == [sum(row) * 2 * DIM * cache.keys.element_size() for row in counts]


@given(
    lengths=st.lists(st.integers(1, 1350), min_size=1, max_size=3),
    scale=st.sampled_from([0.003, 0.03, 0.3]),
    direction=st.sampled_from([0.0003, 0.003, 0.3]),
    patience=st.integers(1, 5),
    softmax=st.sampled_from(SOFTMAXES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_early_termination_reads_what_the_plain_version_reads(
    lengths: list[int], scale: float, direction: float, patience: int, softmax: str, seed: int
) -> None:
    kv_heads, group = 2, 2
    cache = replace(random_cache(SLOTS, kv_heads, DIM, seed), softmax=random_softmax(softmax, 4, seed))
    # A common part in all values, as in a model: outputs of random values alone never settle.
    cache = replace(cache, values=cache.values + 3 * torch.randn(DIM, generator=torch.Generator().manual_seed(seed)))
    context = scattered_context(lengths, SLOTS + 16 * len(lengths), seed=seed)
    context = Context(context.slots.clamp_max(SLOTS - 1), context.lengths)
    counts = [[max(1, length - 7 * head) for head in range(kv_heads)] for length in lengths]
    selection = _random_selection(context, kv_heads, counts, seed)
    queries = random_queries(len(lengths), kv_heads * group, DIM, seed)
    thresholds = [termination_at(scale, direction, patience) if r != 1 else None for r in range(len(lengths))]
    meter = Meter(len(lengths), torch.device("cpu"))

    attended = attend(queries, cache, selection, SCALE, meter, Termination.of(thresholds, torch.device("cpu")))

    for request, row in enumerate(counts):
        skipped = 0
        for head, count in enumerate(row):
            of_group = slice(head * group, (head + 1) * group)
            expected = attend_head_until_settled(
                queries[request, of_group],
                cache,
                head,
                selection.slots[request, head, :count].tolist(),
                SCALE,
                thresholds[request],
            )
            assume(expected.margin > 1e-5)
            assert attended.read[request, head] == expected.read
            torch.testing.assert_close(
                attended.output[request, of_group].double(), expected.outputs, atol=1e-5, rtol=1e-5
            )
            skipped += expected.tiles - expected.tiles_read
        assert meter.skipped_tiles[request] == (skipped if thresholds[request] else 0)
    assert meter.attended.tolist() == attended.read.sum(1).tolist()


@pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 80, 96, 112, 128, 256])
def test_the_probe_is_spread_over_the_whole_head_dimension(head_dim: int) -> None:
    probed = probe_of(torch.arange(head_dim)).tolist()
    assert len(probed) == len(set(probed)) == min(32, head_dim)
    gaps = [after - before for before, after in pairwise([-1, *probed, head_dim])]
    assert max(gaps) <= math.ceil(head_dim / 32)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128])
def test_what_changes_in_the_last_dimensions_alone_is_not_settled(head_dim: int) -> None:
    """A tile later the output's last tenth is another, all else the same."""
    cache = random_cache(1024, 1, head_dim)
    cache.keys.zero_()
    cache.values[:] = 1.0
    cache.values[:, :, -(head_dim // 10) :] = 20.0 * (torch.arange(1024) // 64 % 3)[:, None, None]
    selection = Selection(torch.arange(1024)[None, None], torch.tensor([[1024]]))
    thresholds = Termination.of([termination_at(0.02, 0.001, 2)], torch.device("cpu"))
    queries = random_queries(1, 2, head_dim)
    attended = attend(queries, cache, selection, 1.0, Meter(1, torch.device("cpu")), thresholds)
    assert attended.read.item() > 6 * 64


def test_infinite_patience_changes_nothing() -> None:
    cache = random_cache(SLOTS, 2, DIM)
    context = scattered_context([2000, 900], SLOTS)
    selection = _random_selection(context, 2, [[2000, 1500], [900, 64]], seed=3)
    queries = random_queries(2, 8, DIM)
    endless = Termination.of([termination_at(1.0, 1.0, math.inf)] * 2, torch.device("cpu"))  # type: ignore[arg-type]
    plain_meter, meter = Meter(2, torch.device("cpu")), Meter(2, torch.device("cpu"))

    plain = attend(queries, cache, selection, SCALE, plain_meter)
    patient = attend(queries, cache, selection, SCALE, meter, endless)

    torch.testing.assert_close(patient.output, plain.output, atol=1e-5, rtol=1e-5)
    assert torch.equal(patient.read, plain.read)
    assert torch.equal(meter.attended, plain_meter.attended)


@given(seed=st.integers(0, 10_000), kept=st.floats(0.01, 1.0), sharpness=st.floats(0.1, 20.0))
@settings(max_examples=60)
def test_error_is_bounded_by_the_mass_left_out(seed: int, kept: float, sharpness: float) -> None:
    """‖o − ô‖ ≤ 2 (1 − p(I)) max‖v‖ (Tactic, Proof 1)."""
    length = 200
    cache = random_cache(512, 1, DIM, seed)
    context = scattered_context([length], 512, seed=seed)
    queries = sharpness * random_queries(1, 4, DIM, seed)
    count = max(1, round(kept * length))
    selection = _random_selection(context, 1, [[count]], seed)

    meter = Meter(1, torch.device("cpu"))
    attended = attend(queries, cache, selection, SCALE, meter)

    slots = context.slots[0]
    output, mass = attend_head(queries[0], cache.keys[slots, 0], cache.values[slots, 0], SCALE)
    share = (attended.log_sum_exp[0].double() - mass).exp()
    bound = 2 * (1 - share).clamp_min(0) * cache.values[slots, 0].double().norm(dim=-1).max()
    error = (attended.output[0].double() - output).norm(dim=-1)
    assert (error <= bound + 1e-4).all()


def test_a_slot_beyond_the_pool_cannot_be_read() -> None:
    cache = random_cache(64, 1, DIM)
    selection = Selection(torch.tensor([[[1, 64]]]), torch.tensor([[2]]))
    with pytest.raises(IndexError):
        attend(random_queries(1, 1, DIM), cache, selection, SCALE, Meter(1, torch.device("cpu")))


def test_what_is_not_selected_may_hold_anything() -> None:
    cache = random_cache(64, 1, DIM)
    cache.values[0] = torch.nan
    selection = Selection(torch.tensor([[[1, 2, 0]], [[3, 4, 5]]]), torch.tensor([[2], [3]]))
    meter = Meter(2, torch.device("cpu"))
    assert attend(random_queries(2, 1, DIM), cache, selection, SCALE, meter).output.isfinite().all()
