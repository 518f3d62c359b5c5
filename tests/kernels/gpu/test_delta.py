"""DELTA on a GPU against the torch reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import SOFTMAXES, random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.gpu.selectors import (
    HALF,
    PAGE_SIZE,
    UNTOUCHED,
    cache_on,
    check_equal,
    check_untouched,
    delta_rows,
    on_device,
    untouched,
)
from tests.kernels.parameters import delta_parameters
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.gpu import AttendBuffers, attend
from winnow_kernels.attend.reference import group as grouped
from winnow_kernels.batch import COUNTS, ELSEWHERE, WHOLE, WHOLE_TO_THE_END, Count, DecodeBatch, DeviceSelection
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.policies.delta import gpu as delta
from winnow_kernels.policies.delta.parameters import Role
from winnow_kernels.policies.delta.reference import DeltaStep
from winnow_kernels.softmax import capped

SLOTS = 4096
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """A row's parameters, budget and recency in pages."""

    budget: int
    recent: int
    delta_layers: tuple[int, ...]
    is_ordered: bool = False


def _rows(parameters: list[Row | None], layers: int, device: torch.device) -> delta.DeltaRows:
    rows = delta_rows(len(parameters), layers, device)
    for row, own in enumerate(parameters):
        if own is not None:
            rows.roles[:, row] = Role.REUSE
            rows.roles[: own.delta_layers[0], row] = Role.FULL
            rows.roles[list(own.delta_layers), row] = Role.REFRESH
            rows.budgets[row], rows.recent[row], rows.by_score[row] = own.budget, own.recent, own.is_ordered
    return rows


def _reference(context: Context, row: int, own: Row, scale: float) -> DeltaStep:
    parameters = delta_parameters(own.budget * PAGE_SIZE, own.recent * PAGE_SIZE, 0, own.delta_layers)
    return DeltaStep(context.rows([row]), scale, None, [parameters], PAGE_SIZE)


