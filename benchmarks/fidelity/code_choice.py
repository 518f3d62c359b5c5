"""Which code of keys tells best where attention lies: steps of each channel or rotated residuals, bits, and blocks.

    python -m benchmarks.fidelity.captured_attention smollm2 --context 7648 --prompts 3 --output captured.pt
    python -m benchmarks.fidelity.code_choice measure captured.pt --output smollm2.json
    python -m benchmarks.fidelity.code_choice merge smollm2.json needle.json --output all.json

All but the code is what ``lowbit_top_p`` and ``lowbit_top_k`` do with it: the first 16 and the newest 64 tokens exact,
queries of 8 bits, scores in eighths of an octave, the union of a group. ``lowbit_top_p`` aims at p itself here: what it
adds is fitted to its own codes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from torch import Tensor

from benchmarks.fidelity.captured_attention import NEWEST, CapturedAttention, Moments, Prompt
from benchmarks.fidelity.key_estimates import CODES, Code, Estimate
from benchmarks.markdown_tables import commit_of
from winnow_evaluation.fidelity.prefilled import PAGE_SIZE
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import markdown_table, write_json
from winnow_kernels.decode.coded_tokens import kept_sinks, scored_tokens
from winnow_kernels.decode.predicted_attention import PredictedAttention, highest
from winnow_kernels.indexes.key_codes import RoundedQueries, rotation
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP

BUDGETS: Final = (256, 512, 1024)
P: Final = 0.9
_LOG2_E: Final = 1.4426950408889634
_SINKS: Final = LowBitTopP().sinks
_EXACT: Final = "exact scores"

app = typer.Typer()


@dataclass(frozen=True, eq=False)
class Step:
    """One layer's attention of one token, scores to base 2.

    Attributes:
        exact: float32 [KV heads, group, tokens].
        queries: float32 [KV heads, group, head dim]; as codes are scored with them, times what makes them base 2.
        scored: how many first tokens codes predict, but for the sinks.
        sinks: how many first tokens are exact.
    """

    exact: Tensor
    queries: Tensor
    scored: int
    sinks: int

    @classmethod
    def of(cls, prompt: Prompt, layer: int, number: int, scale: float) -> Step:
        """Return that of a prompt's query, by number."""
        length = prompt.lengths[number]
        keys = prompt.keys[layer, :length].transpose(0, 1)
        queries = prompt.queries[layer, number].unflatten(0, (len(keys), -1))
        scored = scored_tokens(length, PAGE_SIZE)
        exact = queries @ keys.mT * (scale * _LOG2_E)
        return cls(exact, as_scored(queries, scale), scored, kept_sinks(_SINKS, scored))

    @property
    def kept(self) -> Tensor:
        """Scores of the tokens that are attended to in any case."""
        return torch.cat((self.exact[..., : self.sinks], self.exact[..., self.scored :]), -1)

    @property
    def others(self) -> Tensor:
        """Exact scores of all others."""
        return self.exact[..., self.sinks : self.scored]

    def predicted(self, estimates: Tensor) -> PredictedAttention:
        """Return what ``estimates`` of keys, [KV heads, tokens, head dim], tell of attention."""
        scores = self.queries @ estimates[:, self.sinks : self.scored].mT
        return PredictedAttention.of(self.kept, scores)


def as_scored(queries: Tensor, scale: float) -> Tensor:
    """Return ``queries``, [..., head dim], as 8 bits keep them, so that a product with a key is a score to base 2."""
    rounded = RoundedQueries.of(queries, scale)
    return rounded.levels.float() * rounded.steps[..., None] @ rotation(queries.shape[-1])


@dataclass
class Figures:
    """What one code tells, of each query head in each layer at each token.

    Attributes:
        budgets: the shares that so many tokens of each KV head hold, by their number.
        union: what part of the context a KV head reads for p.
        true_share: what that holds.
        errors: reported less true share.
    """

    budgets: dict[int, list[Tensor]] = field(default_factory=lambda: {budget: [] for budget in BUDGETS})
    union: list[Tensor] = field(default_factory=list)
    true_share: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)

    def add(self, step: Step, predicted: PredictedAttention) -> None:
        """Add what a code predicts of one step."""
        kept, others = log_sum(step.kept), step.others.double()
        total = torch.logaddexp2(kept, log_sum(others))
        always = step.kept.shape[-1]

        def held(chosen: Tensor) -> Tensor:
            return torch.logaddexp2(kept, log_sum(others.masked_fill(~chosen[..., None, :], -torch.inf)))

        order = predicted.keys()
        for budget, shares in self.budgets.items():
            shares.append((held(highest(order, budget - always)) - total).exp2().flatten())
        chosen = predicted.reaching(P, 0).any(-2)
        of_chosen = held(chosen)
        true = (of_chosen - total).exp2()
        self.union.append((chosen.sum(-1) + always) / step.exact.shape[-1])
        self.true_share.append(true.flatten())
        self.errors.append((reported_share(predicted, chosen, of_chosen) - true).flatten())

    def row(self) -> dict[str, Any]:
        """Return means, and the 95th percentile of the error's size."""
        true, errors = torch.cat(self.true_share), torch.cat(self.errors)
        return {
            "budgets": {str(budget): float(torch.cat(shares).mean()) for budget, shares in self.budgets.items()},
            "union": float(torch.cat(self.union).mean()),
            "true_share": float(true.mean()),
            "reached": float((true >= P).double().mean()),
            "error": float(errors.abs().mean()),
            "signed_error": float(errors.mean()),
            "error_p95": float(errors.abs().quantile(0.95)),
        }


