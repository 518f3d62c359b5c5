"""When to stop reading a selection: once the output has settled (ART), or once what is read holds enough.

    python -m benchmarks.fidelity.stopping_rules measure smollm2 --context 7648 --prompts 3 --output smollm2.json
    python -m benchmarks.fidelity.stopping_rules merge smollm2.json needle.json --output all.json

Selections are those of ``lowbit_top_p`` on queries, keys and values of dense attention, in the order in which they are
read: the newest tokens, the sinks, then the others from the highest predicted share down. Three ways to read less are
set side by side:

- early termination, as servers have it, each split for itself;
- stopping by the share: after each tile, the exact mass of what was read beside the predicted mass of all else; a KV
  head stops once every query head of its group holds p'. It knows of all splits, which a kernel would not;
- a smaller p from the beginning, read to the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from torch import Tensor

from benchmarks.dense_pass import run_densely
from benchmarks.fidelity.captured_attention import NEWEST
from benchmarks.fidelity.code_choice import Step
from benchmarks.fidelity.key_estimates import rotated
from benchmarks.markdown_tables import commit_of
from winnow_evaluation.calibration.early_termination import THRESHOLDS
from winnow_evaluation.fidelity.prompts import from_documents, from_tasks
from winnow_evaluation.machine import surroundings
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.options import parse_tasks
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.text import load_text
from winnow_evaluation.writing import markdown_table, write_json
from winnow_kernels.attend.early_termination import TILE, Termination, deal, tiles_read
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.decode.coded_tokens import WHOLE_SHARE
from winnow_kernels.decode.predicted_attention import PredictedAttention
from winnow_kernels.indexes.key_codes import BLOCK
from winnow_kernels.policies.lowbit_top_p.aim import aimed_share
from winnow_service.cli.models import resolved
from winnow_service.policies.presets import MIN_TOKENS

P: Final = 0.9
SHARES: Final = (0.7, 0.75, 0.8, 0.85, 0.9)
SMALLER: Final = (0.6, 0.7, 0.75, 0.8, 0.85)
BITS: Final = 2
_CPU: Final = torch.device("cpu")

app = typer.Typer()


@dataclass(frozen=True, eq=False)
class Selected:
    """What one KV head reads in a step, tile by tile.

    Attributes:
        masses: float64 [tiles, group]; exact, relative to each query head's highest score.
        weighted: float64 [tiles, group, head dim]; sums of values by these masses.
        rest: float64 [tiles, group]; relative to the same, the predicted mass of all that the tiles so far leave out.
        total: float64 [group]; the exact mass of the whole context.
        dense: float64 [group, head dim]; dense attention's output.
        tokens: in the selection.
        length: tokens of the context.
    """

    masses: Tensor
    weighted: Tensor
    rest: Tensor
    total: Tensor
    dense: Tensor
    tokens: int
    length: int

    @classmethod
    def of(cls, step: Step, predicted: PredictedAttention, values: Tensor, head: int, p: float) -> Selected:
        """Return what KV head ``head`` reads for ``p``.

        Args:
            step: of a layer and a query.
            predicted: of all tokens that are not read in any case.
            values: float32 [tokens, head dim]; the KV head's.
            head: of which KV head.
            p: that is asked for.
        """
        length, exact = step.exact.shape[-1], step.exact[head].double()
        order = reading_order(step, predicted, head, p)
        top = exact.amax(-1, keepdim=True)
        weights = (exact - top).exp2()
        # What has an exact score is known; all else is predicted, whether it was selected or not.
        known = weights.clone()
        known[:, step.sinks : step.scored] = predicted.shares[head] * (predicted.total[head] - top).exp2()
        tiles = order.split(TILE)
        masses = torch.stack([weights[:, tile].sum(-1) for tile in tiles])
        weighted = torch.stack([weights[:, tile] @ values[tile].double() for tile in tiles])
        predicted_of_tiles = torch.stack([known[:, tile].sum(-1) for tile in tiles])
        rest = (known.sum(-1) - predicted_of_tiles.cumsum(0)).clamp_min(0)
        dense = weights @ values[:length].double() / weights.sum(-1, keepdim=True)
        return cls(masses, weighted, rest, weights.sum(-1), dense, len(order), length)

    def read(self, is_read: Tensor) -> Read:
        """Return what reading some of the tiles, bool [tiles], comes to."""
        mass = self.masses[is_read].sum(0)
        sizes = torch.full((len(self.masses),), TILE)
        sizes[-1] = self.tokens - TILE * (len(sizes) - 1)
        output = self.weighted[is_read].sum(0) / mass[:, None]
        return Read(int(sizes[is_read].sum()), mass / self.total, output)

    @property
    def whole(self) -> Tensor:
        """All tiles: bool [tiles]."""
        return torch.ones(len(self.masses), dtype=torch.bool)

    def until_settled(self, thresholds: EarlyTermination) -> Tensor:
        """Return which tiles are read with early termination: bool [tiles]."""
        tiles = len(self.masses)
        dealt = deal(torch.tensor([[self.tokens]]), tiles)
        is_there = dealt.present[0, 0]
        of_splits = dealt.tiles[0, 0].where(is_there, 0)
        masses = (self.masses[of_splits] * is_there[..., None]).cumsum(1)
        running = (self.weighted[of_splits] * is_there[..., None, None]).cumsum(1) / masses[..., None]
        termination = Termination.of([thresholds], _CPU)
        assert termination is not None
        read = tiles_read(running[None, None], dealt.counts, termination)[0, 0]
        is_read = torch.zeros(tiles, dtype=torch.bool)
        is_read[of_splits[is_there & (torch.arange(of_splits.shape[1]) < read[:, None])]] = True
        return is_read

    def until_held(self, share: float) -> Tensor:
        """Return which tiles are read where reading stops once every query head holds a ``share``: bool [tiles]."""
        held = self.masses.cumsum(0)
        enough = (held >= share * (held + self.rest)).all(-1)
        # The tile with which it is enough is read.
        return enough.long().cumsum(0) - enough.long() == 0


@dataclass(frozen=True, eq=False)
class Read:
    """What a KV head has read.

    Attributes:
        tokens: how many.
        shares: float64 [group]; the true share of the mass that they hold.
        output: float64 [group, head dim].
    """

    tokens: int
    shares: Tensor
    output: Tensor


def reading_order(step: Step, predicted: PredictedAttention, head: int, p: float) -> Tensor:
    """Return the tokens that ``lowbit_top_p`` reads for KV head ``head``, in its order: int64 [tokens]."""
    length = step.exact.shape[-1]
    newest = torch.arange(length - 1, step.scored - 1, -1)
    kept = len(newest) + step.sinks
    chosen = predicted.reaching(aimed_share(p, BITS), MIN_TOKENS - kept).any(-2)[head]
    if int(chosen.sum()) + kept > WHOLE_SHARE * length:
        return torch.arange(length - 1, -1, -1)
    others = chosen.nonzero().flatten()
    ranked = predicted.order()[head, others].argsort(descending=True, stable=True)
    return torch.cat((newest, torch.arange(step.sinks), step.sinks + others[ranked]))


@dataclass
class Figures:
    """What one way to stop comes to, of each query head of each KV head in each layer at each token.

    Attributes:
        read: what part of the context a KV head reads.
        skipped: what part of the selection it does not.
        shares: the true share that is held.
        errors: how far the output is from that of the whole selection, relative to that.
        from_dense: how far it is from dense attention's.
    """

    read: list[float] = field(default_factory=list)
    skipped: list[float] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)
    from_dense: list[Tensor] = field(default_factory=list)

    def add(self, read: Read, whole: Read, selected: Selected) -> None:
        """Add what a KV head has ``read``, beside the ``whole`` selection for p."""
        self.read.append(read.tokens / selected.length)
        self.skipped.append(1 - read.tokens / whole.tokens)
        self.shares.append(read.shares)
        self.errors.append(_relative(read.output, whole.output))
        self.from_dense.append(_relative(read.output, selected.dense))

    def row(self) -> dict[str, float]:
        """Return means, and the 95th percentile of the error."""
        errors = torch.cat(self.errors)
        return {
            "read": float(torch.tensor(self.read).mean()),
            "skipped": float(torch.tensor(self.skipped).mean()),
            "true_share": float(torch.cat(self.shares).mean()),
            "error": float(errors.mean()),
            "error_p95": float(errors.quantile(0.95)),
            "error_to_dense": float(torch.cat(self.from_dense).mean()),
        }


@dataclass(frozen=True)
class Rule:
    """A way to read less than all.

    Attributes:
        name: what tables call it.
        p: that selections are made for.
        is_read: which tiles of a selection are read, bool [tiles].
    """

    name: str
    p: float
    is_read: Callable[[Selected], Tensor]


def rules() -> Iterator[Rule]:
    """Yield what is measured; the first reads all."""

    def whole(selected: Selected) -> Tensor:
        return selected.whole

    yield Rule("the whole selection", P, whole)
    for thresholds in THRESHOLDS:
        name = f"settled: scale {thresholds.scale}, direction {thresholds.direction}"
        yield Rule(name, P, lambda selected, own=thresholds: selected.until_settled(own))  # type: ignore[misc]
    for share in SHARES:
        yield Rule(f"share of {share} held", P, lambda selected, own=share: selected.until_held(own))  # type: ignore[misc]
    for p in SMALLER:
        yield Rule(f"p {p} from the beginning", p, whole)


def add_layer(
    figures: dict[str, Figures], queries: Tensor, keys: Tensor, values: Tensor, scale: float, lengths: Sequence[int]
) -> None:
    """Add what all rules come to in one layer.

    Args:
        figures: by name of the rule.
        queries: float32 [tokens, query heads, head dim].
        keys: float32 [tokens, KV heads, head dim].
        values: same shape.
        scale: of scores.
        lengths: at which tokens to look: how many each sees.
    """
    estimates = rotated(keys[: len(keys) - NEWEST], BITS, BLOCK).transpose(0, 1)
    for length in lengths:
        step = Step.at(queries[length - 1], keys[:length], scale)
        predicted = step.predicted(estimates)
        for head in range(keys.shape[1]):
            own = values[:, head]
            of_p = {p: Selected.of(step, predicted, own, head, p) for p in (P, *SMALLER)}
            whole = of_p[P].read(of_p[P].whole)
            for rule in rules():
                selected = of_p[rule.p]
                figures[rule.name].add(selected.read(rule.is_read(selected)), whole, selected)


@app.command("measure")
def measure_model(
    model: Annotated[str, typer.Argument(help="Name of a model, or a model's folder.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Where to write the record.")],
    context: Annotated[int, typer.Option(min=256, help="Tokens of a prompt; 32 follow it.")] = 7648,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts.")] = 3,
    every: Annotated[int, typer.Option(min=1, max=NEWEST, help="Of the 32 queries, every so many are looked at.")] = 8,
    tasks: Annotated[str | None, typer.Option(help="Tasks of winnow eval instead of prose, with commas.")] = None,
) -> None:
    """Measure all rules on a model."""
    network = OfflineModel(resolved(model), _CPU)
    chosen = None if tasks is None else parse_tasks(tasks, TASKS)
    if chosen is None:
        made = from_documents(network, [each.text for each in load_text("test", "prose")], context, NEWEST - 1, prompts)
    else:
        made = from_tasks(network, chosen, context, NEWEST - 1, prompts, 0)
    figures = {rule.name: Figures() for rule in rules()}
    begin = time.perf_counter()
    for prompt in made:
        tokens = [*prompt.tokens, *prompt.following]
        lengths = list(range(len(tokens) - NEWEST + every, len(tokens) + 1, every))

        def note(
            _layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, lengths: list[int] = lengths
        ) -> None:
            add_layer(figures, queries.float(), keys.float(), values.float(), scale, lengths)

        run_densely(network, tokens, note)
        typer.echo(f"{len(figures['the whole selection'].read)} selections, {time.perf_counter() - begin:.0f} s")
    about = network.environment() | {
        "dtype": "float32",
        "text": "prose" if chosen is None else ", ".join(chosen),
        "context": context,
        "prompts": prompts,
        "queries_each": NEWEST // every,
        "commit": surroundings()["commit"],
        "seconds": round(time.perf_counter() - begin, 1),
    }
    rows = [{"rule": name, **own.row()} for name, own in figures.items()]
    write_json(output, {"runs": [about | {"rows": rows}]})


@app.command()
def merge(
    records: Annotated[list[Path], typer.Argument(help="Records of one model each.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Where to write them as one.")],
) -> None:
    """Put records into one."""
    write_json(output, {"runs": [run for path in records for run in json.loads(path.read_text())["runs"]]})


def stopping_table(path: Path) -> str:
    """Return what each rule reads and loses, on all models of a record."""
    runs = json.loads(path.read_text())["runs"]
    rows = [
        (
            run["model"],
            row["rule"],
            f"{100 * row['read']:.2f}",
            f"{100 * row['skipped']:.1f}",
            f"{row['true_share']:.4f}",
            f"{100 * row['error']:.2f}",
            f"{100 * row['error_p95']:.2f}",
            f"{100 * row['error_to_dense']:.2f}",
        )
        for run in runs
        for row in run["rows"]
    ]
    headings = (
        "model", "reading stops", "read %", "of p 0.9's not read %", "true share",
        "output off %", "95th pct.", "off from dense %",
    )  # fmt: skip
    about = "; ".join(
        f"{run['model']}: {run['prompts']} prompts of {run['context']:,} tokens ({run['text']}),"
        f" {run['queries_each']} queries each, all layers, {run['device']}, {run['dtype']}, {commit_of(run['commit'])}"
        for run in runs
    )
    return f"{markdown_table(headings, rows)}\n{about}.\n"


def _relative(found: Tensor, exact: Tensor) -> Tensor:
    distance: Tensor = torch.linalg.vector_norm(found - exact, dim=-1) / torch.linalg.vector_norm(exact, dim=-1)
    return distance


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
