"""Audit the dependencies: ``make audit``.

What needs no network is always checked: that the installed packages agree with each other and with the pins, and that
what the service is shipped with has a licence that allows it. Known vulnerabilities are asked of OSV by pip-audit;
where that database cannot be reached, or does not know a package, this says so in so many words, and with
``--require-advisories`` it fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT: Final = "sglang-winnow"
REPOSITORY: Final = Path(__file__).resolve().parents[1]
PIP_AUDIT: Final = "pip-audit==2.10.1"
_ALLOWED: Final = (
    r"\b(?:Apache(?:[- ]2\.0| Software)|BSD|MIT|ISC|MPL[- ]2\.0|Mozilla Public License 2\.0|PSF|Python Software)\b"
)
_AUDIT_SECONDS: Final = 600


@dataclass
class Findings:
    """What is wrong, and what could not be looked at."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def pins(text: str) -> dict[str, str]:
    """The versions in a constraints file, by name."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split("==") for line in lines)


def agreement(installed: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """Return which of the ``installed`` packages are not what is ``pinned``. What is installed beside does no harm."""
    return [
        f"{name} {version} is installed, {pinned[name]} is pinned"
        for name, version in sorted(installed.items())
        if name in pinned and pinned[name] != version
    ]


def shipped() -> list[metadata.Distribution]:
    """What the service is shipped with: its dependencies and theirs, as installed here."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(_needed(metadata.distribution(PROJECT)))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = metadata.distribution(name)
            waiting += _needed(found[name])
    return list(found.values())


def licences(distributions: Sequence[metadata.Distribution]) -> list[str]:
    """Return which have no licence that is known to allow shipping them."""
    found = {each.name: _licence(each) for each in distributions}
    return [f"{name}: licence {text or 'unknown'!r}" for name, text in found.items() if not re.search(_ALLOWED, text)]


def advisories(report: str) -> Findings:
    """Read what pip-audit has found; a ``report`` that is none was not made."""
    try:
        dependencies: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, LookupError, TypeError):
        return Findings(unchecked=["known vulnerabilities of all packages"])
    findings = Findings()
    for each in dependencies:
        if "skip_reason" in each:
            findings.unchecked.append(f"known vulnerabilities of {each['name']}")
        for vulnerability in each.get("vulns", ()):
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
            findings.problems.append(f"{each['name']} {each['version']}: {vulnerability['id']}, fixed in {fixed}")
    return findings


def main(
    require_advisories: Annotated[
        bool, typer.Option("--require-advisories", help="Fail where known vulnerabilities could not be looked up.")
    ] = False,
) -> None:
    """Audit the dependencies."""
    installed: dict[str, str] = {}
    for each in metadata.distributions():
        # The first is the one that is imported; setuptools brings others of its own.
        installed.setdefault(str(canonicalize_name(each.name)), each.version)
    own = shipped()
    findings = advisories(_pip_audit())
    problems = [
        *_uv_check(),
        *agreement(installed, pins((REPOSITORY / "constraints.txt").read_text())),
        *licences(own),
        *findings.problems,
    ]
    for problem in problems:
        typer.echo(f"PROBLEM: {problem}")
    for unchecked in findings.unchecked:
        typer.echo(f"NOT CHECKED: {unchecked}: the database cannot be reached, or does not know it")
    typer.echo(f"{len(installed)} packages installed, {len(own)} of them with the service: {len(problems)} problems")
    raise typer.Exit(1 if problems or (require_advisories and findings.unchecked) else 0)


def _needed(distribution: metadata.Distribution) -> Iterator[str]:
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def _licence(distribution: metadata.Distribution) -> str:
    told = distribution.metadata
    classifiers = [each for each in told.get_all("Classifier", []) if each.startswith("License ::")]
    said = (told[name] for name in ("License-Expression", "License") if name in told)
    return " ".join((*said, *classifiers))


def _uv_check() -> list[str]:
    done = _run(Path(sys.executable).with_name("uv"), "pip", "check", "--python", sys.executable)
    return [] if done.returncode == 0 else done.stderr.strip().splitlines()


def _pip_audit() -> str:
    # In an environment of its own, from the network that it needs anyway. PyPI would pass over what it does not know.
    command = ("tool", "run", "--quiet", PIP_AUDIT, "--requirement", "constraints.txt", "--no-deps", "--disable-pip")
    options = ("--vulnerability-service", "osv", "--format", "json", "--progress-spinner", "off")
    try:
        return _run(Path(sys.executable).with_name("uv"), *command, *options).stdout
    except subprocess.TimeoutExpired:
        return ""


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=_AUDIT_SECONDS, check=False
    )


if __name__ == "__main__":
    typer.run(main)
