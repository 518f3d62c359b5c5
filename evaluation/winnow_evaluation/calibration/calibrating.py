"""One calibration: every policy on every prompt, by the engine of ``winnow fidelity``, prompt by prompt."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from sglang_winnow.delta_profiles import delta_profile
from sglang_winnow.quality_profile import Curve, Data, ModelIdentity, Point, Profile
from winnow_evaluation.calibration.candidates import fits, measured_of
from winnow_evaluation.calibration.unfinished import Figures, Unfinished
from winnow_evaluation.fidelity.delta_layers import calibrated_layers
from winnow_evaluation.fidelity.measure import FLOOR, Plan
from winnow_evaluation.fidelity.policies import Measured, checked, full_layers_of_delta
from winnow_evaluation.fidelity.prompts import Continued
from winnow_evaluation.fidelity.results import interval
from winnow_evaluation.fidelity.session import step_memory
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.indexes.key_codes import DEFAULT_BITS
from winnow_kernels.policies.attention_policy import AttentionPolicy

_FIGURES: Final = ("kl", "top1", "true_share", "kv_read_ratio")


@dataclass(frozen=True)
class Calibration:
    """What is measured.

    Attributes:
        model: whose profile it becomes.
        source: where the texts are from, in a few words.
        prompts: of each length, ascending, and behind those that are measured one more: Δ-layers are chosen by it.
        tokens: predicted behind each prompt.
        policies: to measure.
        scored: last tokens of a prompt that tell of its prefill.
    """

    model: OfflineModel
    source: str
    prompts: Mapping[int, Sequence[Continued]]
    tokens: int
    policies: Sequence[AttentionPolicy]
    scored: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of a prompt, ascending."""
        return list(self.prompts)

    @property
    def prompts_each(self) -> int:
        """Prompts of each length that are measured."""
        return min(map(len, self.prompts.values())) - 1

    def run(self, path: Path, advance: Callable[[int, int, str], None]) -> Profile:
        """Measure what ``path`` does not have yet, and return the profile.

        Args:
            path: keeps what has been measured, for a run that goes on.
            advance: called with the length, the number of the prompt and what was measured of it last.

        Raises:
            ValueError: ``path`` is of another calibration, or Δ-layers cannot be chosen.
            PolicyError: the model cannot run one of the policies.
        """
        policies = self._as_run()
        unfinished = Unfinished.begin(path, self._identity(policies))
        for length in self.lengths:
            for number in range(self.prompts_each):
                if (length, number) in unfinished.measured:
                    advance(length, number, "known")
                    continue
                begin = time.perf_counter()
                figures = self._measure(length, number, policies, advance)
                unfinished.add(length, number, figures, round(time.perf_counter() - begin, 2))
        return self._profile(policies, unfinished)

    def _as_run(self) -> list[Measured]:
        model, wanted = self.model, measured_of(self.policies)
        layers = delta_profile(model.folder)
        full_layers = full_layers_of_delta(wanted)
        if layers is None and full_layers is not None:
            with torch.inference_mode():
                spare = self.prompts[self.lengths[0]][-1]
                layers = calibrated_layers(model, spare, full_layers, step_memory(model.device))
        return checked(wanted, model.layers, model.context_length, layers)

    def _measure(
        self, length: int, number: int, policies: Sequence[Measured], advance: Callable[[int, int, str], None]
    ) -> dict[str, Figures]:
        """Return the figures of each policy that leaves something out of one prompt, by its canonical text."""
        fitting = [each for each in policies if fits(each.policy, length)]
        plan = Plan(fitting, [], 1, self.scored, 1, step_memory(self.model.device))
        prompt = self.prompts[length][number]
        *_, rows = plan.measured(self.model, [prompt], lambda done: advance(length, number, done))
        by_name = {_name(row["phase"], row["policy"], row["parameters"]): row for row in rows}
        found = {
            each.policy.canonical(): by_name[_name(_phase(each), each.name, each.parameters())] for each in fitting
        }
        [floor] = [row for row in rows if (row["phase"], row["policy"]) == ("decode", FLOOR)]
        return {name: {figure: row[figure] for figure in _FIGURES} for name, row in {FLOOR: floor, **found}.items()}

    def _profile(self, policies: Sequence[Measured], unfinished: Unfinished) -> Profile:
        model, about = self.model, self.model.environment()
        curves = [(each.policy, tuple(self._points(unfinished, each.policy.canonical()))) for each in policies]
        return Profile(
            model=ModelIdentity.of(model.folder),
            device=about["device"],
            dtype=str(model.dtype).removeprefix("torch."),
            key_bits=DEFAULT_BITS,
            versions=about["versions"],
            commit=about["commit"] and about["commit"]["id"],
            date=about["date"],
            seconds=round(unfinished.seconds, 1),
            data=Data(
                source=self.source,
                sha256=self._data_hash(),
                prompts=self.prompts_each,
                tokens=self.tokens,
                scored=self.scored,
            ),
            delta_layers=delta_profile(model.folder),
            lengths=tuple(self.lengths),
            floor=tuple(self._points(unfinished, FLOOR)),
            curves=tuple(Curve(attention=policy, points=points) for policy, points in curves if points),
        )

    def _points(self, unfinished: Unfinished, name: str) -> Iterator[Point]:
        for length in self.lengths:
            of_prompts = [unfinished.measured[length, number] for number in range(self.prompts_each)]
            if name in of_prompts[0]:
                yield _point(length, [figures[name] for figures in of_prompts])

    def _identity(self, policies: Sequence[Measured]) -> str:
        model = self.model
        told = {
            "model": ModelIdentity.of(model.folder).model_dump(),
            "device": model.device.type,
            "dtype": str(model.dtype),
            "data": self._data_hash(),
            "lengths": self.lengths,
            "prompts": self.prompts_each,
            "tokens": self.tokens,
            "scored": self.scored,
            "policies": [each.policy.canonical() for each in policies],
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _data_hash(self) -> str:
        digest = hashlib.sha256()
        for prompts in self.prompts.values():
            for prompt in prompts[: self.prompts_each]:
                digest.update(json.dumps([list(prompt.tokens), list(prompt.following)]).encode())
        return digest.hexdigest()


def _point(length: int, figures: Sequence[Figures]) -> Point:
    def values(name: str) -> list[float]:
        return [value for each in figures if (value := each[name]) is not None]

    kl, top1, shares, reads = (values(name) for name in _FIGURES)
    return Point(
        length=length,
        prompts=len(figures),
        kl=_mean(kl),
        kl_high=max(_mean(kl), interval(kl)[1]),
        top1=_mean(top1),
        top1_low=min(_mean(top1), interval(top1)[0]),
        true_share=min(1.0, _mean(shares)) if shares else None,
        kv_read_ratio=_mean(reads),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _phase(measured: Measured) -> str:
    return "prefill" if measured.is_prefill else "decode"


def _name(phase: str, policy: str, parameters: Mapping[str, Any]) -> str:
    return json.dumps([phase, policy, parameters], sort_keys=True)
