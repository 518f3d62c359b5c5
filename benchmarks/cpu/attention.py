"""Attention on a CPU: Winnow's dense path and policies beside SGLang's ``torch_native``, in one run.

    python -m benchmarks.cpu.attention --output cpu-attention.json

Contestants take turns, so that whatever else the machine does slows all of them; figures are medians. A decode step
runs through all layers of a model that has read a prompt, and each repeat decodes another token of its answer; times
are the mean over layers. Policies have their defaults, and their indexes are built before anything is timed. The
baseline of a prefill policy is the faster of Winnow's dense path, in the same chunks, and ``torch_native`` on the whole
prompt at once: for a later chunk, ``torch_native`` computes the whole prompt anew.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from benchmarks.command_line import numbers
from benchmarks.cpu.captured_prompt import CapturedPrompt, captured_prompt
from sglang_winnow.delta_profiles import delta_profile
from sglang_winnow.prefill_plan import PrefillPlan
from sglang_winnow.request_state import RequestState
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import write_json
from winnow_kernels.attend.dense import prefill
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.attention_policy import AttentionPolicy, check_against_model, parse_policy
from winnow_kernels.policies.declarations import declaration_of
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.quoka.reference import quoka_prefill
from winnow_kernels.policies.registry import PARAMETERS

# The shapes of the needle model.
KV_HEADS, QUERY_HEADS, HEAD_DIM = 2, 8, 64
SCALE = HEAD_DIM**-0.5
PAGE_SIZE = 16
# SGLang's backend is made by a model runner; attention itself needs none of what that sets.
NATIVE: Any = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)


CPU: Final = torch.device("cpu")
CAPTURED: Final = Path(tempfile.gettempdir()) / "winnow-captured-prompts"
POLICIES: Final = tuple(name for name, kind in PARAMETERS["decode"].items() if name != "dense" and not kind.drafts_only)


@dataclass(frozen=True)
class Pool:
    """KV caches of several layers, and where ``requests`` contexts of as many tokens lie in them.

    Attributes:
        caches: of each layer.
        slots: int64 [requests, tokens], by position.
        generations: of the pool's pages.
    """

    caches: Sequence[LayerCache]
    slots: Tensor
    generations: PageGenerations

    @classmethod
    def random(cls, length: int, layers: int, dtype: torch.dtype) -> Pool:
        """Make a context of keys that, like a model's, share a direction in each head, and form clusters."""
        slots, pool = _deal_slots(length, 1, scattered=False)
        caches = [
            LayerCache(_keys(pool).to(dtype), torch.randn(pool, KV_HEADS, HEAD_DIM).to(dtype)) for _ in range(layers)
        ]
        return cls(caches, slots, PageGenerations(pool, PAGE_SIZE, CPU))


@dataclass(frozen=True)
class DecodePool(Pool):
    """Requests that have all read the same prompt, each with pages of its own."""

    prompt: CapturedPrompt

    @classmethod
    def of(cls, prompt: CapturedPrompt, requests: int, dtype: torch.dtype, *, scattered: bool = False) -> DecodePool:
        slots, pool = _deal_slots(len(prompt.keys[0]), requests, scattered=scattered)

        def placed(vectors: Tensor) -> Tensor:
            held = torch.zeros(pool, *vectors.shape[1:], dtype=dtype)
            held[slots] = vectors.to(dtype)
            return held

        caches = [LayerCache(placed(k), placed(v)) for k, v in zip(prompt.keys, prompt.values, strict=True)]
        return cls(caches, slots, PageGenerations(pool, PAGE_SIZE, CPU), prompt)

    @property
    def requests(self) -> int:
        return len(self.slots)

    @cached_property
    def indexes(self) -> Indexes:
        indexes = Indexes(self.caches, PAGE_SIZE, CPU)
        indexes.generations.written(self.slots.flatten())
        return indexes

    def context(self, step: int) -> Context:
        """Return the contexts as a decode step sees them: made anew."""
        length = self.prompt.prompt_length + 1 + step
        return Context(self.slots[:, :length].clone(), torch.full((self.requests,), length))

    def queries(self, layer: int, step: int) -> Tensor:
        """Return the queries of a decode step: [requests, query heads, head dim]."""
        query = self.prompt.queries[layer][self.prompt.window + step].to(self.caches[0].keys.dtype)
        return query.expand(self.requests, -1, -1).contiguous()


