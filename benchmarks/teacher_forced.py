"""How far policies are from dense attention when they decode the same answers, and what they read for it.

    python -m benchmarks.teacher_forced --lengths 8k --samples 4 --policy '{"decode": {"policy": "tactic"}}'
    python -m benchmarks.teacher_forced --lengths 8k --samples 4 --termination-grid --output grid.json

Prompts are those of ``winnow eval`` with the same seed, task and length, for this model. They are prefilled densely,
once for all policies. Every policy then decodes the same answer tokens, so that its next-token probabilities can be
compared with dense attention's step by step. Ratios are ratios of sums over layers, KV heads, steps and prompts, as the
runtime counts them; KL and shares are means over prompts of each prompt's mean over its steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forced_decoding import DENSE, Forced, Forcing, PrefilledBatch, PromptScore, greedy_answers
from benchmarks.offline_model import OfflineModel, Prompt, make_prompts
from sglang_winnow.delta_profiles import delta_profile
from sglang_winnow.policy import DECODE_POLICIES, AttentionPolicy, PolicyError, check_against_model, parse_policy
from winnow_kernels.indexes.clusters import SPAN
from winnow_service.evaluation.options import OptionError, check_output, parse_lengths, parse_tasks
from winnow_service.evaluation.policies import NO_POLICY, AskedPolicy, parse_policies
from winnow_service.evaluation.tasks import TASKS

EVERY_POLICY: Final = [f'{{"decode": {{"policy": "{name}"}}}}' for name in DECODE_POLICIES if name != "dense"]
"""Compared unless others are given: each with its defaults."""
GRID_POLICIES: Final[Mapping[str, Any]] = {
    "tactic p=0.9": {"policy": "tactic", "p": 0.9},
    "snapkv 1024": {"policy": "snapkv", "budget": 1024},
}
GRID_SCALES: Final = (0.003, 0.01, 0.03, 0.1)
GRID_DIRECTIONS: Final = (0.0003, 0.001, 0.003, 0.01)
GRID_PATIENCE: Final = 4
RESAMPLES: Final = 10_000
INTERVAL: Final = "95 % percentile bootstrap over prompts"
_PLAIN_WIDTH = 240


class Answers(StrEnum):
    """Which answers are decoded."""

    REFERENCE = "reference"
    GREEDY = "greedy"


@dataclass(frozen=True)
class Interval:
    """A mean over prompts."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the mean and its 95 % interval, the same for the same values. There is at least one."""
        data = torch.tensor(values, dtype=torch.float64)
        draws = torch.randint(len(data), (RESAMPLES, len(data)), generator=torch.Generator().manual_seed(0))
        low, high = data[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return cls(float(data.mean()), low, high)


@dataclass
class Reads:
    """What was read in one layer, or in all of them; sums over KV heads, steps and prompts."""

    attended: int = 0
    context: int = 0
    read_bytes: int = 0
    context_bytes: int = 0
    traversals: int = 0
    terminated: int = 0
    tiles: int = 0
    skipped_tiles: int = 0
    recall: float | None = None
    steps: int = 0

    def add(self, other: Reads) -> None:
        """Add other prompts of this layer, or another layer of these prompts."""
        for name, amount in vars(other).items():
            if amount is not None:
                setattr(self, name, (getattr(self, name) or 0) + amount)

    def ratios(self) -> dict[str, float | None]:
        """Return the ratios; None where nothing was counted."""
        return {
            "attended_ratio": _ratio(self.attended, self.context),
            "kv_read_ratio": _ratio(self.read_bytes, self.context_bytes),
            "terminated_ratio": _ratio(self.terminated, self.traversals),
            "skipped_ratio": _ratio(self.skipped_tiles, self.tiles),
            "recall": None if self.recall is None else _ratio(self.recall, self.steps),
        }


@dataclass
class Results:
    """One policy on some prompts.

    Attributes:
        scores: of each prompt.
        layers: what was read in each layer.
    """

    scores: list[PromptScore] = field(default_factory=list)
    layers: list[Reads] = field(default_factory=list)

    def add(self, forced: Forced) -> None:
        """Add a batch's answers."""
        steps = sum(score.tokens for score in forced.scores)
        of_layers = []
        for layer, meter in enumerate(forced.meters):
            counts = {name: int(of_prompts.sum()) for name, of_prompts in vars(meter).items()}
            recall = None if forced.recall is None else forced.recall[layer]
            of_layers.append(Reads(**counts, recall=recall, steps=steps))
        self.extend(Results([score for score in forced.scores if score.tokens], of_layers))

    def extend(self, other: Results) -> None:
        """Add other prompts."""
        self.scores += other.scores
        self.layers = self.layers or [Reads() for _ in other.layers]
        for own, more in zip(self.layers, other.layers, strict=True):
            own.add(more)

    def row(self, without_termination: Results | None) -> dict[str, Any]:
        """Return what the report says of them.

        Args:
            without_termination: the same policy without early termination, if this one has it.
        """
        total = Reads()
        for layer in self.layers:
            total.add(layer)
        kl = [score.kl for score in self.scores]
        base = None if without_termination is None else [score.kl for score in without_termination.scores]
        added = None if base is None else [after - before for after, before in zip(kl, base, strict=True)]
        return {
            "prompts": len(self.scores),
            "tokens": sum(score.tokens for score in self.scores),
            "kl": asdict(Interval.of(kl)),
            "kl_added_by_termination": None if added is None else asdict(Interval.of(added)),
            "top1_agreement": asdict(Interval.of([score.agreement for score in self.scores])),
            "forced_first": asdict(Interval.of([score.forced_first for score in self.scores])),
            **total.ratios(),
            "by_layer": [layer.ratios() for layer in self.layers],
            "by_prompt": [asdict(score) for score in self.scores],
        }


@dataclass(frozen=True)
class Plan:
    """What is decoded, and how.

    Attributes:
        policies: by label, as the model runs them.
        steps: most tokens of an answer that are scored.
        batch: prompts decoded together.
        span: of Tactic's clusters.
    """

    policies: Mapping[str, AttentionPolicy]
    answers: Answers
    steps: int
    batch: int
    span: int
    recall: bool

    @property
    def window(self) -> int:
        """The longest observation window of the policies."""
        windows = [getattr(policy.decode, "observation_window", 0) for policy in self.policies.values()]
        return max(windows, default=0)

    def run(self, model: OfflineModel, prompts: Sequence[Prompt]) -> dict[str, Results]:
        """Return each policy's results on the prompts of one task and length, by label.

        Raises:
            ValueError: nothing can be scored, for every answer ends with its first token.
        """
        results = {label: Results() for label in self.policies}
        for first in range(0, len(prompts), self.batch):
            some = prompts[first : first + self.batch]
            begin = time.perf_counter()
            with torch.inference_mode():
                prefilled = PrefilledBatch(
                    model, [prompt.tokens for prompt in some], self.steps + 1, self.window, self.span
                )
                forcing = Forcing(prefilled, self._answers(model, prefilled, some))
                for label, policy in self.policies.items():
                    results[label].add(forcing.run(policy, measure_recall=self.recall))
            where = f"{some[0].task} at {some[0].length}: {first + len(some)} of {len(prompts)} prompts"
            typer.echo(f"{where}, the last {len(some)} in {time.perf_counter() - begin:.0f} s", err=True)
        if not all(of_policy.scores for of_policy in results.values()):
            raise ValueError(f"{prompts[0].task} at {prompts[0].length}: every answer ends with its first token")
        return results

    def _answers(self, model: OfflineModel, batch: PrefilledBatch, prompts: Sequence[Prompt]) -> list[list[int]]:
        # One more than is scored: what the last scored step should say.
        most = self.steps + 1
        if self.answers is Answers.GREEDY:
            return greedy_answers(batch, most)
        return [[*prompt.answer, *model.end_tokens[:1]][:most] for prompt in prompts]


def termination_grid() -> dict[str, dict[str, Any]]:
    """Return the policies of the trade-off curve by label: without early termination, then with all thresholds."""
    policies = {}
    for label, decode in GRID_POLICIES.items():
        policies[label] = {"decode": decode}
        for scale in GRID_SCALES:
            for direction in GRID_DIRECTIONS:
                thresholds = {"scale": scale, "direction": direction, "patience": GRID_PATIENCE}
                policies[f"{label} stop {scale:g}/{direction:g}"] = {"decode": decode, "early_termination": thresholds}
    return policies


def checked_policies(asked: Iterable[AskedPolicy], model: OfflineModel) -> dict[str, AttentionPolicy]:
    """Return policies by label as the model runs them, dense attention before them.

    Raises:
        PolicyError: one of them the model cannot run, or its prefill is not dense.
    """
    profile = delta_profile(model.folder)
    policies = {"dense": DENSE}
    for policy in asked:
        assert policy.label is not None
        assert policy.attention is not None
        read = parse_policy(policy.attention)
        if not read.has_dense_prefill:
            raise PolicyError("attention.prefill", "must be dense: all policies share one dense prefill")
        policies[policy.label] = check_against_model(read, model.layers, model.context_length, profile)
    return policies


def report_rows(policies: Mapping[str, AttentionPolicy], results: Mapping[str, Results]) -> list[dict[str, Any]]:
    """Return a row for each policy."""
    by_policy = {policies[label].canonical(): of_policy for label, of_policy in results.items()}
    rows = []
    for label, of_policy in results.items():
        policy = policies[label]
        base = None
        if policy.early_termination is not None:
            base = by_policy.get(policy.model_copy(update={"early_termination": None}).canonical())
        rows.append({"policy": label, **of_policy.row(base)})
    return rows


def summary_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return KL, shares and ratios of each policy."""
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in (
        "tokens", "KL, nats [95 %]", "added by stopping [95 %]", "top-1 %", "forced first %", "attended", "KV read",
        "skipped", "terminated", "recall",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["policy"],
            str(row["tokens"]),
            _interval(row["kl"]),
            _interval(row["kl_added_by_termination"]),
            f"{100 * row['top1_agreement']['mean']:.2f}",
            f"{100 * row['forced_first']['mean']:.2f}",
            *(
                _number(row[name])
                for name in ("attended_ratio", "kv_read_ratio", "skipped_ratio", "terminated_ratio", "recall")
            ),
        )
    return table


def layer_table(title: str, rows: Sequence[Mapping[str, Any]], ratio: str) -> Table:
    """Return one of the ratios of each policy layer by layer."""
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for layer in range(len(rows[0]["by_layer"])):
        table.add_column(str(layer), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["policy"], *(_number(layer[ratio]) for layer in row["by_layer"]))
    return table


def main(
    model: Annotated[Path, typer.Option(help="Folder of a model that transformers loads.")] = Path("models/needle"),
    tasks: Annotated[
        str, typer.Option(help="Comma-separated tasks or groups of winnow eval.")
    ] = "niah_multikey_1,niah_multivalue,vt",
    lengths: Annotated[str, typer.Option(help="Comma-separated lengths of prompt and answer; k is 1,024.")] = "8k",
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each task and length.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same prompts.")] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]POLICY", help="Policy in JSON; may be given several times. All without any."),
    ] = None,
    policies: Annotated[
        Path | None, typer.Option(dir_okay=False, help="More policies: a file with a JSON object of them by name.")
    ] = None,
    termination_thresholds: Annotated[
        bool, typer.Option("--termination-grid", help="Compare thresholds of early termination, on tactic and snapkv.")
    ] = False,
    answers: Annotated[Answers, typer.Option(help="The tasks' own answers, or dense attention's.")] = Answers.REFERENCE,
    steps: Annotated[int, typer.Option(min=1, help="Most decode steps of a prompt.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 4,
    span: Annotated[int, typer.Option(help="Tokens in a span of Tactic's clusters.")] = SPAN,
    recall: Annotated[bool, typer.Option(help="Measure the attention mass that is attended; slow.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Where to write JSON, after each length.")] = None,
) -> None:
    """Compare policies with dense attention on the same answers."""
    try:
        chosen_tasks, chosen_lengths = parse_tasks(tasks, TASKS), parse_lengths(lengths)
        asked = _asked(policy or [], policies, with_grid=termination_thresholds)
        if output is not None:
            check_output(output)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"{dtype} is none of float32, bfloat16, float16", param_hint="--dtype")
    network = OfflineModel(model, torch.device(device), getattr(torch, dtype))
    if chosen_lengths[-1] > network.context_length:
        problem = f"{chosen_lengths[-1]} tokens are more than the model's context of {network.context_length}"
        raise typer.BadParameter(problem, param_hint="--lengths")
    try:
        checked = checked_policies(asked, network)
    except PolicyError as error:
        raise typer.BadParameter(str(error), param_hint="--policy") from error
    plan = Plan(checked, answers, steps, batch, span, recall)

    options = {"tasks": chosen_tasks, "lengths": chosen_lengths, "samples": samples, "seed": seed}
    options |= {"answers": answers, "steps": steps, "batch": batch, "span": span, "dtype": dtype}
    described = {label: of_label.model_dump(exclude_none=True) for label, of_label in checked.items()}
    record = network.environment() | {"options": options, "policies": described, "interval": INTERVAL}
    console = Console()
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    cells: list[dict[str, Any]] = []
    for length in chosen_lengths:
        pooled = {label: Results() for label in checked}
        for task in chosen_tasks:
            try:
                of_task = plan.run(network, make_prompts(network, task, length, samples, seed))
            except ValueError as error:
                typer.echo(f"Error: {error}", err=True)
                raise typer.Exit(1) from error
            cells += [{"task": task, "length": length, **row} for row in report_rows(checked, of_task)]
            for label, results in of_task.items():
                pooled[label].extend(results)
        rows = report_rows(checked, pooled)
        # Their prompts are in the tasks' rows.
        cells += [{"task": "all", "length": length, **row, "by_prompt": None} for row in rows]
        console.print(summary_table(f"{length} tokens, {', '.join(chosen_tasks)}, {samples} prompts of each", rows))
        console.print(layer_table("attended ratio by layer", rows, "attended_ratio"))
        console.print(layer_table("KV read ratio by layer", rows, "kv_read_ratio"))
        if output is not None:
            output.write_text(json.dumps(record | {"rows": cells}, indent=1) + "\n")


def _asked(texts: list[str], file: Path | None, *, with_grid: bool) -> list[AskedPolicy]:
    asked = [given for given in parse_policies(texts, file) if given != NO_POLICY]
    if with_grid:
        asked += [AskedPolicy(label, attention) for label, attention in termination_grid().items()]
    asked = asked or list(parse_policies(EVERY_POLICY))
    labels = [given.label for given in asked]
    for label in {"dense", *labels}:
        if ["dense", *labels].count(label) > 1:
            raise OptionError("--policy", f"{label!r} is the name of another policy: choose a name with NAME=JSON")
    return asked


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _interval(interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return ""
    return f"{interval['mean']:.3g} [{interval['low']:.3g}, {interval['high']:.3g}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    typer.run(main)
