"""What an audit of a step finds, against float64 over the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_float64 import attend_head, attend_head_until_settled
from tests.kernels.caches import SOFTMAXES, random_softmax
from tests.kernels.gpu.compiling import compile_launches
from tests.kernels.gpu.test_attend import Layer
from tests.kernels.parameters import termination_at
from winnow_kernels.attend.gpu import AttendBuffers, attend
from winnow_kernels.batch import ELSEWHERE, WHOLE, WHOLE_TO_THE_END
from winnow_kernels.cache import LayerCache
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.decode.audit import AuditedRow
from winnow_kernels.decode.gpu_audit import StepAudit
from winnow_kernels.decode.gpu_step import Step, StepBuffers
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.policies.declarations import LAYOUT

KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, LONGEST = 2, 3, 64, 16, 448
HEADS = KV_HEADS * GROUP
SCALE = HEAD_DIM**-0.5
# Selections, and whole contexts that rows may, must and do elsewhere attend to.
LENGTHS = [97, 300, 410, 150, 70]
COUNTS = [[40, 97], [200, 1], [WHOLE, WHOLE], [WHOLE_TO_THE_END, WHOLE_TO_THE_END], [ELSEWHERE, ELSEWHERE]]
PROMISES = [0.5, None, 0.9, None, 0.9]
SETTLING = termination_at(0.3, 0.05, 1)
TERMINATED = (2, 3)
NOT_AUDITED = 1
REQUEST_SLOTS = [5, 2, 4, 1, 3]
STEPS_IN_SHORT, STEPS = 6, 100


@dataclass(frozen=True)
class Truth:
    """Of a row: sums over query heads, and how near a share is to p."""

    share: float
    error: float
    reached: int
    margin: float


@dataclass(frozen=True)
class AuditedStep:
    """A step of one layer with random selections; ``output`` is what it came to."""

    layer: Layer
    ordered: bool
    output: Tensor
    statistics: Tensor

    @classmethod
    def of(cls, layer: Layer, ordered: bool, device: torch.device) -> AuditedStep:
        softmax = layer.cache.softmax
        if softmax.sink_logits is not None:
            softmax = replace(softmax, sink_logits=softmax.sink_logits.to(device))
        cache = LayerCache(layer.cache.keys.to(device), layer.cache.values.to(device), softmax=softmax)
        queries = layer.queries.to(device)
        step = _step(layer, device)
        attend_buffers = AttendBuffers.empty(step.rows, HEADS, cache)
        audit = StepAudit(step.rows, HEADS, cache, attend_buffers)
        thresholds = step.parameters.thresholds if ordered else None
        output = torch.zeros_like(queries)
        audited = [AuditedRow(row, p) for row, p in enumerate(PROMISES) if row != NOT_AUDITED]
        audit.audit(audited, step)
        audit.begin(step)
        attend(queries, cache, step.batch, step.selection(0), SCALE, thresholds, audit.attend_buffers, output)
        elsewhere = [row for row, counts in enumerate(COUNTS) if counts[0] == ELSEWHERE]
        for row in elsewhere:
            own = layer.context.slots[row, : LENGTHS[row]].to(device)
            for head, of_head in _heads():
                found, _ = _attend(replace(layer, cache=cache, queries=queries), row, head, of_head, own)
                output[row, of_head] = found.to(output.dtype)
        counts = step.batch.counts.clone()
        before = output.clone()
        audit.compare(0, queries, output, cache, step, SCALE, ordered=ordered)
        assert torch.equal(output, before)
        assert torch.equal(step.batch.counts, counts)
        statistics = Statistics(8, device)
        audit.count(step, statistics)
        return cls(layer, ordered, output.cpu(), statistics.rows.cpu())

    def truth(self, row: int) -> Truth:
        """What float64 finds of a row."""
        terminates = SETTLING if self.ordered and row in TERMINATED else None
        own = self.layer.context.slots[row, : LENGTHS[row]]
        share, error, reached, margin = 0.0, 0.0, 0, 1.0
        for head, of_head in _heads():
            exact, mass = _attend(self.layer, row, head, of_head, own)
            count = COUNTS[row][head]
            if count > 0:
                attended = _attend(self.layer, row, head, of_head, self.layer.slots[row, head, :count])[1]
            elif count == WHOLE and terminates:
                read, near = self._until_settled(row, head, of_head, own.flip(0), terminates)
                attended, margin = read, min(margin, near)
            else:
                attended = mass
            shares = (attended - mass).exp()
            lost = (self.output[row, of_head].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            share += float(shares.sum())
            error += float(lost.sum())
            p = PROMISES[row]
            if p is not None:
                reached += int((shares >= p).sum())
                margin = min(margin, float((shares - p).abs().min()))
        return Truth(share, error, reached, margin)

    def _until_settled(
        self, row: int, head: int, of_head: slice, slots: Tensor, thresholds: EarlyTermination
    ) -> tuple[Tensor, float]:
        queries = self.layer.queries[row, of_head]
        read = attend_head_until_settled(queries, self.layer.cache, head, slots.tolist(), SCALE, thresholds)
        return read.log_sum_exp, read.margin


def _heads() -> Iterator[tuple[int, slice]]:
    return ((head, slice(head * GROUP, (head + 1) * GROUP)) for head in range(KV_HEADS))


def _attend(layer: Layer, row: int, head: int, of_head: slice, slots: Tensor) -> tuple[Tensor, Tensor]:
    cache = layer.cache
    sinks = None if cache.softmax.sink_logits is None else cache.softmax.sink_logits[of_head]
    vectors = cache.keys[slots, head], cache.values[slots, head]
    return attend_head(layer.queries[row, of_head], *vectors, SCALE, cache.softmax.cap, sinks)


def _step(layer: Layer, device: torch.device) -> Step:
    rows, width = len(LENGTHS), layer.slots.shape[2]
    step = StepBuffers(LAYOUT, rows, LONGEST, PAGE_SIZE, 1, HEADS, KV_HEADS, width, device).largest
    own = layer.batch(device)
    step.batch.page_table[:, : own.page_table.shape[1]] = own.page_table[:, : step.batch.page_table.shape[1]]
    step.batch.lengths.copy_(own.lengths)
    step.request_slots.copy_(torch.tensor(REQUEST_SLOTS))
    step.slots.copy_(layer.slots)
    step.counts[0] = layer.counts
    for row in TERMINATED:
        values = (SETTLING.scale, SETTLING.direction, SETTLING.patience)
        step.parameters.thresholds[row] = torch.tensor(values, dtype=torch.float32)
    return step


def _told(statistics: Tensor, row: int, fields: Sequence[Field]) -> list[float]:
    return [float(statistics[REQUEST_SLOTS[row], field]) for field in fields]


@pytest.mark.parametrize("steps", [STEPS_IN_SHORT, pytest.param(STEPS, marks=pytest.mark.full)])
def test_shares_and_errors_are_those_of_float64(steps: int, device: torch.device) -> None:
    """Of four audited rows a step."""
    found = []
    for seed in range(steps):
        layer = Layer.random(LENGTHS, COUNTS, GROUP, HEAD_DIM, PAGE_SIZE, seed=seed)
        softmax = random_softmax(SOFTMAXES[seed % len(SOFTMAXES)], HEADS, seed)
        layer = replace(layer, cache=replace(layer.cache, softmax=softmax))
        audited = AuditedStep.of(layer, bool(seed % 2), device)
        for row in range(len(LENGTHS)):
            audits, heads = _told(audited.statistics, row, (Field.AUDITED_STEPS, Field.AUDITED_HEADS))
            if row == NOT_AUDITED:
                assert not audited.statistics[REQUEST_SLOTS[row]].any()
                continue
            truth = audited.truth(row)
            if truth.margin < 1e-4:
                # Rounding decides.
                continue
            assert (audits, heads) == (1, HEADS)
            share, error, reached = _told(
                audited.statistics, row, (Field.AUDITED_SHARE, Field.AUDITED_ERROR, Field.AUDITED_REACHED)
            )
            assert share == pytest.approx(truth.share, rel=1e-4)
            assert error == pytest.approx(truth.error, rel=1e-3, abs=1e-4)
            assert reached == truth.reached
            found.append(share / heads)
    assert len(found) > 0.9 * steps * (len(LENGTHS) - 1)
    assert min(found) < 0.9
    assert max(found) == 1


def test_other_statistics_stay(device: torch.device) -> None:
    audited = AuditedStep.of(Layer.random(LENGTHS, COUNTS, GROUP, HEAD_DIM, PAGE_SIZE), False, device)
    beside = [field for field in Field if not field.name.startswith("AUDITED")]
    assert not audited.statistics[:, beside].any()
    assert not audited.statistics[[0, 6, 7]].any()


def launch() -> None:
    cpu = torch.device("cpu")
    cache = LayerCache(*torch.empty(2, 64, 8, 128, dtype=torch.bfloat16))
    step = StepBuffers(LAYOUT, 32, 1024, 16, 2, 32, 8, 64, cpu).largest
    buffers = replace(AttendBuffers.empty(32, 32, cache), multiprocessors=132)
    audit = StepAudit(32, 32, cache, buffers)
    queries = torch.empty(32, 32, 128, dtype=torch.bfloat16)
    audit.begin(step)
    for ordered in (False, True):
        audit.compare(0, queries, torch.empty_like(queries), cache, step, 0.1, ordered=ordered)
    audit.count(step, Statistics(32, cpu))


def test_it_compiles_for_hopper() -> None:
    compiled = compile_launches(launch)
    names = [kernel.kernel.rpartition(":")[2] for kernel in compiled]
    assert names == [*["attend_kernel", "merge_kernel", "_compare_kernel"] * 2, "_count_kernel"]
    assert all(kernel.local_bytes == 0 for kernel in compiled)
