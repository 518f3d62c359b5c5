"""What a calibration has measured so far: a line for each prompt, so that a run that was killed goes on behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self


class Unit(NamedTuple):
    """What is measured at a time: one prompt, numbered among those of its length, in one part of the calibration."""

    part: str
    length: int
    prompt: int


@dataclass
class Unfinished:
    """The prompts that have been measured, each under every policy.

    Attributes:
        path: where they are kept.
        measured: of each prompt what its part has found, by the canonical text of policies.
        seconds: what they took, by part.
    """

    path: Path
    measured: dict[Unit, Mapping[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def begin(cls, path: Path, identity: str) -> Self:
        """Begin in the file ``path``, or go on with what an earlier run of the same ``identity`` has left there.

        Raises:
            ValueError: what is there is of another calibration.
        """
        unfinished = cls(path)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if not lines:
            path.write_text(json.dumps({"identity": identity}) + "\n", encoding="utf-8")
            return unfinished
        if _parsed(lines[0]) != {"identity": identity}:
            raise ValueError(
                f"{path} is of a calibration with another model, other prompts or other options:"
                " remove it, or give another --output"
            )
        whole = [lines[0]]
        # A run that was killed while it wrote leaves part of a line, which is measured once more.
        for line in lines[1:]:
            if (found := _parsed(line)) is None:
                break
            unfinished._note(found)
            whole.append(line)
        path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
        return unfinished

    def add(self, unit: Unit, figures: Mapping[str, Any], seconds: float) -> None:
        """Keep what was measured of a prompt."""
        line = {"unit": list(unit), "seconds": seconds, "figures": figures}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._note(line)

    def of(self, part: str) -> dict[tuple[int, int], Mapping[str, Any]]:
        """Return what one part has found, by length and number of the prompt."""
        return {(unit.length, unit.prompt): found for unit, found in self.measured.items() if unit.part == part}

    def _note(self, line: Mapping[str, Any]) -> None:
        unit = Unit(*line["unit"])
        self.measured[unit] = line["figures"]
        self.seconds[unit.part] = self.seconds.get(unit.part, 0.0) + line["seconds"]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
