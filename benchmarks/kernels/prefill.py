"""What prefill attention costs with QUOKA on a GPU, beside dense prefill: one layer, a whole prompt in SGLang's chunks.

    python -m benchmarks.kernels.prefill run --output benchmarks/results/prefill.json

First everything is checked on a small prompt: selections against the torch reference, attention to them against torch,
too. Then each contestant takes all chunks of a prompt, one after another on one stream; a row has their sum. Stages:

    select   what comes before attention
    attend   attention to what was selected
    layer    both

``dense`` is the fastest of FlashInfer's paged prefill (FA2, FA3) and FlashAttention 3 of sgl_kernel, as far as they are
there, timed in the same run before and after QUOKA. ``whole`` is QUOKA's kernel with everything before each block, as
dense requests in a mixed pass may have it. A floor is the time in which a stage's operations would be done with the
operations a second that dense prefill reaches; those of the selection are the products of representatives and keys.
Planning is not timed: it is done once for all layers. Memory is the peak while one chunk, the last, is prefilled,
beyond queries and KV cache: the output, and workspaces, QUOKA's own and 256 MiB of FlashInfer's.

Keys, queries and values are Gaussian: how fast products are does not depend on them, and the selection counts ranks of
scores, which takes as long whatever their distribution, unless many are equal. All chunks have the same queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.command_line import numbers
from benchmarks.folders import RESULTS
from benchmarks.kernels.cases import relative_error, wrong_errors
from benchmarks.kernels.dense_prefill import BACKENDS, Chunk, DenseInputs, available
from benchmarks.kernels.timing import Timing, gpu, summary
from benchmarks.model_shapes import ModelShape, shape_named
from benchmarks.records import Record, Row, header, merged
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import attend as reference_attend
from winnow_kernels.cache import LayerCache
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.quoka.prefill.attention import Launch, attend_blocks
from winnow_kernels.policies.quoka.prefill.cut import blocks_of, dense_blocks_of
from winnow_kernels.policies.quoka.prefill.reads import reads_of
from winnow_kernels.policies.quoka.prefill.selection import (
    BlockSelection,
    QuokaPrefillPass,
    QuokaPrefillWorkspace,
    select_blocks,
)
from winnow_kernels.policies.quoka.reference import select_for_blocks
from winnow_kernels.prefill.blocks import WHOLE, Block, PrefillBlocks
from winnow_kernels.selection.tokens import Selection

BENCH: Final = "prefill"
DTYPE: Final = torch.bfloat16
PAGE_SIZE: Final = 16
CHECKED_CONTEXT: Final = 4096
_CHECKED_CHUNK: Final = 2048
_QUERIES_AT_ONCE: Final = 32
_WARM_UPS: Final = 2
# The host has launched a whole prompt by then.
_AHEAD_CYCLES: Final = 20_000_000

TimeCalls: TypeAlias = Callable[[Sequence[Callable[[], object]], int], Timing]

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Contestant:
    """Parameters to be timed, and how a row tells them.

    Attributes:
        parameters: of QUOKA; None for ``whole``.
        labels: what tells its rows apart.
    """

    parameters: QuokaPrefill | None
    labels: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "quoka" if self.parameters else "whole"

    def blocks(self, chunk: Chunk) -> list[Block]:
        """Return the blocks of a chunk of the only request."""
        if self.parameters is None:
            return dense_blocks_of(0, 0, chunk.begin, chunk.end)
        return blocks_of(0, 0, chunk.begin, chunk.end, self.parameters)


@dataclass(frozen=True)
class Stage:
    """What a stage takes for a whole prompt.

    Attributes:
        name: of the stage.
        timing: microseconds of all chunks.
        operations: floating-point operations that it must do.
    """

    name: str
    timing: Timing
    operations: float


class Prompt:
    """One layer's KV cache with one request's tokens in it, their pages in random order, and a chunk's queries.

    Attributes:
        shape: of the model whose layer it is.
        inputs: queries, cache, page table and chunks.
    """

    def __init__(
        self, shape: ModelShape, length: int, chunk: int, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        pages = -(-length // PAGE_SIZE)
        table = 1 + torch.randperm(pages, generator=generator, device=device)
        pool = (2, (pages + 1) * PAGE_SIZE, shape.kv_heads, shape.head_dim)
        pools = torch.randn(pool, dtype=dtype, generator=generator, device=device)
        of_queries = (min(chunk, length), shape.query_heads, shape.head_dim)
        queries = torch.randn(of_queries, dtype=dtype, generator=generator, device=device)
        self.shape = shape
        self.inputs = DenseInputs(
            queries,
            LayerCache(*pools.unbind(0)),
            table.int()[None],
            PAGE_SIZE,
            shape.head_dim**-0.5,
            chunks_of(length, chunk),
        )

    def slots(self, tokens: int) -> Tensor:
        """Return the slots of the first ``tokens`` tokens, int64."""
        positions = torch.arange(tokens, device=self.inputs.device)
        return self.inputs.page_table[0, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE


class BlockPrefill:
    """A contestant on the chunks of a prompt, planned."""

    def __init__(self, prompt: Prompt, contestant: Contestant, chunks: Sequence[int]) -> None:
        inputs = prompt.inputs
        self._prompt = prompt
        self._output = torch.empty_like(inputs.queries)
        longest = max(inputs.chunks[number].end for number in chunks)
        workspace = QuokaPrefillWorkspace.empty(inputs.cache.kv_heads, longest, inputs.device)
        self.blocks = {
            number: PrefillBlocks.of(contestant.blocks(inputs.chunks[number]), inputs.page_table, PAGE_SIZE)
            for number in chunks
        }
        self._passes = {
            number: QuokaPrefillPass.of(blocks, inputs.cache, workspace) for number, blocks in self.blocks.items()
        }

    def queries(self, chunk: int) -> Tensor:
        """Return the queries of a chunk."""
        return self._prompt.inputs.queries[: self._prompt.inputs.chunks[chunk].tokens]

    def select(self, chunk: int) -> BlockSelection:
        """Select for all blocks of a chunk."""
        return select_blocks(self.queries(chunk), self._prompt.inputs.cache, self._passes[chunk])

    def selection(self, chunk: int) -> BlockSelection:
        """Return what was selected last for a chunk."""
        return self._passes[chunk].selection

    def attend(self, chunk: int, launch: Launch | None = None) -> Tensor:
        """Attend to what was selected last for the chunk, and return the output."""
        inputs, queries = self._prompt.inputs, self.queries(chunk)
        output = self._output[: len(queries)]
        attend_blocks(queries, inputs.cache, self.blocks[chunk], self.selection(chunk), inputs.scale, output, launch)
        return output

    def layer(self, chunk: int) -> Tensor:
        """Do all that a layer takes."""
        self.select(chunk)
        return self.attend(chunk)

    def operations(self, stage: str) -> float:
        """Return the floating-point operations of a stage, of all chunks."""
        shape = self._prompt.shape
        blocks = [block for of_chunk in self.blocks.values() for block in of_chunk.blocks]
        scoring = sum(2 * shape.head_dim * shape.kv_heads * min(b.representatives, b.queries) * b.start for b in blocks)
        attended = reads_of(blocks, self._prompt.inputs.cache).attended
        attending = 4 * shape.head_dim * (shape.query_heads // shape.kv_heads) * attended
        return {"select": scoring, "attend": attending, "layer": scoring + attending}[stage]


@app.command()
def run(
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "prefill.json",
    model: Annotated[str, typer.Option(help="Whose layers: a name in benchmarks/model_shapes.py.")] = "Llama-3.1-8B",
    contexts: Annotated[str, typer.Option(help="Tokens of prompts, with commas between.")] = "32768,131072",
    chunk: Annotated[int, typer.Option(help="Tokens of a prefill chunk.")] = 8192,
    budgets: Annotated[str, typer.Option(help="Tokens that a block selects.")] = "1024",
    percents: Annotated[str, typer.Option(help="Budgets as percent of what precedes a block.")] = "12",
    block: Annotated[int, typer.Option(help="Queries that share a selection.")] = 128,
    representatives: Annotated[str, typer.Option(help="Queries that choose for a block, with commas.")] = "64,32",
    replays: Annotated[int, typer.Option(min=2, help="Times that each prompt is prefilled.")] = 10,
) -> None:
    """Check, measure, print a table, write JSON after each context. Exit with 1 if something differs from torch."""
    device = gpu()
    console = Console(width=150)
    contestants = contestants_of(numbers(budgets), numbers(percents), block, numbers(representatives))
    shape = shape_named(model)
    checked = Prompt(shape, CHECKED_CONTEXT, _CHECKED_CHUNK, device, DTYPE)
    working, broken = available(checked.inputs)
    errors = check(checked, contestants_of([512], [12], block, numbers(representatives))) | check_dense(
        checked, working
    )
    about = header() | {"chunk": chunk, "page_size": PAGE_SIZE, "errors": errors, "not_available": broken}
    rows: list[Row] = []
    for context in numbers(contexts):
        prompt = Prompt(shape, context, chunk, device, DTYPE)
        rows += measure(prompt, model, contestants, working, replays)
        Record(about, rows).write(output)
        del prompt
        torch.cuda.empty_cache()
    console.print(table(rows))
    for name, why in broken.items():
        console.print(f"[yellow]not here: {name}: {why}")
    if wrong := wrong_errors(errors):
        console.print("[red]not as torch:", wrong)
        raise typer.Exit(1)


@app.command()
def merge(
    records: Annotated[list[Path], typer.Argument(help="What several runs wrote.")],
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "prefill.json",
) -> None:
    """Put the rows of several runs into one record."""
    whole = merged([Record.read(path) for path in records])
    whole.write(output)
    Console(width=150).print(table(whole.rows))


@app.command()
def launches(
    tried: Annotated[str, typer.Option(help="Rows, tokens, warps and stages; several with commas between.")],
    model: Annotated[str, typer.Option(help="Whose layers: a name in benchmarks/model_shapes.py.")] = "Llama-3.1-8B",
    context: Annotated[int, typer.Option(help="Tokens before the last chunk, and of it.")] = 32768,
    chunk: Annotated[int, typer.Option(help="Tokens of a prefill chunk.")] = 8192,
    budget: Annotated[int, typer.Option(help="Tokens that a block selects.")] = 1024,
    replays: Annotated[int, typer.Option(min=2, help="Times that the chunk is prefilled.")] = 20,
) -> None:
    """Time the last chunk's attention with several ways to launch it, to a selection and to whole contexts."""
    shape = shape_named(model)
    prompt = Prompt(shape, context, chunk, gpu(), DTYPE)
    last = len(prompt.inputs.chunks) - 1
    console = Console(width=150)
    for contestant in contestants_of([budget], [], 128, [32]):
        prefill = BlockPrefill(prompt, contestant, [last])
        prefill.select(last)
        for launch in parse_launches(tried):
            timing = time_prompt([partial(prefill.attend, last, launch)], replays)
            rate = prefill.operations("attend") / timing.microseconds / 1e6
            console.print(f"{contestant.name}, {launch}: {timing.microseconds:.0f} µs, {rate:.0f} TFLOP/s")