class Policy:
    """A decode policy of all requests of a pool, as a server runs it."""

    def __init__(self, policy: AttentionPolicy, pool: DecodePool) -> None:
        self._pool = pool
        self._statistics = Statistics(pool.requests, CPU)
        self._rows = torch.arange(pool.requests)
        self._states = [RequestState(policy, pool.prompt.prompt_length) for _ in range(pool.requests)]
        self._read_window()
        # The first step builds indexes and lets the window vote.
        self.run(0)

    def run(self, step: int) -> Meter:
        """Attend in all layers."""
        pool = self._pool
        meter = Meter(pool.requests, CPU)
        decode_step = self._step(pool.context(step))
        for layer, cache in enumerate(pool.caches):
            meter.count_context(decode_step.context, cache)
            decode_step.attend(layer, pool.queries(layer, step), cache, meter)
        return meter

    def _step(self, context: Context) -> DecodeStep:
        lengths = context.lengths.tolist()
        pool = self._pool
        batch = PolicyBatch(
            context, lengths, self._states, pool.prompt.scale, None, pool.indexes, self._rows, self._statistics
        )
        return declaration_of(self._states[0].decode).step(batch)

    def _read_window(self) -> None:
        """Prefill the end of the prompt, for policies that keep its queries."""
        prompt, requests = self._pool.prompt, self._pool.requests
        begin = prompt.prompt_length - prompt.window
        context = Context(self._pool.slots[:, : prompt.prompt_length], torch.full((requests,), prompt.prompt_length))
        new = [prompt.window] * requests
        plan = PrefillPlan(
            context, self._rows, self._states, [begin] * requests, new, self._pool.indexes, self._statistics
        )
        for layer, cache in enumerate(self._pool.caches):
            window = prompt.queries[layer][: prompt.window].to(cache.keys.dtype)
            plan.attend(layer, window.repeat(requests, 1, 1), cache, prompt.scale, None)


@dataclass(frozen=True)
class Result:
    """One line: median milliseconds (of a decode step's layer, of a prompt's layer), and the ratio to the baseline.

    Attributes:
        attended_ratio: of the context's tokens, those attended to in decode; mean over layers, KV heads and steps.
    """

    phase: str
    tokens: int
    requests: int
    contestant: str
    milliseconds: float
    baseline: str
    times_as_fast: float
    attended_ratio: float | None = None


