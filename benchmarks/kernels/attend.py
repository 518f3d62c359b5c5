"""``attend`` on a GPU: checked, then timed beside FlashInfer's dense decode in the same run.

    python -m benchmarks.kernels.attend --output gpu-attend.json

Several ways of launching it are compared by ``--launches``: as ``shipped``, which on Hopper is in CUDA C++; in
``triton``; or in Triton with numbers of its own. With ``--kv-cache-dtype fp8_e4m3`` keys and values have 8 bits.

What is attended to is drawn at random: single tokens or whole pages, a share of the context for each row and KV head,
in random order, as selectors hand them over; and whole contexts. Calls of a measurement read different layers and
selections, more bytes than the L2 cache holds. ``dense`` is FlashInfer with tensor cores, pages of 16. The floor of a
measurement is the time in which its K and V could be read with the bandwidth that dense decode reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.command_line import numbers
from benchmarks.kernels.cases import LARGEST_ERROR, Case, cache_dtype_named, parse_cases, relative_error
from benchmarks.kernels.dense_decode import FlashInferDecode
from benchmarks.kernels.timing import Timing, calls_beyond_cache, gpu, time_calls
from benchmarks.records import Record, Row, header
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.gpu import AttendBuffers, Launch, attend
from winnow_kernels.attend.reference import attend as reference_attend
from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache
from winnow_kernels.selection.tokens import Selection

QUERY_HEADS: Final = 32
KV_HEADS: Final = 8
HEAD_DIM: Final = 128
SCALE: Final = HEAD_DIM**-0.5
PAGE_SIZE: Final = 16
DTYPE: Final = torch.bfloat16
MODEL: Final = f"{QUERY_HEADS} query heads, {KV_HEADS} KV heads of {HEAD_DIM}"
_MAX_LAYERS: Final = 32

# Patience that no row has, and patience that no selection is long enough for: what deciding costs.
TERMINATIONS: Final = {"none": None, "infinite patience": torch.inf, "never settled": 1e6}
POLICIES: Final = ("whole", "tokens", "pages")


class Inputs:
    """Layers of random keys and values, in pages of random order, and queries: one set for all measurements."""

    def __init__(self, case: Case, layers: int, device: torch.device, dtype: torch.dtype = DTYPE) -> None:
        pages = -(-case.context // PAGE_SIZE)
        pool = (case.batch * pages + 1) * PAGE_SIZE
        self.case = case
        shape = (2, pool, KV_HEADS, HEAD_DIM)
        drawn = (torch.randn(shape, dtype=DTYPE, device=device).to(dtype) for _ in range(layers))
        self.caches = [LayerCache(*of_layer.unbind(0)) for of_layer in drawn]
        self.queries = torch.randn(case.batch, QUERY_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
        self.batch = DecodeBatch.empty(case.batch, case.context, PAGE_SIZE, device)
        self.batch.page_table.copy_(1 + torch.randperm(case.batch * pages, device=device).view(case.batch, pages))
        self.batch.lengths.fill_(case.context)

    @property
    def device(self) -> torch.device:
        return self.queries.device

    @property
    def layer_bytes(self) -> int:
        return dense_bytes(self.case, self.caches[0].keys.dtype)

    def select(self, policy: str, share: float) -> DeviceSelection:
        """Draw a selection of ``share`` percent of each context."""
        if policy == "whole":
            return DeviceSelection.empty(self.case.batch, KV_HEADS, 1, self.device)
        size = PAGE_SIZE if policy == "pages" else 1
        units = -(-self.case.context // size)
        chosen = max(1, round(units * share / 100))
        rows = []
        for row in range(self.case.batch):
            order = torch.rand(KV_HEADS, units, device=self.device).argsort(-1)[:, :chosen]
            positions = (order[..., None] * size + torch.arange(size, device=self.device)).flatten(1)
            page = self.batch.page_table[row, positions // PAGE_SIZE]
            rows.append(page * PAGE_SIZE + positions % PAGE_SIZE)
        slots = torch.stack(rows).int().contiguous()
        counts = torch.full((self.case.batch, KV_HEADS), slots.shape[2], dtype=torch.int32, device=self.device)
        return DeviceSelection(slots, counts)


class Contestant:
    """``attend`` with one way of launching it."""

    def __init__(self, inputs: Inputs, launch: Launch | None) -> None:
        self._inputs = inputs
        self._output = torch.empty_like(inputs.queries)
        self._buffers = AttendBuffers.empty(inputs.case.batch, QUERY_HEADS, inputs.caches[0], launch)

    def call(self, layer: int, selection: DeviceSelection, patience: float | None) -> Callable[[], None]:
        inputs = self._inputs
        thresholds = None
        if patience is not None:
            thresholds = torch.tensor([[0.0, 0.0, patience]] * inputs.case.batch, device=inputs.device)

        def run() -> None:
            cache = inputs.caches[layer % len(inputs.caches)]
            attend(inputs.queries, cache, inputs.batch, selection, SCALE, thresholds, self._buffers, self._output)

        return run

    def check(self, selection: DeviceSelection, patience: float | None, expected: Tensor) -> float:
        """Return the relative error of the first layer's output against the reference's."""
        self._output.fill_(torch.nan)
        self.call(0, selection, patience)()
        return relative_error(self._output, expected)


def main(
    output: Annotated[Path, typer.Option(help="Where to write JSON.")],
    cases: Annotated[
        str, typer.Option(help="Tokens in context × batch.")
    ] = "32768x1,32768x8,32768x32,131072x1,131072x8",
    shares: Annotated[str, typer.Option(help="Percent of the context that is selected.")] = "1,3,5,12,50",
    tokens: Annotated[str, typer.Option(help="How many tokens are selected, beside the shares.")] = "",
    policies: Annotated[str, typer.Option(help="What is attended to.")] = "whole,tokens,pages",
    terminations: Annotated[str, typer.Option(help="Which early termination.")] = ",".join(TERMINATIONS),
    replays: Annotated[int, typer.Option(help="Graph replays of each measurement.")] = 30,
    memory: Annotated[float, typer.Option(help="Share of free device memory for keys and values.")] = 0.6,
    launches: Annotated[
        str,
        typer.Option(
            help="shipped, triton, or warps, tiles ahead, programs, programs with termination, as 4,2,2,2; several "
            "with spaces between them."
        ),
    ] = "shipped",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or fp8_e4m3.")] = "auto",
) -> None:
    """Check and measure, print a table, write JSON."""
    device = gpu()
    torch.manual_seed(0)
    dtype = cache_dtype_named(kv_cache_dtype)
    chosen = parse_launches(launches, dtype)
    rows: list[Row] = []
    errors: dict[str, float] = {}
    console = Console(width=140)
    for case in parse_cases(cases):
        layers = layers_that_fit(case, int(torch.cuda.mem_get_info()[0] * memory), dtype)
        if layers == 0:
            console.print(f"left out: {case} does not fit")
            continue
        inputs = Inputs(case, layers, device, dtype)
        shares_of_case = [*map(float, numbers(shares)), *(100 * n / case.context for n in numbers(tokens))]
        measured = list(measurements(shares_of_case, policies.split(","), terminations.split(",")))
        errors |= check(inputs, chosen, measured)
        rows += measure(inputs, chosen, measured, replays)
        del inputs
        torch.cuda.empty_cache()
    console.print(table(rows))
    Record(header() | {"kv_cache_dtype": kv_cache_dtype, "errors": errors}, rows).write(output)


def parse_launches(text: str, dtype: torch.dtype = DTYPE) -> dict[str, Launch | None]:
    """Read launches such as ``shipped triton 8,2,2,1``, by name; None for the shipped one."""
    of_triton = Launch.of(HEAD_DIM, dtype.itemsize, QUERY_HEADS // KV_HEADS)
    named = {"shipped": None, "triton": of_triton}
    return {name: named[name] if name in named else Launch(*numbers(name)) for name in text.split()}


def dense_bytes(case: Case, dtype: torch.dtype = DTYPE) -> int:
    """Return the bytes of K and V in one layer."""
    return case.tokens * KV_HEADS * 2 * HEAD_DIM * dtype.itemsize


def layers_that_fit(case: Case, available: int, dtype: torch.dtype = DTYPE) -> int:
    """Return how many layers of keys and values fit ``available`` bytes, at most as many as a model has."""
    return min(_MAX_LAYERS, available // dense_bytes(case, dtype))


def measurements(
    shares: Sequence[float], policies: Sequence[str] = POLICIES, terminations: Sequence[str] = tuple(TERMINATIONS)
) -> Iterator[tuple[str, float, str]]:
    """Yield policy, share in percent and termination of each measurement; pages are measured without termination."""
    for policy, share in [("whole", 100.0), *((policy, share) for share in shares for policy in POLICIES[1:])]:
        if policy in policies:
            yield from ((policy, share, name) for name in terminations if policy != "pages" or name == "none")


def check(
    inputs: Inputs, launches: Mapping[str, Launch | None], measured: Sequence[tuple[str, float, str]]
) -> dict[str, float]:
    """Compare with the reference; return relative errors by what was checked.

    Raises:
        AssertionError: one is larger than ``LARGEST_ERROR``, or not a number.
    """
    contestants = {name: Contestant(inputs, launch) for name, launch in launches.items()}
    errors = {"dense": _check_dense(inputs)}
    for policy, share in dict.fromkeys((policy, share) for policy, share, _ in measured):
        selection = inputs.select(policy, share)
        expected = _reference(inputs, selection)
        for name in (name for *attended, name in measured if attended == [policy, share]):
            for launch, contestant in contestants.items():
                error = contestant.check(selection, TERMINATIONS[name], expected)
                errors[f"{policy} {share:g} %, {name}, {launch}"] = error
    for what, error in errors.items():
        assert error <= LARGEST_ERROR, f"{inputs.case}, {what}: relative error {error}"
    return {f"{inputs.case.context} × {inputs.case.batch}, {what}": error for what, error in errors.items()}


def measure(
    inputs: Inputs, launches: Mapping[str, Launch | None], measured: Sequence[tuple[str, float, str]], replays: int
) -> list[Row]:
    """Time FlashInfer, then every measurement; FlashInfer once more at the end, and its mean is the baseline."""
    case = inputs.case
    cache_bytes = torch.cuda.get_device_properties(inputs.device).L2_cache_size
    dense = _dense(inputs)
    dense_calls = [dense.call(layer) for layer in range(calls_beyond_cache(inputs.layer_bytes, cache_bytes))]
    before = time_calls(dense_calls, replays)
    contestants = {name: Contestant(inputs, launch) for name, launch in launches.items()}
    timings = []
    for policy, share, name in measured:
        count = calls_beyond_cache(int(inputs.layer_bytes * share / 100), cache_bytes)
        selections = [inputs.select(policy, share) for _ in range(count)]
        for launch, contestant in contestants.items():
            calls = [contestant.call(layer, each, TERMINATIONS[name]) for layer, each in enumerate(selections)]
            parameters = {"share": share, "termination": name, "launch": launch}
            timings.append((policy, parameters, time_calls(calls, replays)))
    after = time_calls(dense_calls, replays)
    baseline = replace(before, microseconds=(before.microseconds + after.microseconds) / 2)
    return [row_of(case, policy, parameters, baseline, timing) for policy, parameters, timing in timings]


def row_of(case: Case, policy: str, parameters: dict[str, Any], dense: Timing, measured: Timing) -> Row:
    """Return a row.

    Args:
        case: what was measured.
        policy: what was attended to: ``tokens``, ``pages`` or ``whole``.
        parameters: ``share`` of the context in percent; ``termination``, the key in ``TERMINATIONS``; ``launch``.
        dense: FlashInfer's decode, whose bandwidth the floor goes by.
        measured: ``attend``.
    """
    speedup = dense.microseconds / measured.microseconds
    return Row(
        bench="attend",
        model=MODEL,
        policy=policy,
        parameters=parameters,
        context=case.context,
        batch=case.batch,
        dense=dense.microseconds,
        measured=measured.microseconds,
        unit="µs",
        speedup=speedup,
        floor_ratio=parameters["share"] / 100 * speedup,
        spread=measured.spread,
    )


def table(rows: Sequence[Row]) -> Table:
    """Return a table of the rows."""
    result = Table(
        "context", "batch", "attended", "termination", "launch", "dense µs", "µs", "spread", "times as fast", "of floor"
    )
    for row in rows:
        attended = f"{row.policy} {row.parameters['share']:.3g} %"
        figures = (f"{row.dense:.1f}", f"{row.measured:.1f}", f"{row.spread:.1%}", f"{row.speedup:.2f}")
        result.add_row(
            str(row.context),
            str(row.batch),
            attended,
            row.parameters["termination"],
            row.parameters["launch"],
            *figures,
            f"{row.floor_ratio:.0%}",
        )
    return result


def _dense(inputs: Inputs) -> FlashInferDecode:
    return FlashInferDecode(inputs.queries, inputs.caches, inputs.batch, SCALE)


def _check_dense(inputs: Inputs) -> float:
    """Return the relative error of the first layer's dense output against the reference in float32."""
    dense = _dense(inputs)
    dense.output.fill_(torch.nan)
    dense.call(0)()
    return relative_error(dense.output, _reference(inputs, inputs.select("whole", 100)))


def _reference(inputs: Inputs, selection: DeviceSelection) -> Tensor:
    """Return the reference's output in float32, row by row: all rows at once need more memory than there is."""
    outputs = []
    for row in range(inputs.case.batch):
        slots, counts = selection.slots[row : row + 1].long(), selection.counts[row : row + 1].long()
        if int(counts[0, 0]) < 0:
            pages = inputs.batch.page_table[row].long()[:, None] * PAGE_SIZE
            whole = (pages + torch.arange(PAGE_SIZE, device=inputs.device)).flatten()[: inputs.case.context]
            slots, counts = whole.expand(1, KV_HEADS, -1), torch.full_like(counts, inputs.case.context)
        meter = Meter(1, inputs.device)
        queries = inputs.queries[row : row + 1].float()
        outputs.append(reference_attend(queries, inputs.caches[0], Selection(slots, counts), SCALE, meter).output)
    return torch.cat(outputs)


if __name__ == "__main__":
    typer.run(main)