def contestants_of(
    budgets: Sequence[int], percents: Sequence[int], block: int, representatives: Sequence[int]
) -> list[Contestant]:
    """Return what is timed: QUOKA with each budget and each number of representatives, and ``whole``."""
    defaults = QuokaPrefill()
    parameters = [
        QuokaPrefill(
            budget=budget,
            budget_ratio=ratio,
            block=block,
            queries=count,
            sinks=defaults.sinks,
            recency_ratio=defaults.recency_ratio,
        )
        for count in representatives
        for budget, ratio in [*((b, None) for b in budgets), *((None, percent / 100) for percent in percents)]
    ]
    labels = [p.model_dump(exclude={"policy"}, exclude_none=True) for p in parameters]
    return [*map(Contestant, parameters, labels), Contestant(None)]


def chunks_of(length: int, chunk: int) -> list[Chunk]:
    """Return the chunks of a prompt."""
    return [Chunk(begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]


def parse_launches(text: str) -> list[Launch]:
    """Read launches such as ``128x64x8x3`` with commas between them."""
    return [Launch(*map(int, launch.split("x"))) for launch in text.split(",")]


def check(prompt: Prompt, contestants: Sequence[Contestant]) -> dict[str, float]:
    """Compare with torch, in the last chunk of ``prompt``.

    Returns:
        For each contestant the share of selected tokens that the reference did not select, which are some where
        scores nearly tie, and the relative error of attention to what was selected.
    """
    last = len(prompt.inputs.chunks) - 1
    errors = {}
    for contestant in contestants:
        prefill = BlockPrefill(prompt, contestant, [last])
        result = prefill.layer(last)
        blocks, selection = prefill.blocks[last].blocks, prefill.selection(last)
        of_contestant = ", ".join([contestant.name, *(f"{name} {value}" for name, value in contestant.labels.items())])
        if contestant.parameters is not None:
            share = _differing_share(prompt, contestant.parameters, blocks, selection)
            errors[f"{of_contestant}: selection"] = share
        expected = _expected_output(prompt, prefill.queries(last), blocks, selection)
        errors[f"{of_contestant}: output"] = relative_error(result, expected)
    return errors


def check_dense(prompt: Prompt, backends: Sequence[str]) -> dict[str, float]:
    """Return the relative errors of dense prefill in the last chunk of ``prompt``."""
    inputs = prompt.inputs
    last = len(inputs.chunks) - 1
    chunk = inputs.chunks[last]
    queries = inputs.queries[: chunk.tokens]
    blocks = dense_blocks_of(0, 0, chunk.begin, chunk.end)
    nothing = BlockSelection(
        torch.empty(len(blocks), inputs.cache.kv_heads, 0, dtype=torch.int32, device=inputs.device)
    )
    expected = _expected_output(prompt, queries, blocks, nothing)
    return {
        f"dense, {name}: output": relative_error(BACKENDS[name](inputs, [last]).run(last), expected)
        for name in backends
    }


def measure(
    prompt: Prompt, model: str, contestants: Sequence[Contestant], backends: Sequence[str], replays: int
) -> list[Row]:
    """Time the dense backends, then every contestant, then the dense backends again: their means are the baselines."""
    everywhere = range(len(prompt.inputs.chunks))
    last = everywhere[-1]

    def dense_once(name: str) -> Tensor:
        return BACKENDS[name](prompt.inputs, [last]).run(last)

    def sparse_once(contestant: Contestant) -> Tensor:
        return BlockPrefill(prompt, contestant, [last]).layer(last)

    dense_peaks = {name: peak_bytes(partial(dense_once, name)) for name in backends}
    dense = {name: BACKENDS[name](prompt.inputs, everywhere) for name in backends}

    def time_dense() -> dict[str, Timing]:
        return {
            name: time_prompt([partial(prefill.run, chunk) for chunk in everywhere], replays)
            for name, prefill in dense.items()
        }

    before = time_dense()
    found = []
    for contestant in contestants:
        peak = peak_bytes(partial(sparse_once, contestant))
        prefill = BlockPrefill(prompt, contestant, everywhere)
        found += [(contestant, stage, peak) for stage in stages_of(prefill, contestant, time_prompt, replays)]
        del prefill
    after = time_dense()
    both = {
        name: replace(timing, microseconds=(timing.microseconds + after[name].microseconds) / 2)
        for name, timing in before.items()
    }
    fastest = min(both, key=lambda name: both[name].microseconds)
    operations = dense_operations(prompt)
    context = prompt.inputs.chunks[-1].end
    rows = [
        row_of(
            context, model, "dense", {"backend": name, "peak_bytes": dense_peaks[name]},
            Stage("layer", timing, operations), both[fastest], operations,
        )
        for name, timing in both.items()
    ]  # fmt: skip
    for contestant, stage, peak in found:
        memory = {"peak_bytes": peak, "peak_bytes_beyond_dense": peak - dense_peaks[fastest]}
        labels = {"backend": "winnow", **contestant.labels, "dense_backend": fastest, **memory}
        rows.append(row_of(context, model, contestant.name, labels, stage, both[fastest], operations))
    return rows


def stages_of(prefill: BlockPrefill, contestant: Contestant, time: TimeCalls, replays: int) -> list[Stage]:
    """Time a contestant's stages; ``whole`` has nothing to select."""
    calls: dict[str, Callable[[int], object]] = {"layer": prefill.layer, "attend": prefill.attend}
    if contestant.parameters is not None:
        calls["select"] = prefill.select
    return [
        Stage(name, time([partial(call, chunk) for chunk in prefill.blocks], replays), prefill.operations(name))
        for name, call in calls.items()
    ]


def dense_operations(prompt: Prompt) -> float:
    """Return the floating-point operations of dense prefill of a whole prompt."""
    shape, length = prompt.shape, prompt.inputs.chunks[-1].end
    return 4 * shape.head_dim * shape.query_heads * length * (length + 1) / 2


def time_prompt(calls: Sequence[Callable[[], object]], replays: int) -> Timing:
    """Time ``calls`` together, launched one after another, with the host ahead of the device as in a server."""
    times = []
    for replay in range(-_WARM_UPS, replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES)  # noqa: SLF001  # The only way to let the host get ahead.
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        if replay >= 0:
            times.append(begin.elapsed_time(end) * 1e3)
    return summary(times)


def peak_bytes(run: Callable[[], object]) -> int:
    """Return how much more device memory was allocated at once while ``run`` ran than before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def row_of(
    context: int,
    model: str,
    policy: str,
    parameters: dict[str, Any],
    stage: Stage,
    dense: Timing,
    dense_operations: float,
) -> Row:
    """Return a row; only a whole layer has a speed-up."""
    measured = stage.timing.microseconds
    floor = dense.microseconds * stage.operations / dense_operations
    rate = stage.operations / measured / 1e6
    return Row(
        bench=BENCH,
        model=model,
        policy=policy,
        parameters={"stage": stage.name, **parameters, "tflops": round(rate, 1)},
        context=context,
        batch=1,
        dense=dense.microseconds,
        measured=measured,
        unit="µs",
        speedup=dense.microseconds / measured if stage.name == "layer" else None,
        floor_ratio=floor / measured,
        spread=stage.timing.spread,
    )


def table(rows: Sequence[Row]) -> Table:
    """Return a table of the rows."""
    result = Table(
        "context", "policy", "stage", "dense ms", "ms", "spread", "times as fast", "of floor", "TFLOP/s", "MiB"
    )
    for row in rows:
        labels = row.parameters
        budget = {name: labels[name] for name in ("budget", "budget_ratio") if name in labels}
        what = [row.policy, *(f"{name} {value}" for name, value in budget.items())]
        if row.policy == "dense":
            what.append(labels["backend"])
        result.add_row(
            str(row.context),
            ", ".join(what),
            labels["stage"],
            "" if row.dense is None else f"{row.dense / 1e3:.2f}",
            f"{row.measured / 1e3:.2f}",
            "" if row.spread is None else f"{row.spread:.1%}",
            "" if row.speedup is None else f"{row.speedup:.2f}",
            "" if row.floor_ratio is None else f"{row.floor_ratio:.0%}",
            f"{labels['tflops']:.0f}",
            f"{labels['peak_bytes'] / 2**20:.0f}",
        )
    return result


def _differing_share(
    prompt: Prompt, parameters: QuokaPrefill, blocks: Sequence[Block], selection: BlockSelection
) -> float:
    """Return the share of the selected slots of a chunk that the reference does not select."""
    chunk = prompt.inputs.chunks[-1]
    slots = prompt.slots(chunk.end)
    queries = prompt.inputs.queries[: chunk.tokens]
    expected = dict(select_for_blocks(queries, slots, prompt.inputs.cache, parameters))
    chosen = [(n, block) for n, block in enumerate(blocks) if block.budget != WHOLE]
    assert [block.start for _, block in chosen] == list(expected)
    differing = total = 0
    for number, block in chosen:
        own = selection.slots[number, :, : block.budget].long()
        for head, positions in enumerate(expected[block.start]):
            differing += int((~torch.isin(own[head], slots[positions])).sum())
        total += own.numel()
    return differing / total if total else 0.0


def _expected_output(prompt: Prompt, queries: Tensor, blocks: Sequence[Block], selection: BlockSelection) -> Tensor:
    """Return the output of attention to what blocks selected and to their own tokens: float32, by torch."""
    inputs = prompt.inputs
    slots = prompt.slots(inputs.chunks[-1].end)
    output = torch.full(queries.shape, torch.nan, dtype=torch.float32, device=inputs.device)
    for number, block in enumerate(blocks):
        origin = 0 if block.budget == WHOLE else block.start
        selected = selection.slots[number, :, : max(0, block.budget)].long()
        own = slots[origin : block.end].expand(inputs.cache.kv_heads, -1)
        read = torch.cat((selected, own), 1)
        for begin in range(block.begin, block.end, _QUERIES_AT_ONCE):
            end = min(begin + _QUERIES_AT_ONCE, block.end)
            rows = slice(block.first_query + begin - block.begin, block.first_query + end - block.begin)
            # What is selected comes first and own tokens by position: what a query sees is a beginning of it.
            seen = torch.arange(begin, end, device=inputs.device) + 1 - origin + selected.shape[1]
            width = int(seen[-1])
            of_rows = Selection(
                read[:, :width].expand(end - begin, -1, -1), seen[:, None].expand(-1, inputs.cache.kv_heads)
            )
            meter = Meter(end - begin, inputs.device)
            output[rows] = reference_attend(queries[rows].float(), inputs.cache, of_rows, inputs.scale, meter).output
    return output


if __name__ == "__main__":
    app()
