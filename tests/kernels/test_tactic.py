"""Tactic's selection against a plain float64 version, and what always holds of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import tactic_float64
from tests.kernels.attention_float64 import attend_head
from tests.kernels.caches import random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.parameters import tactic_parameters, termination_at
from tests.kernels.selected_tokens import dense_output
from tests.kernels.test_clusters import members_of
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import attend
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.clusters import ClusterIndex
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.tactic.reference import TacticStep
from winnow_kernels.selection.tokens import Selection

SLOTS, DIM, SPAN = 8192, 16, 128
SCALE = DIM**-0.5
CPU = torch.device("cpu")


@dataclass
class Case:
    cache: LayerCache
    context: Context
    index: ClusterIndex
    clustered: Tensor

    def step(self, parameters: list[Tactic], termination: Termination | None = None) -> TacticStep:
        return TacticStep(self.context, SCALE, termination, self.index, parameters, self.clustered)

    def queries(self, group: int, sharpness: float = 1.0, seed: int = 0) -> Tensor:
        """Queries in float64's reach: rank and cut must not hang on the last bit, so they are made of few bits."""
        heads = self.cache.kv_heads * group
        return sharpness * random_queries(self.context.requests, heads, DIM, seed)


NEVER = Termination.of([termination_at(0.0, 0.0, 1)] * 4, CPU)
"""What puts tokens in order and never comes to stop."""


def case(
    lengths: list[int],
    clustered: list[int],
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sinks: list[int] | None = None,
) -> Case:
    cache = random_cache(SLOTS, kv_heads, DIM, seed, dtype)
    index = ClusterIndex([cache], PageGenerations(SLOTS, 16, CPU), SPAN)
    context = scattered_context(lengths, SLOTS, seed=seed)
    for row, (tokens, of_row) in enumerate(zip(clustered, sinks or [0] * len(clustered), strict=True)):
        index.ensure(context, row, tokens, of_row)
    return Case(cache, context, index, torch.tensor(clustered))


def expected_of(
    a_case: Case,
    step: TacticStep,
    queries: Tensor,
    request: int,
    head: int,
    parameters: Tactic,
    in_order: bool = False,
) -> tuple[tactic_float64.Expected, float]:
    """What is selected, and the share that is told if all of it is read."""
    of_spans = a_case.index.read(0, step.spans)
    centroids = of_spans.centroids[head, request].double().numpy()
    spreads = of_spans.spreads[head, request].tolist()
    directions = of_spans.directions[head, request].double().repeat_interleave(a_case.index.clusters, 0).numpy()
    members = members_of(a_case.index, 0, step.spans, request, head)
    length = int(a_case.context.lengths[request])
    keys = a_case.cache.keys[a_case.context.slots[request, :length], head].double().numpy()
    grouped = queries.double().unflatten(1, (a_case.cache.kv_heads, -1))[request, head].numpy()
    clusters = [tactic_float64.Cluster(*own) for own in zip(centroids, spreads, directions, members, strict=False)]
    asked = (parameters.p, parameters.max_tokens, parameters.sinks, head)
    soft_cap = a_case.cache.softmax.cap
    expected = tactic_float64.select(grouped, keys, clusters, SCALE, *asked, in_order, soft_cap)
    return expected, tactic_float64.reported_share(grouped, keys, SCALE, expected, expected.positions, soft_cap)