class _Device:
    """The kernels' side of a step."""

    def __init__(
        self, context: Context, parameters: list[Row | None], layers: int, cache: LayerCache, heads: int, width: int
    ) -> None:
        device = cache.keys.device
        self.batch: DecodeBatch = on_device(context, device)
        self.rows = _rows(parameters, layers, device)
        self.selection: DeviceSelection = untouched(self.batch, cache.kv_heads, width)
        self.counts = torch.full((layers, self.batch.rows, cache.kv_heads), UNTOUCHED, dtype=torch.int32, device=device)
        self.attend_buffers = AttendBuffers.empty(self.batch.rows, heads, cache)
        self.buffers = delta.DeltaBuffers.empty(self.batch, heads)
        delta.write_counts(self.batch, self.rows, self.counts, width)

    def refresh(self, layer: int, queries: Tensor, cache: LayerCache, scale: float) -> Tensor:
        output = torch.full_like(queries, UNTOUCHED)
        delta.attend_and_score(
            layer, queries, cache, self.batch, self.rows, scale, self.attend_buffers, self.buffers, output
        )
        delta.score_tokens(layer, self.batch, self.rows, self.attend_buffers, self.buffers)
        delta.select(layer, self.batch, self.rows, self.selection.slots, self.buffers)
        return output

    def selected(self, layer: int) -> DeviceSelection:
        return DeviceSelection(self.selection.slots, self.counts[layer])


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype", "softmax"),
    [
        (2, 4, 64, torch.float32, "plain"),
        (1, 5, 128, HALF, "plain"),
        (2, 1, 96, torch.float32, "plain"),
        *((2, 4, 64, torch.float32, softmax) for softmax in SOFTMAXES[1:]),
    ],
)
def test_rows_are_the_references_and_other_families_stay_untouched(
    kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, softmax: str, device: torch.device
) -> None:
    layers, heads, scale = 4, kv_heads * group, head_dim**-0.5
    context = scattered_context([700, 1, 65, 160, 208, 17], SLOTS)
    parameters = [
        Row(9, 2, (1, 2), is_ordered=True),
        Row(9, 2, (0, 2)),
        None,
        Row(4, 3, (1,), is_ordered=True),
        Row(5, 1, (0, 2)),
        Row(1, 1, (2,)),
    ]
    caches = [
        replace(random_cache(SLOTS, kv_heads, head_dim, layer, dtype), softmax=random_softmax(softmax, heads, layer))
        for layer in range(layers)
    ]
    references = [None if own is None else _reference(context, row, own, scale) for row, own in enumerate(parameters)]
    step = _Device(context, parameters, layers, cache_on(device, caches[0]), heads, width=160)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for layer, cache in enumerate(caches):
        queries = 2 * random_queries(6, heads, head_dim, seed=layer)
        queries = queries.to(dtype)
        step.batch.counts.zero_()
        output = step.refresh(layer, queries.to(device), cache_on(device, cache), scale)
        for row, (own, reference) in enumerate(zip(parameters, references, strict=True)):
            if own is None or reference is None:
                check_untouched(step.selected(layer), row)
                assert (output[row] == UNTOUCHED).all()
                continue
            meter = Meter(1, CPU)
            expected = reference.attend(layer, queries[[row]], cache, meter)
            counts = step.counts[layer, row]
            if layer not in own.delta_layers:
                assert (output[row] == UNTOUCHED).all()
                assert (step.batch.counts[row] == 0).all()
                if layer < own.delta_layers[0]:
                    assert (counts == WHOLE_TO_THE_END).all()
                else:
                    selection = reference.select(layer, queries[[row]], cache, meter)
                    in_recent = (int(context.lengths[row]) - 1) % PAGE_SIZE + 1 + (own.recent - 1) * PAGE_SIZE
                    ordered = slice(None if own.is_ordered else in_recent)
                    check_equal(step.selected(layer), row, selection, ordered=ordered)
                continue
            assert (counts == ELSEWHERE).all()
            torch.testing.assert_close(output[row].cpu(), expected[0], atol=tolerance, rtol=tolerance)
            meter.count_context(context.rows([row]), cache)
            expected_counts = torch.zeros(COUNTS, dtype=torch.int64)
            expected_counts[Count.CONTEXT], expected_counts[Count.CONTEXT_BYTES] = meter.context, meter.context_bytes
            expected_counts[Count.ATTENDED], expected_counts[Count.READ_BYTES] = meter.attended, meter.read_bytes
            assert torch.equal(step.batch.counts[row].cpu(), expected_counts)
            length = int(context.lengths[row])
            _, scores = reference.attend_and_score([0], queries[[row]], cache, Meter(1, CPU))
            torch.testing.assert_close(step.buffers.tokens.greatest[row, :length].cpu(), scores[0], atol=0, rtol=1e-4)
            keys = cache.keys[context.slots[row, :length]].float()
            products = torch.einsum("hgd,thd->hgt", grouped(queries[[row]], kv_heads)[0], keys) * scale
            # What a sink takes is not in it.
            of_tokens = capped(products, cache.softmax.cap).logsumexp(-1)
            torch.testing.assert_close(
                step.attend_buffers.log_sum_exp[row].cpu(), of_tokens.flatten(), atol=1e-4, rtol=1e-5
            )


def test_rows_get_what_attend_yields_for_whole_contexts(device: torch.device) -> None:
    context = scattered_context([700, 30], SLOTS)
    cache = cache_on(device, random_cache(SLOTS, 2, 64, dtype=HALF))
    queries = random_queries(2, 8, 64).to(device, HALF)
    step = _Device(context, [Row(9, 2, (0,)), Row(2, 1, (0,))], 1, cache, 8, width=160)
    output = step.refresh(0, queries, cache, 0.125)
    log_sum_exp, counts = step.attend_buffers.log_sum_exp.clone(), step.batch.counts.clone()
    step.batch.counts.zero_()
    whole = DeviceSelection.empty(2, 2, 16, device)
    expected = torch.empty_like(output)
    attend(queries, cache, step.batch, whole, 0.125, None, step.attend_buffers, expected)
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(log_sum_exp, step.attend_buffers.log_sum_exp, atol=1e-5, rtol=1e-5)
    assert torch.equal(counts, step.batch.counts)


