"""One calibration: its parts, prompt by prompt, and the profile that they become."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from sglang_winnow.delta_profiles import delta_profile
from sglang_winnow.quality_profile import Data, ModelIdentity, Profile
from winnow_evaluation.calibration.candidates import measured_of
from winnow_evaluation.calibration.drafts import DraftsPart
from winnow_evaluation.calibration.early_termination import StoppingPart
from winnow_evaluation.calibration.parts import Part, Subject
from winnow_evaluation.calibration.quality import QualityPart
from winnow_evaluation.calibration.speed import SpeedPart
from winnow_evaluation.calibration.unfinished import Unfinished, Unit
from winnow_evaluation.fidelity.delta_layers import calibrated_layers
from winnow_evaluation.fidelity.policies import Measured, checked, full_layers_of_delta
from winnow_evaluation.fidelity.prompts import Continued
from winnow_evaluation.fidelity.session import step_memory
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.indexes.key_codes import DEFAULT_BITS
from winnow_kernels.policies.attention_policy import AttentionPolicy


@dataclass(frozen=True)
class Settings:
    """How a calibration measures.

    Attributes:
        parts: their names, the quality's among them.
        scored: last tokens of a prompt that tell of its prefill.
        max_error: that thresholds of early termination are to keep.
    """

    parts: Sequence[str]
    scored: int
    max_error: float


class Calibration:
    """What is measured, and how."""

    def __init__(
        self,
        model: OfflineModel,
        source: str,
        prompts: Mapping[int, Sequence[Continued]],
        tokens: int,
        policies: Sequence[AttentionPolicy],
        settings: Settings,
    ) -> None:
        """
        Args:
            model: whose profile it becomes.
            source: where the texts are from, in a few words.
            prompts: of each length, ascending, and behind those that are measured one more: Δ-layers are chosen by it.
            tokens: predicted behind each prompt.
            policies: to measure.
            settings: how.

        Raises:
            ValueError: Δ-layers cannot be chosen.
            PolicyError: the model cannot run one of the policies.
        """
        self._model, self._source, self._settings = model, source, settings
        self._subject = Subject(model, prompts, tokens, _as_run(model, prompts, policies))
        self._quality = QualityPart(self._subject, settings.scored)
        self._speed = SpeedPart(self._subject)
        self._drafts = DraftsPart(self._subject)
        self._stopping = StoppingPart(self._subject, settings.max_error)

    def run(self, path: Path, advance: Callable[[int, int, Unit, str], None]) -> Profile:
        """Measure what ``path`` does not have yet, and return the profile.

        Args:
            path: keeps what has been measured, for a run that goes on.
            advance: called with the place of what is being measured, how many there are, what it is, and what was
                measured of it last.

        Raises:
            ValueError: ``path`` is of another calibration.
        """
        unfinished = Unfinished.begin(path, self._identity())
        units = [
            (part, Unit(part.name, length, number))
            for part in self._parts
            for length in self._subject.lengths
            for number in range(part.prompts)
        ]
        for place, (part, unit) in enumerate(units):
            if unit in unfinished.measured:
                advance(place, len(units), unit, "known")
                continue
            told = partial(advance, place, len(units), unit)
            begin = time.perf_counter()
            figures = part.measure(unit.length, unit.prompt, told)
            unfinished.add(unit, figures, round(time.perf_counter() - begin, 2))
        return self._profile(unfinished)

    @property
    def _parts(self) -> list[Part]:
        parts: list[Part] = [self._quality, self._speed, self._drafts, self._stopping]
        return [part for part in parts if part.name in self._settings.parts]

    def _profile(self, unfinished: Unfinished) -> Profile:
        model, about, measured = self._model, self._model.environment(), self._settings.parts
        of_quality = unfinished.of(QualityPart.name)
        return Profile(
            model=ModelIdentity.of(model.folder),
            device=about["device"],
            dtype=str(model.dtype).removeprefix("torch."),
            key_bits=DEFAULT_BITS,
            versions=about["versions"],
            commit=about["commit"] and about["commit"]["id"],
            date=about["date"],
            seconds={part: round(unfinished.seconds[part], 1) for part in measured},
            data=Data(
                source=self._source,
                sha256=self._data_hash(),
                prompts=self._subject.prompts_each,
                tokens=self._subject.tokens,
                scored=self._settings.scored,
            ),
            delta_layers=delta_profile(model.folder),
            lengths=tuple(self._subject.lengths),
            floor=self._quality.floor(of_quality),
            curves=self._quality.curves(of_quality),
            speed=self._speed.result(unfinished.of(SpeedPart.name)) if SpeedPart.name in measured else None,
            drafts=self._drafts.result(unfinished.of(DraftsPart.name)) if DraftsPart.name in measured else None,
            early_termination=(
                self._stopping.result(unfinished.of(StoppingPart.name)) if StoppingPart.name in measured else None
            ),
        )

    def _identity(self) -> str:
        model, subject = self._model, self._subject
        told = {
            "model": ModelIdentity.of(model.folder).model_dump(),
            "device": model.device.type,
            "dtype": str(model.dtype),
            "data": self._data_hash(),
            "lengths": subject.lengths,
            "prompts": subject.prompts_each,
            "tokens": subject.tokens,
            "parts": {part.name: dict(part.facts) for part in self._parts},
            "policies": [each.policy.canonical() for each in subject.policies],
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _data_hash(self) -> str:
        digest = hashlib.sha256()
        for prompts in self._subject.prompts.values():
            for prompt in prompts[: self._subject.prompts_each]:
                digest.update(json.dumps([list(prompt.tokens), list(prompt.following)]).encode())
        return digest.hexdigest()


def _as_run(
    model: OfflineModel, prompts: Mapping[int, Sequence[Continued]], policies: Sequence[AttentionPolicy]
) -> list[Measured]:
    wanted = measured_of(policies)
    layers = delta_profile(model.folder)
    full_layers = full_layers_of_delta(wanted)
    if layers is None and full_layers is not None:
        with torch.inference_mode():
            spare = next(iter(prompts.values()))[-1]
            layers = calibrated_layers(model, spare, full_layers, step_memory(model.device))
    return checked(wanted, model.layers, model.context_length, layers)
