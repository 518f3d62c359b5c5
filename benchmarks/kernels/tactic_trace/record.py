"""Write down how many tokens of its clusters each query head takes with ``tactic``.

    python -m benchmarks.kernels.tactic_trace.record --output benchmarks/kernels/tactic_trace/generator-32k.json
    python -m benchmarks.kernels.tactic_trace.record --model models/needle \
        --output benchmarks/kernels/tactic_trace/needle-32k.json

``benchmarks.kernels.tactic_trace.serving`` has a server do the same. Without a model these are lengths for generated
keys whose attention matches Tactic's Table 3 (``benchmarks.kernels.tactic_keys``), each layer with keys of its own;
Llama-3.1-8B has that many heads. With one, for what its answer tokens look for in a prompt of the evaluation's, step
after step. What is written are the lengths that Tactic's reference chooses: clusters, fit and all. Tokens in no cluster
are always attended to, and are not among them.

From one context length to another lengths go in proportion: Tactic found that the share of tokens that hold a share of
the attention hardly moves from 16K to 96K (its Table 9).

Beside the lengths stands the correlation that scores of a group's heads must have for unions as large as those found.
It comes from a simulation: normal scores of clusters with a correlation between heads, of which each head takes its
first so many clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from torch import Tensor

from benchmarks.kernels.tactic_choices import PromptTables, capture
from benchmarks.kernels.tactic_keys import TABLE_LENGTH, make_keys, tables_of
from benchmarks.kernels.tactic_trace.lengths import LengthTrace, Recorded
from winnow_evaluation.machine import surroundings
from winnow_kernels.attend.gather import Meter
from winnow_kernels.indexes.clusters import SPAN
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.tactic.reference import TacticStep

_HALVINGS: Final = 12
_MAX_SIMULATED: Final = 256


@dataclass(frozen=True)
class Found:
    """What Tactic takes for one share.

    Attributes:
        tokens: int64 [steps, layers, query heads]; of clusters.
        union: int64 [steps, layers, KV heads]; the same for the union over a group. All that is in clusters where
            it is so much that the whole context is attended to.
    """

    tokens: Tensor
    union: Tensor

    @property
    def group(self) -> int:
        return self.tokens.shape[-1] // self.union.shape[-1]


def found_in(layers: Sequence[tuple[PromptTables, int]], p: float) -> Found:
    """Return what Tactic takes in some layers: each its tables, of as many steps, and its number in them."""
    tokens, unions = [], []
    for tables, layer in layers:
        captured = tables.captured
        parameters = [Tactic(p=p, full_layers=0, sinks=0)] * captured.steps
        step = TacticStep(tables.context, captured.scale, None, tables.index, parameters, tables.clustered)
        queries, cache = captured.queries[layer], captured.caches[layer]
        meter = Meter(captured.steps, queries.device)
        tokens.append(step.estimate(layer, queries, cache, meter).tokens.long().flatten(1))
        attended = step.select(layer, queries, cache, meter).counts
        unions.append(attended - (tables.context.lengths - tables.clustered)[:, None])
    return Found(torch.stack(tokens, 1), torch.stack(unions, 1))


def trace_of(found: Mapping[float, Found], clustered: int, about: Mapping[str, Any]) -> LengthTrace:
    """Return a trace of what was found for each share, in contexts with ``clustered`` tokens in clusters."""
    recorded = [
        Recorded(
            p=p,
            tokens=of_share.tokens.tolist(),
            tokens_per_head=round(float(of_share.tokens.double().mean()), 1),
            union_percent=round(100 * float(of_share.union.double().mean()) / clustered, 2),
        )
        for p, of_share in found.items()
    ]
    [group] = {of_share.group for of_share in found.values()}
    correlation = correlation_for(list(found.values()), clustered)
    return LengthTrace(
        about=dict(about), clustered=clustered, group=group, correlation=round(correlation, 3), recorded=recorded
    )


def correlation_for(found: Sequence[Found], clustered: int) -> float:
    """Return the correlation with which unions of simulated heads are as large as those found, over all shares."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        correlation = (low + high) / 2
        larger = torch.tensor([simulated_union(each, clustered, correlation) / _mean(each.union) for each in found])
        low, high = (correlation, high) if larger.mean() > 1 else (low, correlation)
    return (low + high) / 2