def test_of_equal_scores_the_earlier_page_comes_first(device: torch.device) -> None:
    context = scattered_context([700, 900], SLOTS)
    cache = cache_on(device, random_cache(SLOTS, 2, 64))
    step = _Device(context, [Row(9, 2, (0,), is_ordered=True)] * 2, 1, cache, 4, width=160)
    step.refresh(0, torch.zeros(2, 4, 64, device=device), cache, 0.125)
    for row, length in enumerate(context.lengths.tolist()):
        in_recent = (length - 1) % PAGE_SIZE + 1 + PAGE_SIZE
        expected = context.slots[row, : 7 * PAGE_SIZE]
        assert (step.selection.slots[row, :, in_recent : in_recent + 7 * PAGE_SIZE].cpu() == expected).all()


def test_a_maximum_over_ranks_selects_as_all_heads_do(device: torch.device) -> None:
    context = scattered_context([700, 300], SLOTS)
    cache, queries = cache_on(device, random_cache(SLOTS, 2, 64)), 2 * random_queries(2, 8, 64).to(device)
    parameters: list[Row | None] = [Row(9, 2, (0,), is_ordered=True)] * 2
    everything = _Device(context, parameters, 1, cache, 8, width=160)
    everything.refresh(0, queries, cache, 0.125)
    ranks = []
    for head in range(2):
        own = LayerCache(cache.keys[:, [head]].contiguous(), cache.values[:, [head]].contiguous())
        ranks.append(_Device(context, parameters, 1, own, 4, width=160))
        ranks[head].refresh(0, queries[:, 4 * head : 4 * head + 4].contiguous(), own, 0.125)
    torch.maximum(*(rank.buffers.tokens.greatest for rank in ranks), out=ranks[0].buffers.tokens.greatest)
    delta.select(0, ranks[0].batch, ranks[0].rows, ranks[0].selection.slots, ranks[0].buffers)
    for head in range(2):
        assert torch.equal(ranks[0].selection.slots[:, 0], everything.selection.slots[:, head])


def test_a_row_is_the_same_whatever_its_neighbours(device: torch.device) -> None:
    context = scattered_context([700, 300, 1100], SLOTS)
    cache, queries = cache_on(device, random_cache(SLOTS, 2, 64)), random_queries(3, 8, 64).to(device)
    parameters: list[Row | None] = [Row(9, 2, (0,)), Row(5, 1, (0,)), Row(9, 4, (0,), is_ordered=True)]
    together = _Device(context, parameters, 1, cache, 8, width=160)
    outputs = together.refresh(0, queries, cache, 0.125)
    for row in range(3):
        alone = _Device(context.rows([row]), [parameters[row]], 1, cache, 8, width=160)
        assert torch.equal(alone.refresh(0, queries[[row]], cache, 0.125)[0], outputs[row])
        assert torch.equal(alone.selection.slots[0], together.selection.slots[row])


def test_a_row_without_a_budget_is_left_alone_whatever_its_roles(device: torch.device) -> None:
    context = scattered_context([200, 199], SLOTS)
    cache = cache_on(device, random_cache(SLOTS, 2, 64))
    step = _Device(context, [Row(0, 0, (0,)), Row(4, 2, (0,))], 2, cache, 8, width=160)
    output = step.refresh(0, random_queries(2, 8, 64).to(device), cache, 0.125)
    for layer in range(2):
        check_untouched(step.selected(layer), 0)
        assert (step.counts[layer, 1] != UNTOUCHED).all()
    assert (output[0] == UNTOUCHED).all()
    assert (output[1] != UNTOUCHED).all()
    assert (step.batch.counts[0] == 0).all()


def test_a_selection_that_has_no_room_is_the_whole_context(device: torch.device) -> None:
    context = scattered_context([200, 199], SLOTS)
    cache = cache_on(device, random_cache(SLOTS, 2, 64))
    step = _Device(context, [Row(8, 2, (0,))] * 2, 2, cache, 8, width=119)
    step.refresh(0, random_queries(2, 8, 64).to(device), cache, 0.125)
    assert step.counts.tolist() == [[[ELSEWHERE] * 2] * 2, [[WHOLE] * 2, [119] * 2]]
    assert (step.selection.slots[0] == UNTOUCHED).all()
    assert (step.selection.slots[1] != UNTOUCHED).all()
