"""``winnow doctor``: what is installed, on what device, and whether it is what Winnow supports."""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from winnow_kernels.contract.verification import ALGORITHM
from winnow_kernels.policies.attention_policy import setting_for
from winnow_service.cli.terminal import module_command
from winnow_service.errors import ServiceError
from winnow_service.policies.presets import PRESETS
from winnow_service.runtime.client import RuntimeClient, authorization
from winnow_service.runtime.fields import FieldsVerdict, check_fields
from winnow_service.runtime.served_model import ServedModel, ask_what_is_served
from winnow_service.settings import Settings

SUPPORTED_PYTHON = SpecifierSet(">=3.11")
SUPPORTED_SGLANG = SpecifierSet(">=0.5.16,<0.5.24")
RUNTIME_REMEDY = "install the runtime: pip install 'sglang-winnow[runtime]'"
PROBE_TIMEOUT_SECONDS = 180

# Runs in a process of its own: the service's never imports torch or sglang.
_PROBE = "sglang_winnow.self_check"
_CPU_PLATFORM = "sglang_winnow.platform"
_TESTED_RELEASES = resources.files("winnow_service") / "tested_releases.json"
_KINDS = {
    "start": "each policy on a CPU",
    "cpu": "all on a CPU",
    "interpreted": "kernels in Triton's interpreter",
    "cuda": "CUDA",
}
"""What the record of tested releases calls its tests, and what they are called here."""


class Status(Enum):
    """A check's outcome; its value is the colour it is shown in."""

    OK = "green"
    OPTIONAL = "yellow"
    FAILED = "red"


@dataclass(frozen=True)
class Check:
    """One line of the report: what was found, what is supported, and what to do about a difference, if there is one."""

    name: str
    found: str
    supported: str
    remedy: str = ""
    optional: bool = False

    @property
    def status(self) -> Status:
        if not self.remedy:
            return Status.OK
        return Status.OPTIONAL if self.optional else Status.FAILED


class ProbeError(Exception):
    """The process that asks torch and SGLang about the device failed; the message is its last line."""


