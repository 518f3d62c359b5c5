"""Attention on a CPU: Winnow's dense path and policies beside SGLang's ``torch_native``, in one run.

Contestants take turns, so that whatever else the machine does slows all of them; figures are medians. A decode step
runs through several layers, each with a cache of its own, so that no layer finds its keys in a CPU cache; times are per
layer. The baseline of a prefill policy is the faster of Winnow's dense path, in the same chunks, and ``torch_native``
on the whole prompt at once: for a later chunk, ``torch_native`` computes the whole prompt anew.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode_step import DecodeStep
from winnow_kernels.dense import attend_all, prefill
from winnow_kernels.gather import Meter
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.quoka import QuokaDecodeParameters, QuokaPrefillParameters, QuokaStep, quoka_prefill

# The shapes of the needle model.
KV_HEADS, QUERY_HEADS, HEAD_DIM = 2, 8, 64
SCALE = HEAD_DIM**-0.5
PAGE_SIZE = 16
# SGLang's backend is made by a model runner; attention itself needs none of what that sets.
NATIVE: Any = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)


@dataclass(frozen=True)
class Pool:
    """KV caches of several layers, and where ``requests`` contexts of ``length`` tokens lie in them."""

    caches: Sequence[LayerCache]
    slots: Tensor
    generations: PageGenerations

    @classmethod
    def of(cls, length: int, requests: int, layers: int, dtype: torch.dtype, *, scattered: bool = False) -> Pool:
        pages = -(-length // PAGE_SIZE)
        pool = (1 + pages * requests) * PAGE_SIZE
        order = torch.randperm(pages * requests) if scattered else torch.arange(pages * requests)
        slots = ((1 + order)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).view(requests, -1)[:, :length]
        caches = [
            LayerCache(_keys(pool).to(dtype), torch.randn(pool, KV_HEADS, HEAD_DIM).to(dtype)) for _ in range(layers)
        ]
        return cls(caches, slots.contiguous(), PageGenerations(pool, PAGE_SIZE, torch.device("cpu")))

    def context(self) -> Context:
        """Return the contexts as a step sees them: made anew."""
        requests, length = self.slots.shape
        return Context(self.slots.clone(), torch.full((requests,), length))


@dataclass(frozen=True)
class Result:
    """One line: median milliseconds (of a decode step's layer, of a prompt's layer), and the ratio to the baseline."""

    phase: str
    tokens: int
    requests: int
    contestant: str
    milliseconds: float
    baseline: str
    times_as_fast: float


# What a decode policy's step is made of: context, caches, and an index that outlives the step. A line for each policy.
StepMaker = Callable[[Context], DecodeStep]
DECODE_POLICIES: dict[str, Callable[[Pool], StepMaker]] = {}


def decode_policy(name: str) -> Callable[[Callable[[Pool], StepMaker]], Callable[[Pool], StepMaker]]:
    """Register a function that prepares a pool's index, and returns what makes a step of each context."""

    def register(prepare: Callable[[Pool], StepMaker]) -> Callable[[Pool], StepMaker]:
        DECODE_POLICIES[name] = prepare
        return prepare

    return register


@decode_policy("quoka")
def _quoka(pool: Pool) -> StepMaker:
    norms = KeyNorms(pool.caches, pool.generations)

    def step(context: Context) -> DecodeStep:
        return QuokaStep(context, SCALE, None, [QuokaDecodeParameters(budget=1024)] * context.requests, norms)

    return step