def slots_of(selection: Selection, request: int, head: int) -> list[int]:
    return selection.slots[request, head, : selection.counts[request, head]].tolist()


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 4), (1, 4), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [[0, 0, 0, 0], [16, 1, 150, 16], [300, 127, 16, 40]])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("softmax", ["plain", "cap and sinks"])
def test_equals_the_plain_version(
    kv_heads: int, group: int, dtype: torch.dtype, sinks: list[int], in_order: bool, softmax: str
) -> None:
    a_case = case([1500, 200, 900, 100], [1408, 128, 640, 0], kv_heads, dtype, sinks=sinks)
    # Its shares are of the tokens' mass alone, whatever sinks take.
    a_case.cache = replace(a_case.cache, softmax=random_softmax(softmax, kv_heads * group))
    asked = [(0.9, None), (0.5, None), (0.8, 400), (0.3, 60)]
    parameters = [tactic_parameters(*of_row, sinks=first) for of_row, first in zip(asked, sinks, strict=True)]
    step = a_case.step(parameters, NEVER if in_order else None)
    queries = a_case.queries(group, sharpness=2.0).to(dtype)
    meter = Meter(4, CPU)
    selection = step.select(0, queries, a_case.cache, meter)
    step.note(selection, attend(queries, a_case.cache, selection, SCALE, meter))
    for request, of_request in enumerate(parameters):
        of_heads = [expected_of(a_case, step, queries, request, head, of_request, in_order) for head in range(kv_heads)]
        for head, (expected, _) in enumerate(of_heads):
            slots = a_case.context.slots[request, expected.positions].tolist()
            assert slots_of(selection, request, head) == slots
        share = sum(share for _, share in of_heads) / kv_heads
        assert float(step.estimated_share[request]) == pytest.approx(share, rel=1e-4)
        assert bool(step.capped[request]) == any(expected.capped for expected, _ in of_heads)
    assert step.capped.tolist()[:2] == [False, False]
    assert bool(step.capped[3])


