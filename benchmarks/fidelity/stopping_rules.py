"""What stopping early skips, by ART's rule or by the share that is held, beside asking for less from the start.

    python -m benchmarks.fidelity.captured_attention smollm2 --context 7168 --prompts 2 --every 8 --output smollm2.pt
    python -m benchmarks.fidelity.stopping_rules smollm2.pt needle.pt --output stopping-rules.json

Each rule reads what the presets' policies select, of real keys, values and queries, and stops where it says
(``tile_stops``). What it loses is told by how far the output is from that of the whole selection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks.fidelity.captured_attention import NEWEST, CapturedAttention, Prompt
from benchmarks.fidelity.code_choice import Step
from benchmarks.fidelity.key_estimates import rotated
from benchmarks.fidelity.tile_stops import BITS, ORDERS, Known, Tiles
from winnow_evaluation.calibration.early_termination import THRESHOLDS
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import write_json
from winnow_kernels.indexes.key_codes import BLOCK
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_service.policies.presets import MIN_TOKENS

Decode = LowBitTopP | LowBitTopK
POLICIES: Final[Sequence[Decode]] = (LowBitTopP(min_tokens=MIN_TOKENS), LowBitTopK(budget=512))
"""Those of the presets ``balanced`` and ``fast``."""
SETTINGS: Final = tuple(own.model_copy(update={"patience": patience}) for patience in (4, 2) for own in THRESHOLDS)
"""Of ART's rule: those that ``winnow calibrate`` tries, the defaults among them, and the same with less patience."""
SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.88, 0.9, 0.91, 0.92, 0.93, 0.95, 0.97, 0.99)
WHOLE: Final = "to the end"
SETTLED: Final = "output settled"
HELD: Final = "share held"
SMALLER: Final = "less asked for"
CAPPED: Final = "a share within the budget"
_SMALLER_SHARES: Final = (0.5, 0.6, 0.7, 0.75, 0.8, 0.83, 0.85, 0.86, 0.87, 0.88, 0.89)
_BUDGETS: Final = (496, 480, 448, 416, 384, 320, 256, 192, 128)
_CAPPED_SHARES: Final = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99)


def instead(decode: Decode) -> Iterator[tuple[str, dict[str, float], Decode]]:
    """Yield what asks for less than ``decode`` from the start: a rule's name, its setting, and the policy."""
    if isinstance(decode, LowBitTopP):
        yield from ((SMALLER, {"p": p}, decode.model_copy(update={"p": p})) for p in _SMALLER_SHARES)
        return
    capped = LowBitTopP(min_tokens=MIN_TOKENS, max_tokens=decode.budget)
    for budget in _BUDGETS:
        yield SMALLER, {"budget": budget}, decode.model_copy(update={"budget": budget})
    yield from ((CAPPED, {"p": p}, capped.model_copy(update={"p": p})) for p in _CAPPED_SHARES)


@dataclass
class Figures:
    """What a rule does with one setting, over KV heads in each layer at each token; the rest is of query heads.

    Attributes:
        selected: tokens that the whole selection has.
        read: tokens that are read.
        context: tokens of the contexts.
        stopped: whether a KV head reads less than its selection.
        below_least: whether it reads less than ``MIN_TOKENS``.
        errors: distance from the output of the whole selection, over that one's norm.
        dense_errors: the same of dense attention's output.
        shares: true share of what is read.
        lost: how much less that is than the selection's.
    """

    selected: int = 0
    read: int = 0
    context: int = 0
    stopped: list[Tensor] = field(default_factory=list)
    below_least: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)
    dense_errors: list[Tensor] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    lost: list[Tensor] = field(default_factory=list)

    def add(self, outcome: Outcome, whole: Outcome, dense: Tensor, length: int) -> None:
        """Add what a rule comes to, beside the ``whole`` selection and dense attention's output."""
        self.selected += int(whole.read.sum())
        self.read += int(outcome.read.sum())
        self.context += length * len(outcome.read)
        self.stopped.append(outcome.read < whole.read)
        self.below_least.append(outcome.read < MIN_TOKENS)
        self.errors.append(_distance(outcome.output, whole.output))
        self.dense_errors.append(_distance(outcome.output, dense))
        self.shares.append(outcome.share.flatten())
        self.lost.append((whole.share - outcome.share).flatten())

    def row(self) -> dict[str, float]:
        """Return means, and 95th percentiles of errors."""
        errors, dense_errors = torch.cat(self.errors), torch.cat(self.dense_errors)
        return {
            "skipped": 1 - self.read / self.selected,
            "kv_read": self.read / self.context,
            "stopped": float(torch.cat(self.stopped).double().mean()),
            "below_least": float(torch.cat(self.below_least).double().mean()),
            "error": float(errors.mean()),
            "error_p95": float(errors.quantile(0.95)),
            "dense_error": float(dense_errors.mean()),
            "dense_error_p95": float(dense_errors.quantile(0.95)),
            "true_share": float(torch.cat(self.shares).mean()),
            "share_lost": float(torch.cat(self.lost).mean()),
        }


