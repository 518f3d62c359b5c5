"""Tactic's selection in Triton against the reference: the same tokens, the same order, the same bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import scattered_context
from tests.kernels.gpu.compiling import compile_launches
from tests.kernels.parameters import tactic_parameters, termination_at
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.attend.gpu import attend as attend_on_device
from winnow_kernels.attend.reference import attend
from winnow_kernels.batch import ELSEWHERE, WHOLE_TO_THE_END, Count, DecodeBatch, DeviceSelection
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.indexes.cluster_tables import ClusterTables
from winnow_kernels.indexes.clusters import ClusterIndex
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.tactic.gpu.contexts import COUNTED
from winnow_kernels.policies.tactic.gpu.selection import select, selection_width
from winnow_kernels.policies.tactic.gpu.state import (
    SCORED,
    SLICE,
    WINDOW,
    TacticBatch,
    TacticStatistics,
    TacticWorkspace,
)
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.tactic.reference import TacticStep
from winnow_kernels.selection.tokens import Selection
from winnow_kernels.softmax import Softmax

SLOTS, DIM, SPAN, PAGE = 4096, 16, 64, 16
SCALE = DIM**-0.5
UNTOUCHED = -7


@dataclass
class Case:
    """Requests of the kind, and between them rows that are not."""

    cache: LayerCache
    context: Context
    index: ClusterIndex
    clustered: Tensor
    parameters: list[Tactic | None]

    @property
    def rows(self) -> list[int]:
        return [row for row, of_row in enumerate(self.parameters) if of_row is not None]


@dataclass
class Selected:
    """What the kernels left, and what the reference says of the kind's rows."""

    batch: DecodeBatch
    selection: DeviceSelection
    statistics: TacticStatistics
    reference: Selection
    step: TacticStep
    meter: Meter


def keys_of(kind: str, kv_heads: int, seed: int) -> Tensor:
    """Keys [slots, KV heads, head dim]: "random", or "clustered" in some 80 topics of different size."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(SLOTS, kv_heads, DIM, generator=generator)
    if kind == "random":
        return keys
    topics = torch.randn(80, kv_heads, DIM, generator=generator) * 2
    return topics[(80 * torch.rand(SLOTS, generator=generator).square()).long()] + 0.3 * keys


def case(
    parameters: list[Tactic | None],
    lengths: list[int],
    clustered: list[int],
    device: torch.device,
    kind: str = "random",
    kv_heads: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    strong: slice | None = None,
) -> Case:
    """Requests; of the first, keys at positions ``strong`` are longer than all others by far."""
    keys = keys_of(kind, kv_heads, seed).to(dtype)
    cache = LayerCache(keys.to(device), torch.zeros_like(keys, device=device))
    index = ClusterIndex([cache], PageGenerations(SLOTS, PAGE, device), SPAN, in_triton=False)
    context = scattered_context(lengths, SLOTS, PAGE, seed)
    context = Context(context.slots.to(device), context.lengths.to(device))
    if strong is not None:
        cache.keys[context.slots[0, strong]] *= 14
    for row, (tokens, of_row) in enumerate(zip(clustered, parameters, strict=True)):
        index.ensure(context, row, tokens, 0 if of_row is None else of_row.sinks)
    return Case(cache, context, index, torch.tensor(clustered, device=device), parameters)


def queries_of(a_case: Case, group: int, sharpness: float, seed: int = 0) -> Tensor:
    """Queries of few bits, so that scores are exact up to the order of their sums."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(a_case.parameters), a_case.cache.kv_heads * group, DIM)
    queries = (sharpness * torch.randn(shape, generator=generator) * 4).round() / 4
    return queries.to(a_case.cache.keys)


