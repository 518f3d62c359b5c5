"""What Tactic reads of a context, beside the fewest of the same clusters that would do (Tactic, Table 3).

    python -m benchmarks.fidelity.cluster_optimal --model smollm2 --context 7.5k --prompts 4 --output unions.json
    python -m benchmarks.fidelity.cluster_optimal --merge all.json --merge unions.json

Text goes through the model with dense attention, as in ``winnow fidelity``, and at each token behind a prompt and each
layer ``tactic`` says what it would read. Beside that, from the same clusters, sinks and tail, whole clusters are taken
by what their tokens truly weigh, until with the tokens in no cluster they hold ``p``: in the order of their mass, which
takes the fewest clusters, and in that of their mass for each token, which takes the fewest tokens but for the last
cluster. Each query head takes its own; a KV head reads the union over its group. The first layers, which are dense,
do not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from torch import Tensor

from winnow_evaluation.fidelity.__main__ import parse_contexts
from winnow_evaluation.fidelity.exact import Following, Scores
from winnow_evaluation.fidelity.forcing import Forcing
from winnow_evaluation.fidelity.passes import ExactPass
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_evaluation.fidelity.prompts import Continued, from_documents, from_tasks
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.options import parse_tasks
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.text import load_text
from winnow_evaluation.writing import write_json
from winnow_kernels.attend.gather import Meter
from winnow_kernels.indexes.clusters import ClusterIndex, clustered_until
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.tactic.reference import TacticStep
from winnow_service.cli.models import resolved

SHARES: Final = (0.5, 0.75, 0.9, 0.95)
ORDERS: Final = ("by_mass", "by_mass_per_token")
_MEMORY: Final = 2**30
_CHUNK: Final = 2048


def whole_clusters(masses: Tensor, sizes: Tensor, before: Tensor, p: float, order: str) -> Tensor:
    """Return which clusters are taken, one after the other, until enough mass is held.

    Args:
        masses: float64 [..., clusters]; what clusters hold of all mass.
        sizes: int64, same shape; their tokens; one without any holds nothing and is never taken.
        before: float64 [...]; what is held without them.
        p: what is to be held.
        order: one of ``ORDERS``.

    Returns:
        bool [..., clusters].
    """
    worth = masses if order == "by_mass" else masses / sizes.clamp_min(1)
    by_worth = worth.masked_fill(sizes == 0, -1.0).argsort(dim=-1, descending=True, stable=True)
    in_order = masses.gather(-1, by_worth)
    needed = before[..., None] + in_order.cumsum(-1) - in_order < p
    return torch.zeros_like(needed).scatter_(-1, by_worth, needed) & (sizes > 0)


@dataclass
class Sums:
    """Sums over prompts, tokens, layers and heads for one ``p``.

    Attributes:
        query_heads: how many were asked.
        kv_heads: how many were asked.
        reached: query heads of whose mass what ``tactic`` reads holds ``p``.
        held: the share of the mass that the union holds, by who takes it, of query heads.
        tokens: of each query head, those in no cluster included, by who takes them.
        union: of each KV head, by who takes them; ``tactic_read`` is what Tactic reads: all of a context of which it
            has taken most.
        union_reached: the same of KV heads whose query heads all reach ``p``.
    """

    query_heads: int = 0
    kv_heads: int = 0
    reached: float = 0.0
    held: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    union: dict[str, float] = field(default_factory=dict)
    union_reached: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return means, and ratios of what Tactic reads to the union that is the smaller on average."""
        heads, kv_heads = self.query_heads, self.kv_heads
        optimal = min(ORDERS, key=lambda order: self.union[order])
        return {
            "tokens_per_head": {name: count / heads for name, count in self.tokens.items()},
            "union": {name: count / kv_heads for name, count in self.union.items()},
            "optimal_order": optimal,
            "union_ratio": self.union["tactic_read"] / self.union[optimal],
            "taken_ratio": self.union["tactic"] / self.union[optimal],
            "reached_ratio": self.union_reached["tactic_read"] / max(self.union_reached[optimal], 1.0),
            "true_share": {name: share / heads for name, share in self.held.items()},
            "success": self.reached / heads,
        }