def reported_share(predicted: PredictedAttention, chosen: Tensor, held: Tensor) -> Tensor:
    """Return what a server reports of each query head: exact mass beside the predicted mass of the rest.

    Args:
        predicted: of a step.
        chosen: bool [KV heads, others].
        held: float64 [KV heads, group]; logarithm to base 2 of the exact mass of what was read.
    """
    shares = predicted.shares.where(~chosen[..., None, :], 0.0).sum(-1)
    return 1 / (1 + (predicted.total[..., 0] + shares.log2() - held).exp2())


def log_sum(scores: Tensor) -> Tensor:
    """Return the logarithm of the mass of scores to base 2, [..., n]: float64 [...]."""
    top = scores.amax(-1, keepdim=True).double().clamp_min(torch.finfo(torch.float32).min)
    return (top + (scores - top).exp2().sum(-1, keepdim=True).log2())[..., 0]


def measure(
    prompts: Sequence[Prompt], scale: float, moments: Moments, codes: Sequence[Code], done: Callable[[], None]
) -> Iterator[tuple[Code | None, Figures]]:
    """Yield what exact scores and then each code tell of the prompts' attention.

    Args:
        prompts: what attention meets.
        scale: of its scores.
        moments: of other text.
        codes: to measure.
        done: called after each layer of each prompt.
    """
    figures: dict[Code | None, Figures] = {code: Figures() for code in (None, *codes)}
    for prompt in prompts:
        # A query's own tokens are not predicted, and a block's code must not know what lies behind a query.
        before = prompt.keys.shape[1] - NEWEST
        for layer in range(len(prompt.keys)):
            steps = [Step.of(prompt, layer, number, scale) for number in range(len(prompt.lengths))]
            for code, own in figures.items():
                estimate: Estimate = (lambda keys: keys) if code is None else code.estimate(layer, moments)
                estimates = estimate(prompt.keys[layer, :before]).transpose(0, 1)
                for step in steps:
                    own.add(step, step.predicted(estimates))
            done()
    yield from figures.items()


@app.command("measure")
def measure_file(
    captured: Annotated[Path, typer.Argument(help="What captured_attention wrote.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Where to write the record.")],
) -> None:
    """Measure all codes on captured keys and queries."""
    torch.set_num_threads(1)
    found = CapturedAttention.read(captured)
    begin = time.perf_counter()
    layers = len(found.prompts) * len(found.prompts[0].keys)
    with torch.inference_mode(), typer.progressbar(length=layers, label=captured.stem) as bar:
        results = list(measure(found.prompts, found.scale, found.moments, CODES, lambda: bar.update(1)))
    head_dim = found.prompts[0].keys.shape[-1]
    rows = [
        {"code": _EXACT, "bits_of_channel": 16.0, **figures.row()}
        if code is None
        else {"code": code.name, **_about(code), "bits_of_channel": code.bits_of_channel(head_dim), **figures.row()}
        for code, figures in results
    ]
    now = {"commit": surroundings()["commit"], "p": P, "seconds": round(time.perf_counter() - begin, 1)}
    write_json(output, {"runs": [found.about | now | {"rows": rows}]})


@app.command()
def merge(
    records: Annotated[list[Path], typer.Argument(help="Records of one model each.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Where to write them as one.")],
) -> None:
    """Put records into one."""
    write_json(output, {"runs": [run for path in records for run in json.loads(path.read_text())["runs"]]})


def table_of(model: str) -> Callable[[Path], str]:
    """Return what makes a model's table of a record."""
    return lambda path: _table(path, model)


def _table(path: Path, model: str) -> str:
    [run] = [run for run in json.loads(path.read_text())["runs"] if run["model"] == model]
    rows = [
        (
            row["code"] if "bits" not in row else f"{row['bits']} bit{'s' * (row['bits'] > 1)}, {row['code']}",
            str(row.get("block", "")),
            f"{row['bits_of_channel']:.2f}",
            *(f"{row['budgets'][str(budget)]:.4f}" for budget in BUDGETS),
            f"{100 * row['union']:.2f}",
            f"{row['true_share']:.4f}",
            f"{100 * row['reached']:.1f}",
            f"{row['error']:.4f}",
            f"{row['signed_error']:+.4f}",
            f"{row['error_p95']:.4f}",
        )
        for row in run["rows"]
    ]
    headings = (
        "code", "block", "bits", *(f"share at {budget:,}" for budget in BUDGETS), "read %", "true share",
        "reach p %", "error", "signed", "95th pct.",
    )  # fmt: skip
    about = (
        f"{run['model']}, {run['prompts']} prompt{'s' * (run['prompts'] > 1)} of {run['context']:,} tokens"
        f" ({run['text']}), {run['queries_each']} queries each, all layers, {run['device']}, {run['dtype']},"
        f" {commit_of(run['commit'])}."
    )
    return f"{markdown_table(headings, rows)}\n{about}\n"


def _about(code: Code) -> dict[str, Any]:
    return {name: value for name, value in asdict(code).items() if name != "name"}


if __name__ == "__main__":
    app()
