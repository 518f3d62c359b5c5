"""What a Dockerfile says, and its build carried out as far as it is Python's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped]

from tests.deployment.repository import ROOT

DOCKERFILES = ("docker/service.Dockerfile", "docker/runtime.Dockerfile")


@dataclass(frozen=True)
class Instruction:
    """One instruction; continued lines are joined."""

    name: str
    value: str


@dataclass
class Stage:
    """From one FROM to the next."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        return [instruction.value for instruction in self.instructions if instruction.name == name]

    @property
    def environment(self) -> dict[str, str]:
        pairs = [pair for value in self.values("ENV") for pair in shlex.split(value)]
        return dict(pair.split("=", 1) for pair in pairs)


@cache
def stages(dockerfile: str) -> tuple[Stage, ...]:
    """The stages of a file in the repository; what stands before the first is not in them."""
    found: list[Stage] = []
    with (ROOT / dockerfile).open("rb") as file:
        for item in DockerfileParser(fileobj=file).structure:
            if item["instruction"] == "FROM":
                base, _, name = item["value"].partition(" AS ")
                found.append(Stage(base, name))
            elif found and item["instruction"] != "COMMENT":
                found[-1].instructions.append(Instruction(item["instruction"], item["value"]))
    return tuple(found)


def stage(dockerfile: str, name: str) -> Stage:
    """The stage with a name; the last has none."""
    [one] = [each for each in stages(dockerfile) if each.name == name]
    return one


def copied_from_repository(dockerfile: str) -> list[str]:
    """The files and folders that some stage copies out of the build's context."""
    copies = [shlex.split(value) for each in stages(dockerfile) for value in each.values("COPY")]
    return [source for copy in copies if not copy[0].startswith("--from") for source in copy[:-1]]


def build_environment(dockerfile: str, folder: Path, overrides: Mapping[str, str] | None = None) -> Path:
    """Carry out the copies and the uv commands of the stage ``build``, in ``folder``; return the environment.

    Not carried out is what makes uv itself available: that of this test's own environment is used.

    Args:
        overrides: environment variables in place of the stage's own.

    Raises:
        CalledProcessError: a command failed.
    """
    context = folder / "source"
    context.mkdir()
    environment = folder / "environment"
    build = stage(dockerfile, "build")
    variables = os.environ | build.environment | dict(overrides or {})
    variables["VIRTUAL_ENV"] = str(environment)
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for instruction in build.instructions:
        if instruction.name == "COPY":
            *sources, target = shlex.split(instruction.value)
            for source in sources:
                _copy(ROOT / source, context / target / Path(source).name if len(sources) > 1 else context / target)
        elif instruction.name == "RUN":
            command = re.sub(r"^(--mount=\S+\s+)+", "", instruction.value)
            if command.startswith("uv "):
                subprocess.run(["bash", "-euc", command], cwd=context, env=variables, check=True, capture_output=True)
    return environment


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        shutil.copy(source, target)
