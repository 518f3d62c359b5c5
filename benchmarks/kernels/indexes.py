"""What the indexes cost on a GPU: clusters, page bounds and key norms of one prompt, and their upkeep at decode.

    python -m benchmarks.kernels.indexes --prefill 32768=1160,131072=9600 --output gpu-index.json

A prompt's index is built when its first sparse request has been prefilled; the time is compared with that of the
prefill, which is given (``--prefill``: milliseconds by context). ``built`` is the whole call of a server, with its
waits for the GPU; ``kernels`` is what it launches. At decode, ``extended`` is the launch of every step, in a CUDA
graph, and ``clustered anew`` what a request pays each 2,048 tokens. Figures are medians.

First the kernels' results are compared with the reference's. Keys come from a mixture of Gaussians: how long a build
takes does not depend on them, since K-means always makes all its iterations, but how many near ties there are does.

A row's floor is what this GPU's memory and matrix units allow, both measured in this run: reading the keys once, and
for clusters also the products of ten iterations, whichever takes longer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.command_line import numbers
from benchmarks.records import Record, Row, header
from winnow_kernels.batch import DecodeBatch
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes import gpu_kmeans as kmeans
from winnow_kernels.indexes.cluster_tables import ClusterTables
from winnow_kernels.indexes.clusters import RECLUSTER_TOKENS, SPAN, ClusterIndex
from winnow_kernels.indexes.gpu_key_pools import KeyPools
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE, ITERATIONS, drawn_behind
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations

# The shape of Llama-3.1-8B.
MODEL: Final = "Llama-3.1-8B"
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
PAGE_SIZE: Final = 16
KEY_BYTES: Final = LAYERS * KV_HEADS * HEAD_DIM * 2
"""Of one token."""
CLUSTERS: Final = SPAN // CLUSTER_SIZE
SINKS: Final = 16
PAGE_INDEXES: Final[dict[str, type[PageBounds | KeyNorms]]] = {"quest": PageBounds, "quoka": KeyNorms}

CHECKED_SPANS: Final = 4
STEP_ROWS: Final = (8, 32)
LAUNCHES: Final = 20
"""In one CUDA graph, of which a replay takes long enough to be timed."""


@dataclass(frozen=True)
class Limits:
    """What this GPU does at most: bytes and floating-point operations a second."""

    bandwidth: float
    operations: float

    def milliseconds(self, moved: float, computed: float = 0) -> float:
        return 1e3 * max(moved / self.bandwidth, computed / self.operations)

    @classmethod
    def measured(cls) -> Limits:
        source = torch.randn(2**29, device="cuda").view(torch.uint8)
        target = torch.empty_like(source)
        moved = 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3
        a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
        return cls(moved, 2 * 8192**3 / milliseconds(lambda: a @ b) * 1e3)


def main(
    output: Annotated[Path, typer.Option(help="Where to write the record.")],
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "32768,131072",
    prefill: Annotated[str, typer.Option(help="Milliseconds of a dense prefill: TOKENS=MILLISECONDS,…")] = "",
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 10,
) -> None:
    """Check the kernels, time them, and write what came out."""
    torch.manual_seed(0)
    console = Console()
    lengths = numbers(contexts)
    pairs = (pair.partition("=") for pair in prefill.split(",") if pair)
    dense = {int(tokens): float(time) for tokens, _, time in pairs}
    limits = Limits.measured()
    caches = _caches(max(lengths) + PAGE_SIZE)
    checked = _check(caches)
    console.print(checked)
    results: list[Row] = []
    for context in lengths:
        prompt = _Prompt(caches, context, dense.get(context), limits)
        results += prompt.clusters(repeats)
        for policy, kind in PAGE_INDEXES.items():
            results += prompt.page_builds(policy, kind, repeats)
    results += _steps(caches, max(lengths), limits)
    Record(header() | {"limits": asdict(limits), "checked": checked}, results).write(output)
    console.print(_table(results))


def milliseconds(run: Callable[[], object], repeats: int = 10, prepare: Callable[[], object] | None = None) -> float:
    """Return the median time from the call of ``run`` to the end of what it launched; ``prepare`` is not in it."""
    times: list[float] = []
    for repeat in range(repeats + 1):
        if prepare is not None:
            prepare()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if repeat:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _caches(slots: int) -> list[LayerCache]:
    """Return every layer's cache; nothing here reads values, so keys stand in for them."""
    caches = []
    for _ in range(LAYERS):
        centres = torch.randn(256, KV_HEADS, HEAD_DIM, device="cuda")
        keys = (centres[torch.randint(256, (slots,), device="cuda")] + torch.randn(HEAD_DIM, device="cuda")).bfloat16()
        keys += torch.randn(slots, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        caches.append(LayerCache(keys, keys))
    return caches


def _scattered_pages(context: int) -> Tensor:
    """Return a prompt's pages, in random order; page 0 is nobody's."""
    return 1 + torch.randperm(context // PAGE_SIZE, device="cuda")


def _check(caches: Sequence[LayerCache]) -> dict[str, float]:
    """Compare two layers' indexes with torch's.

    Returns:
        The share of K-means problems with the reference's labels (a near tie can send one to another optimum), and the
        spread of all clusters relative to its.

    Raises:
        RuntimeError: bounds differ, norms by more than rounding, or clusters are not as tight.
    """
    layers = [caches[0], caches[-1]]
    pages = _scattered_pages(CHECKED_SPANS * SPAN)
    generations = PageGenerations(caches[0].slots, PAGE_SIZE, pages.device)
    for kind in PAGE_INDEXES.values():
        built, expected = (kind(layers, generations, in_triton=triton) for triton in (True, False))
        built.ensure(pages)
        expected.ensure(pages)
        one, other = (i.bounds if isinstance(i, PageBounds) else i.reciprocals for i in (built, expected))
        if not torch.allclose(one, other, atol=0, rtol=0 if kind is PageBounds else 1e-5):
            raise RuntimeError(f"{kind.__name__} differs from the reference")
    indexes = [ClusterIndex(layers, generations, capacity=CHECKED_SPANS, in_triton=t) for t in (True, False)]
    entries = [index.hold(0, pages).entries.long() for index in indexes]
    offsets = [
        torch.stack([layer.offsets[:, e] for layer in index.layers]) for index, e in zip(indexes, entries, strict=True)
    ]
    equal = float((offsets[0] == offsets[1]).all(-1).float().mean())
    spreads = [_spread(index, e, pages) for index, e in zip(indexes, entries, strict=True)]
    relative = spreads[0] / spreads[1]
    if not 0.995 < relative < 1.005:
        raise RuntimeError(f"clusters differ: their spread is {relative:.4f} of the reference's")
    return {"equal_problems": equal, "relative_spread": relative}


def _spread(index: ClusterIndex, entries: Tensor, pages: Tensor) -> float:
    """Return the squared distances of all members to their centroids."""
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).view(-1, SPAN)
    total = 0.0
    for cache, layer in zip(index.caches, index.layers, strict=True):
        for entry, of_span in zip(entries.tolist(), slots, strict=True):
            for head in range(KV_HEADS):
                members = cache.keys[of_span[layer.offsets[head, entry].long()], head].float()
                sizes = layer.sizes[head, entry].long()
                centroids = layer.centroids[head, entry].float().repeat_interleave(sizes, dim=0)
                total += float((members - centroids).square().sum())
    return total


class _Prompt:
    """One prompt of ``context`` tokens, whose indexes are built over and over."""

    def __init__(self, caches: Sequence[LayerCache], context: int, prefill: float | None, limits: Limits) -> None:
        self.caches = caches
        self.context = context
        self.prefill = prefill
        self.limits = limits
        self.pages = _scattered_pages(context)
        self.generations = PageGenerations(caches[0].slots, PAGE_SIZE, self.pages.device)

    def page_builds(self, policy: str, kind: type[PageBounds | KeyNorms], repeats: int) -> list[Row]:
        """Time ``ensure``, and what it launches."""
        index = kind(self.caches, self.generations)
        built = milliseconds(partial(index.ensure, self.pages), repeats, partial(self._write, self.pages))
        kernels = milliseconds(partial(index.entries.build, self.pages), repeats)
        floor = self.limits.milliseconds(self.context * KEY_BYTES)
        return [self._result(policy, "built", built, floor, {}), self._result(policy, "kernels", kernels, floor, {})]

    def clusters(self, repeats: int) -> list[Row]:
        """Time ``hold`` for the prompt and for the newest tokens decoded, and what it launches."""
        results = []
        index = ClusterIndex(self.caches, self.generations, capacity=self.context // SPAN)
        hold = partial(index.hold, 0, self.pages, SINKS)
        for stage, tokens in (("built", self.context), ("clustered anew", RECLUSTER_TOKENS)):
            newest = self.pages[-tokens // PAGE_SIZE :]
            measured = milliseconds(hold, repeats, partial(self._leave, index, newest))
            results.append(self._clusters_result(stage, tokens, measured))
        del index, hold
        spans = self.context // SPAN
        tables = ClusterTables.empty(self.caches[0], LAYERS, spans, SPAN)
        left_out = torch.tensor([SINKS] + [0] * (spans - 1), device="cuda")
        launch = partial(
            kmeans.cluster_spans,
            KeyPools.of(self.caches),
            self.pages.view(spans, -1),
            torch.arange(spans, device="cuda"),
            left_out,
            torch.stack([drawn_behind(tokens, SPAN, CLUSTERS) for tokens in left_out.tolist()]).cuda(),
            tables,
        )
        return [*results, self._clusters_result("kernels", self.context, milliseconds(launch, repeats))]

    def _write(self, pages: Tensor) -> None:
        self.generations.written(pages * PAGE_SIZE)

    def _leave(self, index: ClusterIndex, pages: Tensor) -> None:
        """Let the request go, and write some of its pages anew."""
        index.release(0)
        self._write(pages)

    def _clusters_result(self, stage: str, tokens: int, measured: float) -> Row:
        products = 2 * 2 * ITERATIONS * CLUSTERS * HEAD_DIM * KV_HEADS * LAYERS
        floor = self.limits.milliseconds(tokens * KEY_BYTES, tokens * products)
        parameters = {"clustered": tokens, "span": SPAN, "iterations": ITERATIONS}
        return self._result("tactic", stage, measured, floor, parameters)

    def _result(self, policy: str, stage: str, measured: float, floor: float, parameters: dict[str, Any]) -> Row:
        all_parameters = {"stage": stage, "page_size": PAGE_SIZE, **parameters}
        ratio = floor / measured
        return _row(policy, all_parameters, self.context, 1, self.prefill, measured, ratio)


def _steps(caches: Sequence[LayerCache], context: int, limits: Limits) -> list[Row]:
    """Time the upkeep of page indexes in one decode step: when no row begins a page, and when all do."""
    generations = PageGenerations(caches[0].slots, PAGE_SIZE, caches[0].keys.device)
    results = []
    for policy, kind in PAGE_INDEXES.items():
        index = kind(caches, generations)
        for rows in STEP_ROWS:
            longest = context // rows // PAGE_SIZE * PAGE_SIZE
            batch = DecodeBatch.empty(rows, longest, PAGE_SIZE, caches[0].keys.device)
            batch.page_table.copy_(_scattered_pages(rows * longest).view_as(batch.page_table))
            replay = _captured(partial(index.extend, batch, torch.ones_like(batch.lengths)))
            for stage, length, pages in (
                ("no page begins", longest - 1, 0),
                ("all begin a page", longest - PAGE_SIZE + 1, rows),
            ):
                batch.lengths.fill_(length)
                measured = milliseconds(replay) / LAUNCHES
                ratio = limits.milliseconds(pages * PAGE_SIZE * KEY_BYTES) / measured if pages else None
                parameters = {"stage": f"extended, {stage}", "page_size": PAGE_SIZE}
                results.append(_row(policy, parameters, length, rows, None, measured, ratio))
    return results


def _row(
    policy: str,
    parameters: dict[str, Any],
    context: int,
    batch: int,
    prefill: float | None,
    measured: float,
    floor_ratio: float | None,
) -> Row:
    """Return a row of milliseconds; ``dense`` is the prefill's time, if it was given."""
    return Row(
        bench="index",
        model=MODEL,
        policy=policy,
        parameters=parameters,
        context=context,
        batch=batch,
        dense=prefill,
        measured=measured,
        unit="ms",
        speedup=None,
        floor_ratio=floor_ratio,
    )


def _captured(run: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a CUDA graph with ``LAUNCHES`` times ``run``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    replay: Callable[[], None] = graph.replay
    return replay


def _table(results: Sequence[Row]) -> Table:
    table = Table("policy", "stage", "context", "rows", "ms", "share of prefill", "floor ÷ measured")
    for r in results:
        share = "" if r.dense is None else f"{r.measured / r.dense:.2%}"
        floor = "" if r.floor_ratio is None else f"{r.floor_ratio:.2f}"
        cells = (r.policy, r.parameters["stage"], str(r.context), str(r.batch), f"{r.measured:.4f}", share, floor)
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    typer.run(main)