def run(a_case: Case, queries: Tensor, in_order: bool = True, layers: int = 1) -> Selected:
    device, context, rows = queries.device, a_case.context, a_case.rows
    count, heads, kv_heads = len(a_case.parameters), queries.shape[1], a_case.cache.kv_heads
    longest = -(-context.longest // PAGE) * PAGE
    batch = DecodeBatch.empty(count, longest, PAGE, device)
    batch.lengths.copy_(context.lengths)
    pages = context.slots[:, ::PAGE] // PAGE
    batch.page_table[:, : pages.shape[1]] = pages.where(pages < SLOTS // PAGE, 0)
    of_rows = TacticBatch.empty(count, -(-longest // SPAN), device)
    sinks = torch.tensor([0 if p is None else p.sinks for p in a_case.parameters], device=device)
    spans = a_case.index.lookup(context, a_case.clustered, sinks)
    of_rows.entries[:, : spans.most] = spans.entries
    of_rows.clustered.copy_(sinks // SPAN * SPAN + spans.covered.sum(1))
    of_rows.sinks.copy_(sinks)
    of_rows.by_priority.fill_(int(in_order))
    kind = [p for p in a_case.parameters if p is not None]
    of_rows.p[rows] = torch.tensor([p.p for p in kind], dtype=torch.float64, device=device)
    caps = [p.max_tokens or 0 for p in kind]
    of_rows.caps[rows] = torch.tensor(caps, dtype=torch.int32, device=device)
    selection = DeviceSelection.empty(count, kv_heads, selection_width(longest), device)
    selection.counts.fill_(UNTOUCHED)
    workspace = TacticWorkspace.empty(count, heads, kv_heads, -(-longest // SPAN), SPAN, device)
    statistics = TacticStatistics.empty(count, heads, device)

    order = Termination.of([termination_at(0.0, 0.0, 1)] * len(rows), device) if in_order else None
    step = TacticStep(context.rows(rows), SCALE, order, a_case.index, kind, a_case.clustered[rows])
    buffers = AttendBuffers.empty(count, heads, a_case.cache)
    meter = Meter(len(rows), device)
    for _ in range(layers):
        select(
            queries,
            a_case.cache,
            a_case.index.layers[0],
            batch,
            of_rows,
            selection,
            workspace,
            statistics,
            SCALE,
            in_order=in_order,
            capped=any(caps),
        )
        bytes_of_selecting = batch.counts[:, Count.READ_BYTES].clone()
        reference = step.select(0, queries[rows], a_case.cache, meter)
        step.note(reference, attend(queries[rows], a_case.cache, reference, SCALE, Meter(len(rows), device)))
        counts = torch.where(selection.counts == UNTOUCHED, ELSEWHERE, selection.counts)
        attended = DeviceSelection(selection.slots, counts)
        attend_on_device(
            queries, a_case.cache, batch, attended, SCALE, None, buffers, torch.empty_like(queries), statistics.reported
        )
        batch.counts.zero_()
        batch.counts[:, Count.READ_BYTES] = bytes_of_selecting
    return Selected(batch, selection, statistics, reference, step, meter)


def check(a_case: Case, selected: Selected, in_order: bool = True) -> None:
    counts = selected.selection.counts.tolist()
    for row in set(range(len(counts))) - set(a_case.rows):
        assert set(counts[row]) == {UNTOUCHED}
        assert not selected.batch.counts[row].any()
        assert not selected.statistics.reported.shares[row].any()
    for request, row in enumerate(a_case.rows):
        length = int(a_case.context.lengths[row])
        for head, count in enumerate(counts[row]):
            expected = selected.reference.slots[request, head, : selected.reference.counts[request, head]].tolist()
            assert count == (WHOLE_TO_THE_END if len(expected) == length else len(expected))
            if count > 0:
                slots = selected.selection.slots[row, head, :count].tolist()
                assert slots == expected if in_order else sorted(slots) == sorted(expected)
    shares = selected.statistics.reported.shares.mean(1)[a_case.rows]
    torch.testing.assert_close(shares, selected.step.estimated_share, rtol=1e-5, atol=1e-6)
    assert selected.statistics.capped[a_case.rows].bool().tolist() == selected.step.capped.tolist()
    assert selected.batch.counts[a_case.rows, Count.READ_BYTES].tolist() == selected.meter.read_bytes.tolist()


def test_rows_of_all_kinds(device: torch.device) -> None:
    parameters = [
        tactic_parameters(0.5),
        None,
        tactic_parameters(0.8),
        tactic_parameters(0.6, 150),
        tactic_parameters(1.0),
    ]
    parameters += [tactic_parameters(0.4, 30), tactic_parameters(0.05), tactic_parameters(0.7)]
    lengths, clustered = [460, 90, 333, 400, 200, 100, 250, 180], [384, 64, 256, 320, 128, 0, 192, 0]
    a_case = case(parameters, lengths, clustered, device)
    selected = run(a_case, queries_of(a_case, 2, 2.0))
    check(a_case, selected)
    counts = selected.selection.counts[:, 0].tolist()
    assert (counts[4], counts[7]) == (WHOLE_TO_THE_END, WHOLE_TO_THE_END)
    assert selected.statistics.capped.tolist() == [0, 0, 0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("group", "kv_heads", "dtype", "sharpness"), [(1, 3, torch.float16, 3.0), (5, 1, torch.float32, 1.0)]
)
def test_groups(group: int, kv_heads: int, dtype: torch.dtype, sharpness: float, device: torch.device) -> None:
    parameters: list[Tactic | None] = [tactic_parameters(0.5), tactic_parameters(0.9), None]
    a_case = case(parameters, [600, 250, 20], [512, 192, 0], device, "clustered", kv_heads, dtype, seed=1)
    check(a_case, run(a_case, queries_of(a_case, group, sharpness, seed=1), in_order=False), in_order=False)


@pytest.mark.parametrize(("sharpness", "soft_cap"), [(1.0, 2.0), (1.0, 4.0), (3.0, 50.0)])
@pytest.mark.parametrize("in_order", [True, False])
def test_scores_with_a_soft_cap(in_order: bool, sharpness: float, soft_cap: float, device: torch.device) -> None:
    max_tokens = 150 if in_order else None
    parameters: list[Tactic | None] = [tactic_parameters(0.15), tactic_parameters(0.6, max_tokens), None]
    a_case = case(parameters, [1100, 420, 20], [1024, 384, 0], device, "clustered", 2, seed=1)
    bounded = replace(a_case, cache=replace(a_case.cache, softmax=Softmax(soft_cap)))
    queries = queries_of(a_case, 2, sharpness, seed=1)
    selected = run(bounded, queries, in_order)
    check(bounded, selected, in_order)
    assert (selected.selection.counts[0] > 0).all()
    plain = run(a_case, queries, in_order)
    assert not torch.equal(plain.selection.counts, selected.selection.counts) or soft_cap == 50


@pytest.mark.parametrize("in_order", [True, False])
def test_more_clusters_than_one_slice_holds(in_order: bool, device: torch.device) -> None:
    cap = 300 if in_order else None
    parameters: list[Tactic | None] = [tactic_parameters(0.6), tactic_parameters(0.5, cap)]
    a_case = case(parameters, [2400, 1200], [2304, 1088], device, "clustered", seed=2)
    assert int(a_case.clustered[0]) > SLICE * CLUSTER_SIZE
    check(a_case, run(a_case, queries_of(a_case, 2, 2.0, seed=2), in_order), in_order)


@pytest.mark.parametrize("sinks", [0, 20, 70])
def test_contexts_that_end_in_pieces_of_a_span(sinks: int, device: torch.device) -> None:
    ends = [64 + 16, 64 + 32, 128 + 48, 128, 16, 2064]
    parameters: list[Tactic | None] = [tactic_parameters(0.4, sinks=sinks) for _ in ends]
    a_case = case(parameters, [3 * end // 2 + 7 for end in ends], ends, device, "clustered", 2, torch.float16, seed=6)
    check(a_case, run(a_case, queries_of(a_case, 2, 3.0, seed=6), in_order=False), in_order=False)


def test_rows_of_all_widths(device: torch.device) -> None:
    parameters: list[Tactic | None] = [tactic_parameters(p) for p in (0.6, 0.5, 0.7, 0.4)]
    a_case = case(parameters, [2250, 460, 1000, 100], [2176, 384, 896, 0], device, "clustered", seed=3)
    assert [-(-int(tokens) // CLUSTER_SIZE) for tokens in a_case.clustered] == [136, 24, 56, 0]
    check(a_case, run(a_case, queries_of(a_case, 2, 2.0, seed=3)))


@pytest.mark.parametrize("in_order", [True, False])
def test_sinks(in_order: bool, device: torch.device) -> None:
    """Of none, a page, less and more than a span, exactly two spans, more than is clustered, and than there is."""
    sinks = [0, 16, 40, 70, 128, 300, 1000, 1]
    cap = 220 if in_order else None
    parameters: list[Tactic | None] = [tactic_parameters(0.6, sinks=first) for first in sinks]
    parameters[1] = tactic_parameters(0.7, cap, sinks=16)
    parameters[3] = tactic_parameters(0.5, cap, sinks=70)
    parameters[4] = tactic_parameters(0.4, 140 if in_order else None, sinks=128)
    lengths, clustered = [460, 460, 600, 700, 600, 400, 90, 250], [384, 384, 512, 576, 512, 256, 0, 192]
    a_case = case(parameters, lengths, clustered, device, "clustered", seed=4)
    selected = run(a_case, queries_of(a_case, 2, 3.0, seed=4), in_order)
    check(a_case, selected, in_order)
    counts = selected.selection.counts[:, 0].tolist()
    assert [count == WHOLE_TO_THE_END for count in counts] == [False] * 5 + [True, True, False]
    for row in range(5):
        first = a_case.context.slots[row, : sinks[row]].tolist()
        slots = selected.selection.slots[row, 0, : counts[row]].tolist()
        assert set(first) <= set(slots)
        assert in_order or slots[: sinks[row]] == first
    assert bool(selected.statistics.capped.any()) == in_order


@pytest.mark.parametrize("sinks", [16, 40])
def test_sinks_in_front_of_more_than_one_slice(sinks: int, device: torch.device) -> None:
    parameters: list[Tactic | None] = [tactic_parameters(0.5, 400, sinks=sinks)]
    a_case = case(parameters, [2400], [2304], device, "clustered", 2, torch.float16, seed=2)
    check(a_case, run(a_case, queries_of(a_case, 3, 2.0, seed=2)))


def test_two_layers_add_up(device: torch.device) -> None:
    a_case = case([tactic_parameters(0.6, 120)], [400], [320], device, "clustered")
    check(a_case, run(a_case, queries_of(a_case, 2, 2.0), layers=2))


@pytest.mark.parametrize("in_order", [True, False])
def test_scores_that_differ_more_than_counts_reach(in_order: bool, device: torch.device) -> None:
    parameters: list[Tactic | None] = [tactic_parameters(0.99), tactic_parameters(0.6)]
    strong = slice(SCORED * CLUSTER_SIZE, 3 * SCORED * CLUSTER_SIZE // 2)
    a_case = case(parameters, [2400, 1200], [2304, 1088], device, "clustered", seed=5, strong=strong)
    queries = queries_of(a_case, 2, 2.0, seed=5)
    check(a_case, run(a_case, queries, in_order, layers=2), in_order)
    step = TacticStep(a_case.context, SCALE, None, a_case.index, [p for p in parameters if p], a_case.clustered)
    clusters = a_case.index.read(0, step.spans)
    scores = (queries[0, :2] @ clusters.centroids[0, 0].mT) * SCALE
    of_tiles = [tile.amax(1) for tile in scores.split(SCORED, dim=1)]
    assert bool(((of_tiles[1] - of_tiles[0]) / math.log(2) * STEPS > WINDOW - int(COUNTED)).any())


def test_equal_scores(device: torch.device) -> None:
    a_case = case([tactic_parameters(0.5), tactic_parameters(0.4, 100)], [330, 330], [256, 256], device)
    check(a_case, run(a_case, torch.zeros(2, 2, DIM, device=device)))


def test_what_a_row_gets_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    parameters: list[Tactic | None] = [tactic_parameters(0.7), tactic_parameters(0.3)]
    a_case = case(parameters, [300, 420], [256, 320], device, "clustered")
    queries = queries_of(a_case, 2, 2.0)
    together = run(a_case, queries)
    alone_case = replace(
        a_case, context=a_case.context.rows([0]), clustered=a_case.clustered[:1], parameters=parameters[:1]
    )
    alone = run(alone_case, queries[:1])
    count = int(alone.selection.counts[0, 0])
    assert count == int(together.selection.counts[0, 0])
    assert torch.equal(alone.selection.slots[0, 0, :count], together.selection.slots[0, 0, :count])
    assert torch.equal(alone.statistics.reported.shares[0], together.statistics.reported.shares[0])


def test_refusals(device: torch.device) -> None:
    a_case = case([tactic_parameters(0.5)], [200], [128], device)
    queries = queries_of(a_case, 2, 1.0)
    batch, rows = DecodeBatch.empty(1, 256, PAGE, device), TacticBatch.empty(1, 4, device)
    workspace = TacticWorkspace.empty(1, 2, 1, 4, SPAN, device)
    statistics = TacticStatistics.empty(1, 2, device)
    of_layer = (a_case.cache, a_case.index.layers[0], batch, rows)
    narrow = DeviceSelection.empty(1, 1, 100, device)
    with pytest.raises(ValueError, match="selection"):
        select(queries, *of_layer, narrow, workspace, statistics, SCALE, in_order=True, capped=True)
    wide = DeviceSelection.empty(1, 1, 192, device)
    with pytest.raises(ValueError, match="in_order"):
        select(queries, *of_layer, wide, workspace, statistics, SCALE, in_order=False, capped=True)
    too_long = DecodeBatch.empty(1, 2**18 + PAGE, PAGE, device)
    with pytest.raises(ValueError, match="contexts"):
        select(queries, *of_layer[:2], too_long, rows, wide, workspace, statistics, SCALE, in_order=False, capped=False)
    with pytest.raises(ValueError, match="query heads"):
        select(queries.repeat(1, 9, 1), *of_layer, wide, workspace, statistics, SCALE, in_order=True, capped=True)


def launch(longest: int, kv_heads: int, heads: int, head_dim: int, in_order: bool) -> None:
    """Launch all kernels for contexts of ``longest`` tokens in bf16; tensors are not read."""
    cpu = torch.device("cpu")
    cache = LayerCache(*torch.empty(2, 64, kv_heads, head_dim, dtype=torch.bfloat16))
    tables = ClusterTables.empty(cache, 1, 1, 1024)
    batch, rows = DecodeBatch.empty(1, longest, PAGE, cpu), TacticBatch.empty(1, longest // 1024, cpu)
    workspace = TacticWorkspace.empty(1, heads, kv_heads, longest // 1024, 1024, cpu)
    selection = DeviceSelection.empty(1, kv_heads, selection_width(longest), cpu)
    queries = torch.empty(1, heads, head_dim, dtype=torch.bfloat16)
    statistics = TacticStatistics.empty(1, heads, cpu)
    of_layer = (tables.layers()[0], batch, rows, selection, workspace, statistics, SCALE)
    select(queries, cache, *of_layer, in_order=in_order, capped=in_order)


def test_hopper_needs_next_to_no_local_memory() -> None:
    # Llama-3.1-8B at 128K, and heads of 256.
    for shape, local_bytes in [((2**17, 8, 32, 128, True), 0), ((2**15, 1, 4, 256, False), 16)]:
        compiled = compile_launches(launch, *shape)
        assert len({kernel.kernel for kernel in compiled}) == (7 if shape[-1] else 4)
        for kernel in compiled:
            assert kernel.local_bytes <= local_bytes
            assert kernel.shared_bytes < 80 * 1024