def doctor(
    runtime_url: Annotated[
        str | None,
        typer.Option(
            envvar="WINNOW_RUNTIME_URL",
            help="Also ask the runtime, or the balancer in front of several, whether requests reach it unchanged, and "
            "which policies it serves.",
        ),
    ] = None,
) -> None:
    """Show versions, device and plugins; exit with 1 if something required is missing or not supported."""
    console = Console()
    with console.status("Asking torch and SGLang about the device"):
        checks = [*package_checks(), *device_checks(), *program_checks()]
    if runtime_url is not None:
        with console.status("Asking the runtime"):
            checks += [upstream_check(runtime_url), policies_check(runtime_url)]
    console.print(_table(checks))
    failed = [check for check in checks if check.status is Status.FAILED]
    for check in failed:
        console.print(f"{check.name}: {check.remedy}", style=check.status.value, markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def package_checks() -> Iterator[Check]:
    """Check Python, this distribution, and SGLang with those of its requirements that matter here."""
    yield check_version("python", platform.python_version(), SUPPORTED_PYTHON, "use Python 3.11 or newer")
    yield check_package("sglang-winnow", SpecifierSet(), "pip install sglang-winnow")
    yield check_package("sglang", SUPPORTED_SGLANG, RUNTIME_REMEDY)
    wanted = sglang_requirements()
    for name in ("torch", "transformers", "flashinfer-python"):
        yield check_package(name, wanted.get(name, SpecifierSet()), RUNTIME_REMEDY)


def check_package(name: str, supported: SpecifierSet, remedy: str) -> Check:
    """Check the installed version of distribution ``name``; any version is supported by an empty specifier."""
    try:
        return check_version(name, version(name), supported, remedy)
    except PackageNotFoundError:
        return Check(name, "not installed", _shown(supported), remedy)


def check_version(name: str, found: str, supported: SpecifierSet, remedy: str) -> Check:
    """Check one version number."""
    is_supported = supported.contains(Version(found), prereleases=True)
    difference = "" if is_supported else f"{found} is outside {_shown(supported)}; {remedy}"
    return Check(name, found, _shown(supported), difference)


def sglang_requirements() -> dict[str, SpecifierSet]:
    """Return the versions that the installed SGLang asks for, by distribution; nothing if there is no SGLang."""
    try:
        requirements = [Requirement(line) for line in requires("sglang") or []]
    except PackageNotFoundError:
        return {}
    return {
        canonicalize_name(each.name): each.specifier
        for each in requirements
        if each.marker is None or each.marker.evaluate()
    }


def device_checks() -> Iterator[Check]:
    """Check the device that torch finds, the platform that SGLang would run on, and whether it takes Winnow's hooks."""
    try:
        facts = probe()
    except ProbeError as error:
        yield Check("device", "unknown", "CUDA or CPU", f"{error}; {RUNTIME_REMEDY}")
        return
    yield Check("device", str(facts["device"]), "CUDA or CPU")
    active = facts["platform"] == _CPU_PLATFORM
    remedy = f"SGLang chose {facts['platform']}; reinstall sglang-winnow and unset SGLANG_PLATFORM and SGLANG_PLUGINS"
    yield Check(
        "CPU platform plugin",
        "active" if active else "inactive",
        "inactive with CUDA" if facts["cuda"] else "active without CUDA",
        "" if active != facts["cuda"] else remedy,
    )
    problem = facts["problem"]
    found = "not in force" if problem else "in force"
    yield Check("hooks on SGLang", found, "in force, or the server does not start", str(problem or ""))
    try:
        release = version("sglang")
    except PackageNotFoundError:
        return
    yield tested_check(release, json.loads(_TESTED_RELEASES.read_text()), cuda=bool(facts["cuda"]))


def tested_check(release: str, releases: Mapping[str, Mapping[str, object]], *, cuda: bool) -> Check:
    """Check which of Winnow's tests ran with a release of SGLang.

    Args:
        release: the one that is installed.
        releases: the kinds of tests that passed, by release.
        cuda: whether there is a GPU, on which they should have run.
    """
    name = "tested with it"
    kinds = releases.get(Version(release).base_version, {})
    found = ", ".join(text for kind, text in _KINDS.items() if kind in kinds) or "nothing"
    if cuda and "cuda" not in kinds:
        on_gpus = ", ".join(release for release, of in releases.items() if "cuda" in of)
        remedy = (
            f"CUDA was tested with SGLang {on_gpus} alone" if on_gpus else "CUDA was tested with no release of SGLang"
        )
        return Check(name, found, "CUDA", remedy, optional=True)
    remedy = "" if kinds else f"tests ran with SGLang {', '.join(releases)}"
    return Check(name, found, "any tests", remedy, optional=True)


def probe() -> dict[str, object]:
    """Ask torch and SGLang, in a process of their own, for what ``sglang_winnow.self_check`` tells.

    Raises:
        ProbeError: the process failed, or took longer than ``PROBE_TIMEOUT_SECONDS``.
    """
    try:
        result = subprocess.run(
            module_command(_PROBE, []),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"no answer from torch and SGLang within {error.timeout:.0f} seconds") from error
    if result.returncode != 0:
        raise ProbeError((result.stderr.strip().splitlines() or ["no output"])[-1])
    facts: dict[str, object] = json.loads(result.stdout.strip().splitlines()[-1])
    return facts


def upstream_check(runtime_url: str) -> Check:
    """Check that requests reach the runtime at ``runtime_url`` with all their fields."""
    try:
        settings = Settings.model_validate({"runtime_url": runtime_url})
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
    else:
        verdict = asyncio.run(_ask_upstream(settings))
        problem = verdict.lost or ("" if verdict.certain else "no answer that tells: is it up, and without a key?")
    return Check("runtime", runtime_url, "passes all fields on", problem)


async def _ask_upstream(settings: Settings) -> FieldsVerdict:
    client = RuntimeClient(settings.runtime_url, "runtime", settings, None)
    try:
        return await check_fields(client, authorization(settings))
    finally:
        await client.close()


def policies_check(runtime_url: str) -> Check:
    """Check which decode policies the runtime at ``runtime_url`` serves: those that the presets ask for, at least."""

    def check(served: Collection[str], remedy: str) -> Check:
        return Check("policies", ", ".join(served) or "unknown", "those of the presets", remedy, optional=True)

    try:
        settings = Settings.model_validate({"runtime_url": runtime_url})
        model = asyncio.run(_ask_what_is_served(settings))
    except ValidationError as error:
        return check([], error.errors()[0]["msg"])
    except ServiceError as error:
        return check([], error.message)
    if model is None or set(model.policies) <= {"dense"}:
        return check(["dense"], "start the runtime with --attention-backend winnow")
    served = {"dense", *model.policies}
    asked = {name: preset.attention.decode.policy for name, preset in PRESETS.items()}
    remedies = []
    if refused := [name for name, policy in asked.items() if policy not in served]:
        remedies.append(f"refused: {', '.join(refused)}; set {setting_for([*model.policies, *asked.values()])}")
    verified = [name for name, preset in PRESETS.items() if preset.attention.verify is not None]
    if verified and not model.verifies:
        remedies.append(f"refused: {', '.join(verified)}; start the runtime with --speculative-algorithm {ALGORITHM}")
    return check(model.policies, ". ".join(remedies))


async def _ask_what_is_served(settings: Settings) -> ServedModel | None:
    client = RuntimeClient(settings.runtime_url, "runtime", settings, None)
    try:
        own = authorization(settings).get("authorization")
        return await ask_what_is_served(client, own, settings.readiness_timeout_seconds)
    finally:
        await client.close()


def program_checks() -> Iterator[Check]:
    """Look for the programs that the tests start; serving needs none of them."""
    for name in ("redis-server", "prometheus", "haproxy"):
        path = shutil.which(name)
        remedy = "" if path else f"apt-get install {name}"
        yield Check(name, path or "not found", "for the tests", remedy, optional=True)


def _shown(supported: SpecifierSet) -> str:
    return ", ".join(sorted(map(str, supported), reverse=True)) or "any"


def _table(checks: list[Check]) -> Table:
    table = Table("", "found", "supported", "")
    for check in checks:
        note = Text(check.remedy or "ok", style=check.status.value)
        table.add_row(*map(Text, (check.name, check.found, check.supported)), note)
    return table