@given(
    lengths=st.lists(st.integers(2, 1200), min_size=1, max_size=3),
    unclustered=st.integers(1, 400),
    p=st.floats(0.05, 0.99),
    cap=st.one_of(st.none(), st.integers(1, 900)),
    sinks=st.one_of(st.just(0), st.integers(1, 500)),
    sharpness=st.floats(0.1, 10.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_what_always_holds(
    lengths: list[int], unclustered: int, p: float, cap: int | None, sinks: int, sharpness: float, seed: int
) -> None:
    clustered = [max(0, length - unclustered) // SPAN * SPAN for length in lengths]
    a_case = case(lengths, clustered, seed=seed, sinks=[sinks] * len(lengths))
    queries = a_case.queries(2, sharpness, seed)
    counts = []
    for share in (p, min(1.0, p + 0.1)):
        of_each = [tactic_parameters(share, cap, sinks=sinks) for _ in lengths]
        step = a_case.step(of_each)
        meter = Meter(len(lengths), CPU)
        selection = step.select(0, queries, a_case.cache, meter)
        step.note(selection, attend(queries, a_case.cache, selection, SCALE, meter))
        in_order = a_case.step(of_each, NEVER).select(0, queries, a_case.cache, meter)
        counts.append(selection.counts)
        for request, length in enumerate(lengths):
            context = a_case.context.slots[request, :length].tolist()
            kept = context[:sinks] + context[max(sinks, clustered[request]) :][::-1]
            for head in range(2):
                slots = slots_of(selection, request, head)
                assert len(set(slots)) == len(slots)
                assert set(slots) <= set(context)
                assert slots == context[::-1] or slots[: len(kept[: cap or None])] == kept[: cap or None]
                assert sorted(slots_of(in_order, request, head)) == sorted(slots)
                assert len(slots) <= 0.75 * length or slots == context[::-1]
                assert cap is None or len(slots) <= cap or min(cap, length) > 0.75 * length
            assert 0 < float(step.estimated_share[request]) <= 1 + 1e-6
    assert (counts[0] <= counts[1]).all()


def test_neighbours_do_not_matter() -> None:
    lengths, clustered = [1500, 300, 2000, 50], [1408, 256, 1152, 0]
    a_case = case(lengths, clustered)
    parameters = [tactic_parameters(p, cap) for p, cap in [(0.9, None), (0.6, 200), (0.8, None), (0.7, 20)]]
    queries = a_case.queries(4, sharpness=3.0)
    step = a_case.step(parameters)
    together = step.select(0, queries, a_case.cache, Meter(4, CPU))
    step.attend(0, queries, a_case.cache, Meter(4, CPU))
    for row in range(4):
        single = replace(a_case, context=a_case.context.rows([row]), clustered=a_case.clustered[[row]])
        alone_step = single.step([parameters[row]])
        alone = alone_step.select(0, queries[[row]], a_case.cache, Meter(1, CPU))
        alone_step.attend(0, queries[[row]], a_case.cache, Meter(1, CPU))
        for head in range(2):
            assert slots_of(together, row, head) == slots_of(alone, 0, head)
        torch.testing.assert_close(step.estimated_share[row], alone_step.estimated_share[0])


@pytest.mark.parametrize("clustered", [[0, 0], [640, 128]])
def test_all_of_the_mass_is_dense_attention(clustered: list[int]) -> None:
    a_case = case([700, 150], clustered)
    queries = a_case.queries(3, sharpness=4.0)
    meter = Meter(2, CPU)
    output = a_case.step([tactic_parameters(1.0)] * 2).attend(0, queries, a_case.cache, meter)
    for request, length in enumerate([700, 150]):
        slots = a_case.context.slots[request, :length]
        for head in range(2):
            of_group = slice(head * 3, head * 3 + 3)
            keys, values = a_case.cache.keys[slots, head], a_case.cache.values[slots, head]
            expected, _ = attend_head(queries[request, of_group], keys, values, SCALE)
            torch.testing.assert_close(output[request, of_group].double(), expected, atol=1e-5, rtol=1e-5)
    assert meter.attended.tolist() == [1400, 300]


@pytest.mark.parametrize("sharpness", [0.0, 1e4, 1e-6])
def test_any_scale_of_scores(sharpness: float) -> None:
    a_case = case([1000], [896])
    queries = a_case.queries(4, sharpness)
    for sign in (1, -1):
        step = a_case.step([tactic_parameters(0.9)])
        selection = step.select(0, sign * queries, a_case.cache, Meter(1, CPU))
        assert step.attend(0, sign * queries, a_case.cache, Meter(1, CPU)).isfinite().all()
        assert step.estimated_share.isfinite().all()
        assert (selection.counts >= 104).all()
    if sharpness < 1:
        # All weights alike: nine tenths of the tokens, and so all.
        assert (selection.counts == 1000).all()


def test_clusters_that_score_alike_are_taken_together() -> None:
    a_case = case([1000], [896])
    a_case.cache.keys.fill_(1.0)
    index = ClusterIndex([a_case.cache], PageGenerations(SLOTS, 16, CPU), SPAN)
    index.ensure(a_case.context, 0, 896)
    a_case = replace(a_case, index=index)
    queries = a_case.queries(2)
    # What is in no cluster holds 0.104: that is enough, or all else is needed.
    for p, count in ((0.1, 104), (0.11, 1000)):
        selection = a_case.step([tactic_parameters(p)]).select(0, queries, a_case.cache, Meter(1, CPU))
        assert selection.counts.tolist() == [[count, count]]


def test_most_of_the_context_becomes_all_of_it() -> None:
    a_case = case([1000, 1000, 1000], [896, 896, 896])
    a_case.cache.keys.fill_(1.0)
    index = ClusterIndex([a_case.cache], PageGenerations(SLOTS, 16, CPU), SPAN)
    for row in range(3):
        index.ensure(a_case.context, row, 896)
    parameters = [tactic_parameters(0.8), tactic_parameters(0.8, 760), tactic_parameters(0.8, 750)]
    step = replace(a_case, index=index).step(parameters)
    meter = Meter(3, CPU)
    selection = step.select(0, a_case.queries(2), a_case.cache, meter)
    assert selection.counts.tolist() == [[1000, 1000], [1000, 1000], [750, 750]]
    assert slots_of(selection, 0, 1) == a_case.context.slots[0].flip(0).tolist()
    step.attend(0, a_case.queries(2), a_case.cache, Meter(3, CPU))
    assert step.capped.tolist() == [False, False, True]
    assert step.estimated_share.tolist() == pytest.approx([1.0, 1.0, 0.75], abs=5e-3)
    # The members that the third looks up: two bytes of an offset, four of where a cluster begins.
    assert int(meter.read_bytes[2] - meter.read_bytes[0]) == 2 * (750 - 104) * 6


def test_a_span_that_is_gone_is_attended_in_full() -> None:
    a_case = case([1000], [896])
    page = a_case.context.slots[0, 3 * SPAN] // 16
    a_case.index.generations.written(page[None] * 16)
    step = a_case.step([tactic_parameters(0.5)])
    selection = step.select(0, a_case.queries(2, sharpness=8.0), a_case.cache, Meter(1, CPU))
    kept = [*range(999, 895, -1), *range(4 * SPAN - 1, 3 * SPAN - 1, -1)]
    slots, kept_slots = slots_of(selection, 0, 0), a_case.context.slots[0, kept].tolist()
    assert slots[: len(kept)] == kept_slots


def test_a_sink_that_its_cluster_hides() -> None:
    """Token 0 holds two fifths of the attention, and its cluster's centroid nothing of what the query looks for."""
    a_case = case([2500], [2432], kv_heads=1)
    cache, slots = a_case.cache, a_case.context.slots[0]
    generator = torch.Generator().manual_seed(0)
    topics = torch.randn(80, DIM, generator=generator)
    cache.keys[:, 0] = topics[torch.randint(80, (SLOTS,), generator=generator)] + 0.2 * cache.keys[:, 0]
    query = a_case.queries(1, sharpness=1.5)
    query[..., 0] = 4 / SCALE
    query[..., 1] = -0.02 / SCALE
    cache.keys[..., :2] = 0.0
    held_by_others = torch.logsumexp(query[0, 0] @ cache.keys[slots[1:], 0].T * SCALE, -1)
    cache.keys[slots[:16], 0] = 0.0
    cache.keys[slots[:16], 0, 1] = 20.0
    cache.keys[slots[:16], 0, 0] = held_by_others / 4 * torch.tensor([1.0] + [-1 / 15] * 15)
    weights = (query[0, 0] @ cache.keys[slots, 0].T * SCALE).softmax(-1)
    assert 0.35 < float(weights[0]) < 0.5
    shares = []
    for sinks in (0, 16):
        index = ClusterIndex([cache], PageGenerations(SLOTS, 16, CPU), SPAN)
        index.ensure(a_case.context, 0, 2432, sinks)
        step = replace(a_case, index=index).step([tactic_parameters(0.9, sinks=sinks)])
        selection = step.select(0, query, cache, Meter(1, CPU))
        step.note(selection, attend(query, cache, selection, SCALE, Meter(1, CPU)))
        chosen = torch.tensor(slots_of(selection, 0, 0))
        assert len(chosen) < 0.75 * 2500
        shares.append((float(step.estimated_share[0]), float(weights[torch.isin(slots, chosen)].sum())))
    (reported_without, true_without), (reported, true) = shares
    assert reported_without < true_without - 0.1
    assert true_without < 0.65
    assert reported == pytest.approx(true, abs=0.02)
    assert true >= 0.85


def test_requests_with_other_sinks_share_a_prefix() -> None:
    sinks = [16, 0, 40, 300, 16]
    parameters = [tactic_parameters(0.8, sinks=of_row) for of_row in sinks]
    base = case([1500], [0])
    everybody = Context(base.context.slots.expand(5, -1), base.context.lengths.expand(5))
    index = ClusterIndex([base.cache], PageGenerations(SLOTS, 16, CPU), SPAN)
    built = [index.ensure(everybody, row, 1408, of_row) for row, of_row in enumerate(sinks)]
    # Only the span in which the sinks end differs.
    assert built == [1408 - 16, SPAN, SPAN - 40, 3 * SPAN - 300, 0]
    together = Case(base.cache, everybody, index, torch.full((5,), 1408))
    queries = together.queries(2, sharpness=4.0)
    step = together.step(parameters)
    selection = step.select(0, queries, base.cache, Meter(5, CPU))
    step.note(selection, attend(queries, base.cache, selection, SCALE, Meter(5, CPU)))
    for row, of_row in enumerate(sinks):
        single = case([1500], [1408], sinks=[of_row])
        alone_step = single.step([parameters[row]])
        alone = alone_step.select(0, queries[[row]], single.cache, Meter(1, CPU))
        alone_step.note(alone, attend(queries[[row]], single.cache, alone, SCALE, Meter(1, CPU)))
        for head in range(2):
            assert slots_of(selection, row, head) == slots_of(alone, 0, head)
        torch.testing.assert_close(step.estimated_share[row], alone_step.estimated_share[0])


def test_counts_what_it_reads() -> None:
    a_case = case([1000, 60], [896, 0])
    parameters = [tactic_parameters(0.6)] * 2
    step = a_case.step(parameters)
    queries = a_case.queries(2, sharpness=5.0)
    meter = Meter(2, CPU)
    selection = step.select(0, queries, a_case.cache, meter)
    vector, clusters = DIM * 4, 7 * 8
    # Seven spans, each with its directions.
    index = 2 * (clusters * (vector + 2 + 2) + 7 * DIM * 2)
    sampled = sum(expected_of(a_case, step, queries, 0, head, parameters[0])[0].sampled for head in range(2))
    assert sampled > 100
    selected = int(selection.counts[0].sum()) - 2 * 104
    expected = index + sampled * (vector + 6) + 2 * 104 * vector + selected * 6
    # The other request has no clusters: it attends to everything, and nothing is scored.
    assert meter.read_bytes.tolist() == [expected, 0]
    step.attend(0, queries, a_case.cache, meter)
    assert meter.attended.tolist() == [int(selection.counts[0].sum()), 120]


def test_a_cap_keeps_the_front_of_the_order() -> None:
    a_case = case([1500], [1408], kv_heads=1)
    queries = a_case.queries(2, sharpness=4.0)
    kept = 1500 - 1408
    cut, less = (
        slots_of(a_case.step([tactic_parameters(0.8, cap)]).select(0, queries, a_case.cache, Meter(1, CPU)), 0, 0)
        for cap in (300, 200)
    )
    uncut = slots_of(a_case.step([tactic_parameters(0.8)]).select(0, queries, a_case.cache, Meter(1, CPU)), 0, 0)
    assert 400 < len(uncut) < 0.75 * 1500
    assert len(cut) == 300
    assert less == cut[:200]
    assert set(cut) < set(uncut)
    assert cut[:kept] == uncut[:kept]


def test_what_matters_most_to_a_group_comes_first() -> None:
    a_case = case([1500], [1408], kv_heads=1)
    queries = a_case.queries(2) * torch.tensor([1.0, 5.0])[:, None]
    selection = a_case.step([tactic_parameters(0.5)], NEVER).select(0, queries, a_case.cache, Meter(1, CPU))
    slots = slots_of(selection, 0, 0)
    assert len(slots) < 0.75 * 1500
    weights = (a_case.cache.keys[slots, 0] @ queries[0, 1] * SCALE).double().softmax(0)
    assert float(weights[: len(slots) // 5].sum()) > 0.5


def test_early_termination_reads_less() -> None:
    a_case = case([3000], [2944])
    a_case.cache.values.fill_(1.0)
    termination = Termination.of([termination_at(0.01, 0.01, 4)], CPU)
    meter = Meter(1, CPU)
    step = a_case.step([tactic_parameters(0.6)], termination)
    output = step.attend(0, a_case.queries(2, sharpness=2.0), a_case.cache, meter)
    torch.testing.assert_close(output, torch.ones_like(output))
    assert int(meter.skipped_tiles) > 0


def test_full_layers_are_dense_for_the_rows_that_ask_for_it_and_alike_whatever_their_neighbours() -> None:
    lengths, clustered = [1500, 900, 1100], [1408, 640, 1024]
    base = case(lengths, clustered)
    index = ClusterIndex([base.cache] * 3, PageGenerations(SLOTS, 16, CPU), SPAN)
    for row, tokens in enumerate(clustered):
        index.ensure(base.context, row, tokens)
    a_case = replace(base, index=index)
    parameters = [
        tactic_parameters(0.5),
        tactic_parameters(0.4, 100, full_layers=2),
        tactic_parameters(0.6, full_layers=1),
    ]
    thresholds = [termination_at(1.0, 2.0, 1), None, termination_at(1.0, 2.0, 1)]
    queries = a_case.queries(2, sharpness=4.0)
    together = a_case.step(parameters, Termination.of(thresholds, CPU))
    alone = [
        replace(a_case, context=a_case.context.rows([row]), clustered=a_case.clustered[[row]]).step(
            parameters[row : row + 1], Termination.of(thresholds[row : row + 1], CPU)
        )
        for row in range(3)
    ]
    believed = [0.0, 0.0, 0.0]
    for layer in range(3):
        meter = Meter(3, CPU)
        output = together.attend(layer, queries, a_case.cache, meter)
        dense = dense_output(queries, a_case.context, a_case.cache, SCALE)
        for row, step in enumerate(alone):
            own_meter = Meter(1, CPU)
            own = step.attend(layer, queries[row : row + 1], a_case.cache, own_meter)
            torch.testing.assert_close(output[row], own[0], atol=1e-5, rtol=1e-5)
            for name, counts in vars(meter).items():
                assert counts[row] == getattr(own_meter, name)[0], name
            is_dense = layer < parameters[row].full_layers
            assert torch.allclose(output[row].double(), dense[row], atol=1e-5) == is_dense
            assert (meter.attended[row] == 2 * lengths[row]) == is_dense
            gained = float(step.estimated_share[0]) - believed[row]
            assert (gained == 1) == is_dense
            believed[row] += gained
            torch.testing.assert_close(together.estimated_share[row], step.estimated_share[0])
            assert together.capped[row] == step.capped[0]
    assert together.capped.tolist() == [False, True, False]


@pytest.mark.parametrize(("p", "cap", "field"), [(0.0, None, "p"), (1.1, None, "p"), (0.5, 0, "max_tokens")])
def test_bounds(p: float, cap: int | None, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Tactic(p=p, max_tokens=cap)
    with pytest.raises(ValueError, match="full_layers"):
        Tactic(full_layers=-1)
    with pytest.raises(ValueError, match="sinks"):
        Tactic(sinks=-1)


def test_parameters_for_each_request() -> None:
    with pytest.raises(ValueError, match="parameters"):
        case([100], [0]).step([])


def test_the_newest_token_is_in_no_cluster() -> None:
    a_case = case([128], [128])
    with pytest.raises(ValueError, match="clustered"):
        a_case.step([tactic_parameters(0.5)])


def test_a_long_answer_that_holds_most_of_the_attention_is_not_dropped() -> None:
    """Reasoning: 2,040 generated tokens hold 58 % of the attention, and the prompt's evidence says something else."""
    prompt, generated = 6016, 2040
    length = prompt + generated
    cache = random_cache(SLOTS, 1, DIM)
    context = scattered_context([length], SLOTS)
    slots = context.slots[0]
    generator = torch.Generator().manual_seed(1)
    keys = 0.2 * torch.randn(length, DIM, generator=generator)
    keys[:, 0] = 0.0
    # Weights fall as those of real keys do, as 1 / place.
    weights = 1 / (10 + torch.randperm(prompt, generator=generator))
    keys[:prompt, 0] = (0.42 * weights / weights.sum()).log() / SCALE
    keys[prompt:, 0] = math.log(0.58 / generated) / SCALE
    queries = torch.zeros(1, 2, DIM)
    queries[..., 0] = 1.0
    queries[..., 1:] = 0.1 * torch.randn(1, 2, DIM - 1, generator=generator)
    said = torch.randn(2, DIM, generator=generator)
    values = 0.1 * torch.randn(length, DIM, generator=generator) + said[0]
    values[prompt:] += said[1] - said[0]
    cache.keys[slots, 0], cache.values[slots, 0] = keys, values
    index = ClusterIndex([cache], PageGenerations(SLOTS, 16, CPU), SPAN)
    clustered = prompt - SPAN
    index.ensure(context, 0, clustered, 16)
    dense = dense_output(queries, context, cache, SCALE)[0]
    weights = (queries[0] @ cache.keys[slots, 0].T * SCALE).double().softmax(-1)
    assert float(weights[:, prompt:].sum(1).mean()) == pytest.approx(0.58, abs=0.02)

    errors = {}
    # As a policy that names no thresholds has them.
    for thresholds in (None, termination_at(0.03, 0.01, 4)):
        termination = Termination.of([thresholds], CPU)
        parameters = [tactic_parameters(0.95, sinks=16)]
        step = TacticStep(context, SCALE, termination, index, parameters, torch.tensor([clustered]))
        meter = Meter(1, CPU)
        selection = step.select(0, queries, cache, meter)
        attended = attend(queries, cache, selection, SCALE, meter, termination)
        step.note(selection, attended)
        true = (attended.log_sum_exp[0].double() - torch.logsumexp(queries[0] @ keys.T * SCALE, -1)).exp().mean()
        assert float(step.estimated_share[0]) == pytest.approx(float(true), abs=0.05)
        errors[thresholds] = float((attended.output[0].double() - dense).norm() / dense.norm())
        if thresholds is not None:
            assert int(meter.skipped_tiles[0]) > 0
            assert float(true) > 0.7
    assert errors[thresholds] < errors[None] + 0.2
