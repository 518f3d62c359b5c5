"""The audit of the dependencies: what it finds, and that it does not call clean what it has not seen."""

from __future__ import annotations

import json
from email.message import EmailMessage
from importlib.metadata import Distribution, PackageMetadata
from pathlib import Path
from typing import cast

import pytest
from typer import Typer
from typer.testing import CliRunner

from scripts import audit_dependencies as audit

CLEAN = {"name": "idna", "version": "3.20", "vulns": []}
VULNERABLE = {"name": "h11", "version": "0.1", "vulns": [{"id": "GHSA-1", "fix_versions": ["0.16"]}]}


class Package(Distribution):
    """A package with a name and metadata of its own."""

    def __init__(self, **headers: str) -> None:
        self._headers = {"Name": "some-package", **headers}

    @property
    def metadata(self) -> PackageMetadata:
        message = EmailMessage()
        for name, value in self._headers.items():
            message[name] = value
        return cast(PackageMetadata, message)

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


@pytest.mark.parametrize("report", ["", "no json", "[]", "{}", "null"])
def test_without_a_report_nothing_is_called_clean(report: str) -> None:
    assert audit.advisories(report).unchecked == ["known vulnerabilities of all packages"]


def test_a_package_that_was_passed_over_is_not_called_clean() -> None:
    report = {"dependencies": [CLEAN, {"name": "torch", "skip_reason": "not found"}]}
    found = audit.advisories(json.dumps(report))
    assert (found.problems, found.unchecked) == ([], ["known vulnerabilities of torch"])


def test_a_known_vulnerability_is_a_problem() -> None:
    found = audit.advisories(json.dumps({"dependencies": [CLEAN, VULNERABLE]}))
    assert (found.problems, found.unchecked) == (["h11 0.1: GHSA-1, fixed in 0.16"], [])


def test_another_version_than_that_pinned_is_a_problem() -> None:
    pinned = audit.pins("# comment\nfastapi==1.0\nhttpx==2.0\n")
    assert audit.agreement({"fastapi": "1.0", "pip": "9"}, pinned) == []
    assert audit.agreement({"fastapi": "1.1"}, pinned) == ["fastapi 1.1 is installed, 1.0 is pinned"]


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({"License-Expression": "BSD-3-Clause"}, True),
        ({"License-Expression": "MIT AND Python-2.0"}, True),
        ({"Classifier": "License :: OSI Approved :: Apache Software License"}, True),
        ({"License": "MIT License"}, True),
        ({"License": "UNLIMITED"}, False),
        ({"License-Expression": "AGPL-3.0-only"}, False),
        ({}, False),
    ],
)
def test_licences_are_read_from_where_packages_say_them(headers: dict[str, str], is_allowed: bool) -> None:
    assert (audit.licences([Package(**headers)]) == []) is is_allowed


def test_the_service_is_shipped_with_what_its_image_has() -> None:
    names = {each.name.lower() for each in audit.shipped()}
    assert {"fastapi", "starlette", "h11", "opentelemetry-sdk"} <= names
    assert not names & {"torch", "sglang", "pytest", "locust"}
    assert audit.licences(audit.shipped()) == []


@pytest.mark.parametrize(
    ("report", "arguments", "status"),
    [
        ("", [], 0),
        ("", ["--require-advisories"], 1),
        (json.dumps({"dependencies": [CLEAN]}), ["--require-advisories"], 0),
        (json.dumps({"dependencies": [VULNERABLE]}), [], 1),
    ],
)
def test_the_exit_status_says_whether_all_is_well(
    report: str, arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_pip_audit", lambda: report)
    app = Typer()
    app.command()(audit.main)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, done.output
    assert ("NOT CHECKED" in done.output) == (not report)