def simulated_union(found: Found, clustered: int, correlation: float) -> float:
    """Return the tokens of a KV head's union, on average, if heads' scores are normal and correlated."""
    clusters = clustered // CLUSTER_SIZE
    groups = found.tokens.unflatten(-1, (-1, found.group)).flatten(0, -2)
    some = groups[:: -(-len(groups) // _MAX_SIMULATED)]
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(len(some), 1, clusters, generator=generator)
    own = torch.randn(len(some), found.group, clusters, generator=generator)
    scores = correlation**0.5 * common + (1 - correlation) ** 0.5 * own
    places = scores.argsort(dim=-1, descending=True).argsort(dim=-1)
    # Of the last cluster a part is taken.
    taken = (some[..., None].double() / CLUSTER_SIZE - places).clamp(0, 1)
    # The groups simulated may take more or less than all of them do.
    return float(taken.amax(1).sum(-1).mean() * CLUSTER_SIZE) * _mean(found.tokens) / _mean(some)


def _mean(counts: Tensor) -> float:
    return float(counts.double().mean())


def generated_layers(
    context: int, layers: int, steps: int, kv_heads: int, group: int, head_dim: int, seed: int
) -> Iterator[tuple[PromptTables, int]]:
    """Make the keys of one layer after the other, and their clusters."""
    for layer in range(layers):
        made = make_keys(context + steps, steps, kv_heads, group, head_dim, seed=seed + layer, dtype=torch.float32)
        yield tables_of(made), 0


def model_layers(folder: Path, task: str, context: int, steps: int, seed: int) -> list[tuple[PromptTables, int]]:
    """Run a model over a prompt of the evaluation's and its answer, and make the clusters of all its layers."""
    # Imports a model's libraries.
    from winnow_evaluation.offline_model import OfflineModel  # noqa: PLC0415
    from winnow_evaluation.task_prompts import make_prompts  # noqa: PLC0415

    model = OfflineModel(folder, torch.device("cpu"))
    [prompt] = make_prompts(model, task, context, 1, seed)
    captured = capture(model, prompt)
    captured.queries[:] = [queries[:steps] for queries in captured.queries]
    with torch.inference_mode():
        tables = PromptTables(captured, SPAN)
    return [(tables, layer) for layer in range(model.layers)]


def main(
    output: Annotated[Path, typer.Option(help="Where to write the trace.")],
    shares: Annotated[str, typer.Option(help="Of the attention mass, with commas.")] = "0.5,0.6,0.7,0.75,0.8,0.85,0.9",
    context: Annotated[int, typer.Option(help="Tokens of context; with a model, of prompt and answer.")] = TABLE_LENGTH,
    steps: Annotated[int, typer.Option(help="Decode steps, at most.")] = 4,
    layers: Annotated[int, typer.Option(help="Generated.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="Generated, in a layer.")] = 8,
    group: Annotated[int, typer.Option(help="Query heads of a generated KV head.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Elements of a generated key.")] = 128,
    model: Annotated[Path | None, typer.Option(help="Folder of a model that transformers loads, instead.")] = None,
    task: Annotated[str, typer.Option(help="Of the evaluation, that the model is asked.")] = "vt",
    seed: Annotated[int, typer.Option(help="Same seed, same keys or prompt.")] = 0,
) -> None:
    """Record a trace, and print what is in it."""
    if model is None:
        source: dict[str, Any] = {"generator": "benchmarks.kernels.tactic_keys"}
        of_layers = list(generated_layers(context, layers, steps, kv_heads, group, head_dim, seed))
    else:
        source = {"model": model.resolve().name, "task": task}
        of_layers = model_layers(model, task, context, steps, seed)
    source |= {"context": context, "seed": seed, "commit": surroundings()["commit"]}
    with torch.inference_mode():
        found = {p: found_in(of_layers, p) for p in map(float, shares.split(","))}
    trace = trace_of(found, int(of_layers[0][0].clustered[0]), source)
    trace.write(output)
    typer.echo(f"correlation {trace.correlation}; {trace.clustered} tokens in clusters")
    typer.echo("   p  tokens per head  union %  union to head")
    for recorded in trace.recorded:
        union = recorded.union_percent / 100 * trace.clustered / recorded.tokens_per_head
        typer.echo(f"{recorded.p:4.2f}  {recorded.tokens_per_head:15.0f}  {recorded.union_percent:7.2f}  {union:13.2f}")


if __name__ == "__main__":
    typer.run(main)
