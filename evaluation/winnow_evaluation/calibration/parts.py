"""The parts of a calibration: each measures prompt by prompt, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sglang_winnow.profile_parts import decoded
from winnow_evaluation.calibration.candidates import fits
from winnow_evaluation.fidelity.forcing import Forcing
from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_evaluation.fidelity.prompts import Continued
from winnow_evaluation.fidelity.session import step_memory
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.policies.attention_policy import AttentionPolicy

Advance = Callable[[str], None]
"""Called with what was measured last."""
Found = Mapping[tuple[int, int], Any]
"""What a part has measured, by length and number of the prompt."""


@dataclass(frozen=True)
class Subject:
    """What all parts measure.

    Attributes:
        model: whose profile it becomes.
        prompts: of each length, ascending, and behind those that are measured one more: Δ-layers are chosen by it.
        tokens: behind each prompt.
        policies: as the model runs them.
    """

    model: OfflineModel
    prompts: Mapping[int, Sequence[Continued]]
    tokens: int
    policies: Sequence[Measured]

    @property
    def lengths(self) -> list[int]:
        """Tokens of a prompt, ascending."""
        return list(self.prompts)

    @property
    def prompts_each(self) -> int:
        """Prompts of each length that are measured."""
        return min(map(len, self.prompts.values())) - 1

    def decodes(self, length: int) -> list[AttentionPolicy]:
        """Return the ways to decode sparsely that leave something out of a prompt of ``length`` tokens, each once."""
        fitting = (each.policy for each in self.policies if fits(each.policy, length))
        sparse = (decoded(policy) for policy in fitting if policy.decode.policy != "dense")
        return list({policy.canonical(): policy for policy in sparse}.values())

    def prefilled(self, length: int, number: int, room: int, policies: Sequence[AttentionPolicy]) -> PrefilledBatch:
        """Prefill one prompt densely, with room for ``room`` tokens of which ``policies`` decode."""
        window = max((getattr(policy.decode, "observation_window", 0) for policy in policies), default=0)
        return PrefilledBatch(self.model, [self.prompts[length][number].tokens], room, window=window)

    def forcing(self, batch: PrefilledBatch, length: int, number: int, tokens: int) -> Forcing:
        """Return the first ``tokens`` of what follows a prompt in the text."""
        following = self.prompts[length][number].following[:tokens]
        return Forcing(batch, torch.tensor([following], device=self.model.device), self.memory)

    @property
    def memory(self) -> int:
        """Bytes that a step may take for what it reads."""
        return step_memory(self.model.device)


@dataclass(frozen=True)
class Part(ABC):
    """One part.

    Attributes:
        name: what ``--parts`` calls it.
        max_prompts: of each length that it needs at most.
        subject: what is measured.
    """

    name: ClassVar[str]
    max_prompts: ClassVar[int] = sys.maxsize
    subject: Subject

    @property
    def prompts(self) -> int:
        """How many of each length it measures, the first ones."""
        return min(self.subject.prompts_each, self.max_prompts)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What tells its figures from those of a part with other settings."""
        return {}

    @abstractmethod
    def measure(self, length: int, number: int, advance: Advance) -> Mapping[str, Any]:
        """Measure one prompt; return figures that JSON can hold, by the policy's canonical text."""
