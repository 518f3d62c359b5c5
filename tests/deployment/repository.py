"""Where the files that deploy Winnow are, and what the programs in them understand."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from winnow_service.cli.main import app
from winnow_service.settings import Settings

ROOT = Path(__file__).parents[2]
PREFIX = "WINNOW_"


def version() -> str:
    """The project's version, by which its images are tagged."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def read_yaml(path: str) -> dict[str, Any]:
    """The file at ``path`` in the repository."""
    document: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return document


def check_settings(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the settings of a service with ``environment``: each of its variables must be a setting's.

    Raises:
        ValidationError: a value is not valid.
    """
    known = {f"{PREFIX}{name}".upper() for name in Settings.model_fields}
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    assert ours.keys() <= known, f"no such settings: {sorted(ours.keys() - known)}"
    with monkeypatch.context() as patched:
        for name, value in ours.items():
            patched.setenv(name, value)
        return Settings()


def check_winnow_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what ``winnow`` reads in ``arguments``, without running it.

    Raises:
        click.UsageError: it refuses them.
    """
    program: Any = typer.main.get_command(app)
    command = program.commands[arguments[0]]
    with command.make_context(arguments[0], list(arguments[1:])) as context:
        parameters: dict[str, Any] = context.params
        return parameters


def unknown_to_sglang(arguments: Iterable[str]) -> list[str]:
    """Return those of SGLang's options in ``arguments`` that it does not have."""
    options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return [option for option in options if option not in _sglang_options()]


@cache
def _sglang_options() -> frozenset[str]:
    # Read off the source: importing SGLang imports torch.
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "srt/server_args.py").read_text()
    [arguments] = [
        each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == "ServerArgs"
    ]
    declared = [each.target for each in arguments.body if isinstance(each, ast.AnnAssign)]
    return frozenset(f"--{name.id.replace('_', '-')}" for name in declared if isinstance(name, ast.Name))


def has_pinned_tag(image: str) -> bool:
    """Whether ``image`` names one version to the last number."""
    return re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+(-[a-z0-9.-]+)?", image) is not None