class UnionsPass(ExactPass):
    """Dense attention of one prompt's continuation, beside which Tactic and its clusters are asked."""

    def __init__(self, following: Following, sums: Mapping[float, Sums]) -> None:
        super().__init__(following)
        batch = following.batch
        self._sums = sums
        self._lengths = following.lengths.flatten()
        self._context = batch.context(torch.zeros_like(self._lengths), self._lengths)
        self._index = index = batch.indexes[ClusterIndex]
        [prompt] = batch.lengths
        ends = [clustered_until(prompt, length, index.piece) for length in self._lengths.tolist()]
        if len(set(ends)) > 1:
            raise ValueError("tokens behind a prompt that are clustered meanwhile are not measured")
        parameters = [Tactic(p=p) for p in sums]
        index.ensure(self._context, 0, ends[0], parameters[0].sinks)
        clustered = torch.tensor(ends, device=batch.model.device)
        # The step would attend to the first layers densely: it is asked for no output.
        self._steps = {
            own.p: TacticStep(self._context, batch.scale, None, index, [own] * self.rows, clustered)
            for own in parameters
        }
        self._full_layers = parameters[0].full_layers

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        if layer >= self._full_layers:
            scores = Scores.of(self.following, layer, queries, slice(0, 1))
            # Rows are tokens: [tokens, KV heads, group, context].
            self._ask(layer, queries[0], scores.scores[0].double().softmax(-1).transpose(0, 1))
        return super().attend(layer, queries)

    def _ask(self, layer: int, queries: Tensor, weights: Tensor) -> None:
        cache = self.following.batch.caches[layer]
        labels, sizes = self._clusters(layer)
        rows, clusters = weights.shape[0], sizes.shape[-1]
        # What is in no cluster is put behind the last one.
        places = labels.where(labels >= 0, clusters)[None, :, None].expand_as(weights)
        masses = weights.new_zeros(*weights.shape[:3], clusters + 1).scatter_add_(-1, places, weights)
        before, masses = masses[..., -1], masses[..., :-1]
        of_heads = sizes[None, :, None].expand_as(masses)
        kept = self._lengths[:, None] - sizes.sum(-1)
        for p, sums in self._sums.items():
            step = self._steps[p]
            taken = {order: whole_clusters(masses, of_heads, before, p, order) for order in ORDERS}
            taken["tactic"] = step.taken(layer, queries, cache)[..., :clusters]
            unions = {name: kept + (own.any(2) * sizes).sum(-1) for name, own in taken.items()}
            meter = Meter(rows, queries.device)
            unions["tactic_read"] = step.select(layer, queries, cache, meter).counts
            is_whole = unions["tactic_read"] == self._lengths[:, None]
            if not torch.equal(unions["tactic"].where(~is_whole, 0), unions["tactic_read"].where(~is_whole, 0)):
                raise AssertionError("Tactic reads other tokens than its query heads take")
            held = {name: before + (masses * own.any(2)[:, :, None]).sum(-1) for name, own in taken.items()}
            held["tactic_read"] = held["tactic"].where(~is_whole[..., None], 1.0)
            reached = held["tactic_read"] >= p
            sums.query_heads += reached.numel()
            sums.kv_heads += is_whole.numel()
            sums.reached += float(reached.sum())
            for name, shares in held.items():
                sums.held[name] = sums.held.get(name, 0.0) + float(shares.sum())
            for name, own in taken.items():
                tokens = (kept[..., None] + (own * of_heads).sum(-1)).sum()
                sums.tokens[name] = sums.tokens.get(name, 0.0) + float(tokens)
            for name, union in unions.items():
                sums.union[name] = sums.union.get(name, 0.0) + float(union.sum())
                of_reached = float((union * reached.all(-1)).sum())
                sums.union_reached[name] = sums.union_reached.get(name, 0.0) + of_reached

    def _clusters(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the cluster of each token, -1 for none, [KV heads, context], and the clusters' sizes, all int64."""
        device = self._lengths.device
        spans = next(iter(self._steps.values())).spans.of_requests(torch.zeros(1, dtype=torch.int64, device=device))
        sizes = self._index.read(layer, spans).sizes[:, 0].long()
        numbers = torch.arange(sizes.shape[-1], device=device)
        of_tokens = torch.stack([numbers.repeat_interleave(of_head) for of_head in sizes])
        firsts = sizes.cumsum(-1) - sizes
        ranks = torch.arange(of_tokens.shape[-1], device=device) - firsts.gather(-1, of_tokens)
        positions = self._index.members(layer, spans, of_tokens[None], ranks[None])[0]
        labels = torch.full((sizes.shape[0], int(self._lengths.max())), -1, device=device)
        return labels.scatter_(-1, positions, of_tokens), sizes


def measure(model: OfflineModel, prompts: Sequence[Continued], shares: Sequence[float]) -> dict[float, Sums]:
    """Return the sums over prompts, for each ``p``."""
    sums = {p: Sums() for p in shares}
    for prompt in prompts:
        fed = torch.tensor([prompt.following[:-1]], device=model.device)
        with torch.inference_mode():
            batch = PrefilledBatch(model, [prompt.tokens], fed.shape[1], chunk=_CHUNK)
            Forcing(batch, fed, _MEMORY).run(lambda following: UnionsPass(following, sums))
        typer.echo(f"{len(prompt.tokens):,} tokens and {fed.shape[1]} behind them", err=True)
    return sums


def main(
    model: Annotated[str | None, typer.Option(help="Name of a model, or a model's folder.")] = None,
    context: Annotated[str, typer.Option(help="Tokens of a prompt; k is 1,024.")] = "7.5k",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, max=256, help="Tokens behind each prompt.")] = 16,
    tasks: Annotated[str | None, typer.Option(help="Tasks of winnow eval instead of prose, with commas.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    merge: Annotated[list[Path] | None, typer.Option(help="Measure nothing: put these records into one.")] = None,
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Where to write the record.")] = None,
) -> None:
    """Measure how much more Tactic reads than the same clusters would allow."""
    if merge:
        runs = [run for path in merge for run in json.loads(path.read_text())["runs"]]
    elif model is None:
        raise typer.BadParameter("say which", param_hint="--model")
    else:
        [length] = parse_contexts(context)
        network = OfflineModel(resolved(model), torch.device(device))
        chosen = None if tasks is None else parse_tasks(tasks, TASKS)
        if chosen is not None:
            made = from_tasks(network, chosen, length, tokens, prompts, 0)
        else:
            made = from_documents(network, [each.text for each in load_text("test", "prose")], length, tokens, prompts)
        header = network.environment()
        begin = time.perf_counter()
        rows = [{"p": p, **sums.row()} for p, sums in measure(network, made, SHARES).items()]
        about = {"text": "prose" if chosen is None else ", ".join(chosen), "context": length, "prompts": len(made)}
        seconds = round(time.perf_counter() - begin, 1)
        runs = [
            header
            | about
            | {"tokens_each": tokens, "dtype": "float32", "parameters": Tactic().model_dump(), "seconds": seconds}
            | {"rows": rows}
        ]
    if output is not None:
        write_json(output, {"runs": runs})
    for run in runs:
        for row in run["rows"]:
            typer.echo(f"{run['model']} {run['context']}: {json.dumps(row)}")


if __name__ == "__main__":
    typer.run(main)