def main(
    lengths: Annotated[
        str, typer.Option(help="Context lengths of dense attention and decode policies.")
    ] = "512,2048,8192,30000",
    batches: Annotated[str, typer.Option(help="Requests in a decode step.")] = "1,4",
    prompts: Annotated[str, typer.Option(help="Prompt lengths of QUOKA's prefill.")] = "16384,30000",
    chunks: Annotated[str, typer.Option(help="Chunk sizes of QUOKA's prefill.")] = "2048,8192",
    policies: Annotated[str, typer.Option(help="Decode policies; empty for none.")] = ",".join(POLICIES),
    from_model: Annotated[Path, typer.Option(help="Model whose keys and queries decode.")] = Path("models/needle"),
    captured: Annotated[Path, typer.Option(help="Folder in which captured prompts are kept.")] = CAPTURED,
    budget: Annotated[int, typer.Option(help="QUOKA's budget in prefill.")] = 1024,
    layers: Annotated[int, typer.Option(help="Layers of a prefill: each repeat has another one.")] = 4,
    repeats: Annotated[int, typer.Option(help="Measurements of each contestant.")] = 7,
    prefill_repeats: Annotated[int, typer.Option(help="The same, of whole prompts; 0 for no prefill.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Measure, print a table, write JSON."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)
    chosen = {name: _default_policy(name, from_model) for name in policies.split(",") if name}
    results: list[Result] = []
    with torch.inference_mode():
        for length in numbers(lengths):
            prompt = captured_prompt(from_model, length, captured)
            for requests in numbers(batches):
                results += measure_decode(DecodePool.of(prompt, requests, kind), chosen, repeats)
            results += measure_decode(DecodePool.of(prompt, 1, kind, scattered=True), {}, repeats, " scattered")
            if prefill_repeats:
                results += measure_dense_prefill(Pool.random(length, layers, kind), prefill_repeats)
        for length in numbers(prompts) if prefill_repeats else []:
            results += measure_quoka_prefill(
                Pool.random(length, layers, kind), numbers(chunks), budget, prefill_repeats
            )
    Console(width=130).print(_table(results))
    if output:
        shape = {"kv_heads": KV_HEADS, "query_heads": QUERY_HEADS, "head_dim": HEAD_DIM}
        record = surroundings() | {
            "threads": threads,
            "dtype": dtype,
            "shape": shape,
            "policies": {name: json.loads(policy.canonical()) for name, policy in chosen.items()},
            "results": [asdict(result) for result in results],
        }
        write_json(output, record)


def measure_decode(
    pool: DecodePool, policies: dict[str, AttentionPolicy], repeats: int, suffix: str = ""
) -> list[Result]:
    """Compare decode steps of every policy with dense attention."""
    prompt, rows, table = pool.prompt, torch.arange(pool.requests), pool.slots.int()

    def native(step: int) -> None:
        lengths = torch.full((pool.requests,), prompt.prompt_length + 1 + step)
        for layer, cache in enumerate(pool.caches):
            queries = pool.queries(layer, step)
            NATIVE._run_sdpa_forward_decode(  # noqa: SLF001
                queries, torch.empty_like(queries), cache.keys, cache.values, table, rows, lengths,
                scaling=prompt.scale, enable_gqa=True,
            )  # fmt: skip

    prepared = {name: Policy(policy, pool) for name, policy in policies.items()}
    runs = {name: policy.run for name, policy in prepared.items()}
    contestants: dict[str, Callable[..., object]] = {
        "torch_native": native,
        "dense": Policy(AttentionPolicy(), pool).run,
        **runs,
    }
    times = _medians(contestants, repeats, range(prompt.steps), warm_up=True)
    times = {name: value / len(pool.caches) for name, value in times.items()}
    attended = {name: _attended_ratio(policy, prompt.steps) for name, policy in prepared.items()}
    length = len(prompt.keys[0])
    return [
        *_against("decode" + suffix, length, pool.requests, times, ["dense"], ["torch_native"]),
        *_against("decode" + suffix, length, pool.requests, times, policies, ["dense", "torch_native"], attended),
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
    defaults = QuokaPrefill()
    parameters = QuokaPrefill(budget=budget, sinks=defaults.sinks, recency_ratio=defaults.recency_ratio)
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


def _default_policy(name: str, model: Path) -> AttentionPolicy:
    policy = parse_policy({"decode": {"policy": name}})
    config = json.loads((model / "config.json").read_text())
    layers, context_length = config["num_hidden_layers"], config["max_position_embeddings"]
    return check_against_model(policy, layers, context_length, delta_profile(model))


def _attended_ratio(policy: Policy, steps: int) -> float:
    meters = [policy.run(step) for step in range(steps)]
    return sum(int(m.attended.sum()) for m in meters) / sum(int(m.context.sum()) for m in meters)


def _deal_slots(length: int, requests: int, *, scattered: bool) -> tuple[Tensor, int]:
    """Return slots, int64 [requests, length], and the pool's size; the first page is nobody's."""
    pages = -(-length // PAGE_SIZE)
    order = torch.randperm(pages * requests) if scattered else torch.arange(pages * requests)
    slots = ((1 + order)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).view(requests, -1)[:, :length]
    return slots.contiguous(), (1 + pages * requests) * PAGE_SIZE


def _keys(slots: int) -> Tensor:
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
    contestants: dict[str, Callable[..., object]], repeats: int, inputs: Sequence[object], *, warm_up: bool = False
) -> dict[str, float]:
    """Return each contestant's median in milliseconds; a repeat's input is the same for all."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(-1 if warm_up else 0, repeats):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run(inputs[repeat % len(inputs)])
            if repeat >= 0:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def _against(
    phase: str,
    tokens: int,
    requests: int,
    times: dict[str, float],
    names: Iterable[str],
    baselines: Sequence[str],
    attended: dict[str, float] | None = None,
) -> list[Result]:
    baseline = min(baselines, key=times.__getitem__)
    return [
        Result(phase, tokens, requests, n, times[n], baseline, times[baseline] / times[n], (attended or {}).get(n))
        for n in names
    ]


def _table(results: Sequence[Result]) -> Table:
    table = Table("phase", "tokens", "requests", "contestant", "ms per layer", "times as fast as", "", "attended")
    for r in results:
        cells = (r.phase, str(r.tokens), str(r.requests), r.contestant, f"{r.milliseconds:.3f}")
        attended = "" if r.attended_ratio is None else f"{r.attended_ratio:.1%}"
        table.add_row(*cells, r.baseline, f"{r.times_as_fast:.2f}", attended)
    return table


if __name__ == "__main__":
    typer.run(main)