class Outcome(NamedTuple):
    """What a rule comes to with one setting in one step.

    Attributes:
        rule: its name.
        order: in which tiles are read; empty where less is asked for.
        setting: of the rule.
        read: int64 [KV heads]; tokens.
        output: float64 [KV heads, group, head dim].
        share: float64 [KV heads, group]; of the mass, that is read.
    """

    rule: str
    order: str
    setting: Mapping[str, float]
    read: Tensor
    output: Tensor
    share: Tensor

    @property
    def key(self) -> tuple[str, str, str]:
        """Rule, order and setting."""
        return self.rule, self.order, json.dumps(self.setting)


def outcomes(known: Known, decode: Decode) -> Iterator[Outcome]:
    """Yield what the selection of a policy comes to, and then what each rule does with it."""
    selected = known.selected(decode)
    yield Outcome(WHOLE, "", {}, selected.sum(-1), *known.attended(selected))
    for order in ORDERS:
        tiles = Tiles.of(known, selected, order)
        stops: list[tuple[str, dict[str, float], Tensor]] = []
        stops += [(SETTLED, own.model_dump(), tiles.until_settled(own)) for own in SETTINGS]
        stops += [(HELD, {"share": share}, tiles.until_held(share)) for share in SHARES]
        for rule, setting, is_read in stops:
            yield Outcome(rule, order, setting, tiles.tokens(is_read), *tiles.attended(is_read))
    for rule, setting, smaller in instead(decode):
        own = known.selected(smaller)
        yield Outcome(rule, "", setting, own.sum(-1), *known.attended(own))


Found = dict[tuple[str, str, str], Figures]
"""What was found, by rule, order and setting."""


def measure(prompts: Sequence[Prompt], scale: float, done: Callable[[], None]) -> list[Found]:
    """Return what each rule does with the selections of each policy behind the prompts.

    Args:
        prompts: what attention meets.
        scale: of its scores.
        done: called after each layer of each prompt.
    """
    found: list[Found] = [{} for _ in POLICIES]
    for prompt in prompts:
        # A query's own tokens are not predicted.
        before = prompt.keys.shape[1] - NEWEST
        for layer in range(len(prompt.keys)):
            estimates = rotated(prompt.keys[layer, :before], BITS, BLOCK).transpose(0, 1)
            for number, length in enumerate(prompt.lengths):
                values = prompt.values[layer, :length].transpose(0, 1)
                known = Known.of(Step.of(prompt, layer, number, scale), estimates, values)
                dense, _ = known.attended(torch.ones_like(known.masses[:, 0], dtype=torch.bool))
                for own, decode in zip(found, POLICIES, strict=True):
                    whole, *others = outcomes(known, decode)
                    for outcome in (whole, *others):
                        own.setdefault(outcome.key, Figures()).add(outcome, whole, dense, length)
            done()
    return found


def _distance(output: Tensor, exact: Tensor) -> Tensor:
    """Return how far outputs, [..., head dim], are from exact ones, over their norms: float64 [n]."""
    norms = torch.linalg.vector_norm(exact, dim=-1)
    distances: Tensor = torch.linalg.vector_norm(output - exact, dim=-1) / norms
    return distances.flatten()


def main(
    captured: Annotated[list[Path], typer.Argument(help="What captured_attention wrote, of one model each.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Where to write the record.")],
) -> None:
    """Measure all rules on captured attention."""
    torch.set_num_threads(1)
    runs = []
    for path in captured:
        of_model = CapturedAttention.read(path)
        begin = time.perf_counter()
        layers = len(of_model.prompts) * len(of_model.prompts[0].keys)
        with torch.inference_mode(), typer.progressbar(length=layers, label=path.stem) as bar:
            found = measure(of_model.prompts, of_model.scale, lambda: bar.update(1))
        now = {"commit": surroundings()["commit"], "bits": BITS, "seconds": round(time.perf_counter() - begin, 1)}
        policies = [
            {"decode": decode.model_dump(), "rows": [_row(key, figures) for key, figures in own.items()]}
            for decode, own in zip(POLICIES, found, strict=True)
        ]
        runs.append(of_model.about | now | {"policies": policies})
    write_json(output, {"runs": runs})


def _row(key: tuple[str, str, str], figures: Figures) -> dict[str, Any]:
    rule, order, setting = key
    return {"rule": rule, "order": order, "setting": json.loads(setting), **figures.row()}


if __name__ == "__main__":
    typer.run(main)