def main(
    lengths: Annotated[
        str, typer.Option(help="Context lengths of dense attention and decode policies.")
    ] = "512,2048,8192,30000",
    batches: Annotated[str, typer.Option(help="Requests in a decode step.")] = "1,4",
    prompts: Annotated[str, typer.Option(help="Prompt lengths of QUOKA's prefill.")] = "16384,30000",
    chunks: Annotated[str, typer.Option(help="Chunk sizes of QUOKA's prefill.")] = "2048,8192",
    policies: Annotated[str, typer.Option(help="Decode policies; empty for none.")] = "quoka",
    budget: Annotated[int, typer.Option(help="QUOKA's budget in prefill.")] = 1024,
    layers: Annotated[int, typer.Option(help="Layers of a decode step.")] = 4,
    repeats: Annotated[int, typer.Option(help="Measurements of each contestant.")] = 7,
    prefill_repeats: Annotated[int, typer.Option(help="The same, of whole prompts.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Measure, print a table, write JSON."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)
    chosen = [name for name in policies.split(",") if name]
    results: list[Result] = []
    with torch.inference_mode():
        for length in _numbers(lengths):
            for requests in _numbers(batches):
                results += measure_decode(Pool.of(length, requests, layers, kind), chosen, repeats)
            results += measure_decode(Pool.of(length, 1, layers, kind, scattered=True), [], repeats, " scattered")
            results += measure_dense_prefill(Pool.of(length, 1, layers, kind), prefill_repeats)
        for length in _numbers(prompts):
            results += measure_quoka_prefill(
                Pool.of(length, 1, layers, kind), _numbers(chunks), budget, prefill_repeats
            )
    Console().print(_table(results))
    if output:
        record = _environment(threads, dtype, layers) | {"results": [asdict(result) for result in results]}
        output.write_text(json.dumps(record, indent=1) + "\n")


def measure_decode(pool: Pool, policies: Sequence[str], repeats: int, suffix: str = "") -> list[Result]:
    """Compare one decode step of every policy with dense attention."""
    requests, length = pool.slots.shape
    queries = torch.randn(requests, QUERY_HEADS, HEAD_DIM).to(pool.caches[0].keys.dtype)
    table = pool.slots.int()
    lengths, rows = torch.full((requests,), length), torch.arange(requests)

    def native() -> None:
        for cache in pool.caches:
            NATIVE._run_sdpa_forward_decode(  # noqa: SLF001
                queries, torch.empty_like(queries), cache.keys, cache.values, table, rows, lengths,
                scaling=SCALE, enable_gqa=True,
            )  # fmt: skip

    def dense() -> None:
        context, meter = pool.context(), Meter(requests, torch.device("cpu"))
        for cache in pool.caches:
            attend_all(queries, context, cache, SCALE, meter)

    def policy(name: str) -> Callable[[], None]:
        make_step = DECODE_POLICIES[name](pool)

        def run() -> None:
            step, meter = make_step(pool.context()), Meter(requests, torch.device("cpu"))
            for layer, cache in enumerate(pool.caches):
                step.attend(layer, queries, cache, meter)

        return run

    contestants: dict[str, Callable[..., object]] = {"torch_native": native, "dense": dense}
    times = _medians(contestants | {name: policy(name) for name in policies}, repeats)
    times = {name: value / len(pool.caches) for name, value in times.items()}
    return [
        *_against("decode" + suffix, length, requests, times, ["dense"], ["torch_native"]),
        *_against("decode" + suffix, length, requests, times, policies, ["dense", "torch_native"]),
    ]


def measure_dense_prefill(pool: Pool, repeats: int) -> list[Result]:
    """Compare the dense prefill of a whole prompt at once."""
    queries = _prompt(pool)
    times = _medians(
        {
            "torch_native": lambda cache: _native_prefill(queries, pool, cache),
            "dense": lambda cache: _chunked(queries, pool, len(queries), lambda q, s: prefill(q, s, cache, SCALE)),
        },
        repeats,
        pool.caches,
    )
    return _against("prefill", len(queries), 1, times, ["dense"], ["torch_native"])


def measure_quoka_prefill(pool: Pool, chunks: Sequence[int], budget: int, repeats: int) -> list[Result]:
    """Compare QUOKA's prefill of a whole prompt in chunks with the faster dense one."""
    queries = _prompt(pool)
    parameters = QuokaPrefillParameters(budget=budget)
    results = []
    for chunk in chunks:

        def dense(cache: LayerCache, chunk: int = chunk) -> None:
            _chunked(queries, pool, chunk, lambda q, s: prefill(q, s, cache, SCALE))

        def quoka(cache: LayerCache, chunk: int = chunk) -> None:
            norms = KeyNorms([cache], pool.generations)

            def run(rows: Tensor, slots: Tensor) -> None:
                norms.ensure(slots[: len(slots) - len(rows) : PAGE_SIZE] // PAGE_SIZE)
                quoka_prefill(rows, slots, cache, SCALE, parameters, norms.reciprocals[0])

            _chunked(queries, pool, chunk, run)

        contestants: dict[str, Callable[..., object]] = {
            "torch_native at once": lambda cache: _native_prefill(queries, pool, cache),
            "dense": dense,
            "quoka": quoka,
        }
        times = _medians(contestants, repeats, pool.caches)
        results += _against(
            f"prefill in chunks of {chunk}", len(queries), 1, times, ["quoka"], ["dense", "torch_native at once"]
        )
    return results


def _keys(slots: int) -> Tensor:
    """Return keys that, like a model's, share a direction in each head, and form clusters."""
    centres = torch.randn(64, KV_HEADS, HEAD_DIM)
    return torch.randn(slots, KV_HEADS, HEAD_DIM) + centres[torch.randint(64, (slots,))] + 2 * torch.randn(HEAD_DIM)


def _prompt(pool: Pool) -> Tensor:
    return torch.randn(pool.slots.shape[1], QUERY_HEADS, HEAD_DIM).to(pool.caches[0].keys.dtype)


def _native_prefill(queries: Tensor, pool: Pool, cache: LayerCache) -> None:
    length, zero = torch.tensor([len(queries)]), torch.tensor([0])
    NATIVE._run_sdpa_forward_extend(  # noqa: SLF001
        queries, torch.empty_like(queries), cache.keys, cache.values, pool.slots.int(), zero, length, zero, length,
        scaling=SCALE, enable_gqa=True, causal=True,
    )  # fmt: skip


def _chunked(queries: Tensor, pool: Pool, chunk: int, attend: Callable[[Tensor, Tensor], object]) -> None:
    for begin in range(0, len(queries), chunk):
        rows = queries[begin : begin + chunk]
        attend(rows, pool.slots[0, : begin + len(rows)])


def _medians(
    contestants: dict[str, Callable[..., object]], repeats: int, caches: Sequence[LayerCache] = ()
) -> dict[str, float]:
    """Return each contestant's median in milliseconds.

    If caches are given, each repeat gets another one: a whole prompt, which is too long to need a warm-up.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(0 if caches else -1, repeats):
        for name, run in contestants.items():
            arguments = caches[repeat % len(caches) :][:1] if caches else ()
            begin = time.perf_counter()
            run(*arguments)
            if repeat >= 0:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def _against(
    phase: str, tokens: int, requests: int, times: dict[str, float], names: Iterable[str], baselines: Sequence[str]
) -> list[Result]:
    baseline = min(baselines, key=times.__getitem__)
    return [Result(phase, tokens, requests, n, times[n], baseline, times[baseline] / times[n]) for n in names]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _table(results: Sequence[Result]) -> Table:
    table = Table("phase", "tokens", "requests", "contestant", "ms per layer", "times as fast as", "")
    for r in results:
        cells = (r.phase, str(r.tokens), str(r.requests), r.contestant, f"{r.milliseconds:.3f}")
        table.add_row(*cells, r.baseline, f"{r.times_as_fast:.2f}")
    return table


def _environment(threads: int, dtype: str, layers: int) -> dict[str, object]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "uncommitted_changes": bool(changed.stdout.strip()),
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "threads": threads,
        "dtype": dtype,
        "layers": layers,
        "shape": {"kv_heads": KV_HEADS, "query_heads": QUERY_HEADS, "head_dim": HEAD_DIM},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "sglang": version("sglang")},
    }


if __name__ == "__main__":
    typer.run(main)
