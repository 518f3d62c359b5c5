"""What docs/architecture.md names exists: files, functions, rooms, import contracts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.deployment.repository import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
SERVICE = ROOT / "service/winnow_service"
ROOTS = (ROOT, ROOT / "kernels", SERVICE, SERVICE / "proxy")
SOURCE_ROOTS = ("kernels", "sglang_ext", "service", "evaluation")
MAX_STEPS = 25
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)?")
# A file and, behind a colon, what is in it.
PLACED = re.compile(r"`([\w/]+\.py)`:((?:\s+`[\w.]+`,?)+)")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def spans() -> set[str]:
    """All that the page sets in code type."""
    return set(re.findall(r"`([^`\n]+)`", PAGE))


def exists(path: str) -> bool:
    """Whether there is such a file, folder or module."""
    return any((root / name).exists() for root in ROOTS for name in (path, f"{path}.py"))


@cache
def sources() -> list[str]:
    return [path.read_text() for root in SOURCE_ROOTS for path in (ROOT / root).rglob("*.py")]


def defines(source: str, name: str) -> bool:
    """Whether ``source`` has a class or function of that name, or a class with a method of it."""
    holder, _, method = name.rpartition(".")
    if holder:
        body = re.search(rf"^class {holder}\b.*?(?=^\S|\Z)", source, re.M | re.S)
        return body is not None and re.search(rf"^    (?:async )?def {method}\b", body[0], re.M) is not None
    return re.search(rf"^ *(?:class|def|async def) {method}\b", source, re.M) is not None


def placed() -> Iterator[tuple[str, str]]:
    for path, names in PLACED.findall(PAGE):
        for name in re.findall(r"`([\w.]+)`", names):
            yield path, name


@pytest.mark.parametrize(("path", "name"), sorted(set(placed())))
def test_a_named_file_has_what_the_page_finds_in_it(path: str, name: str) -> None:
    assert defines((SERVICE / path).read_text(), name)


def test_every_path_exists() -> None:
    paths = {span for span in spans() if PATH.fullmatch(span) and ("/" in span or span.endswith((".py", ".toml")))}
    assert len(paths) > 30
    assert [path for path in sorted(paths) if not exists(path)] == []


def test_every_other_name_is_that_of_something() -> None:
    commands = {"winnow", "lint-imports"}
    names = {span for span in spans() if NAME.fullmatch(span) and not exists(span)} - commands
    assert len(names) > 30
    assert [name for name in sorted(names) if not any(defines(source, name) for source in sources())] == []


@pytest.mark.parametrize("line", ["proxy/gone.py", "service/winnow_service/gone"])
def test_a_path_that_is_gone_is_seen(line: str) -> None:
    assert PATH.fullmatch(line)
    assert not exists(line)


def test_a_name_that_is_gone_is_seen() -> None:
    source = "class A:\n    def b(self) -> None: ...\n\n\nasync def c() -> None: ...\n"
    assert all(defines(source, name) for name in ("A", "A.b", "b", "c"))
    assert not any(defines(source, name) for name in ("B", "A.c", "d"))


def test_every_room_of_the_service_is_on_the_map() -> None:
    rooms = {path.parent.name for path in SERVICE.glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `(\w+)/` \|", section("The map"), re.M))


def test_the_way_is_short_and_counted_on() -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section("The way of a request"), re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) <= MAX_STEPS


def contracts() -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    return read


def layers(contract: dict[str, Any]) -> list[str]:
    """The layers of a contract as the page has them, the highest first."""
    return [
        ", ".join(f"`{name.strip().removeprefix('winnow_service.')}`" for name in re.split("[|:]", line))
        for line in contract["layers"]
    ]


def test_every_import_contract_is_listed() -> None:
    listed = re.findall(r"^- (.+)\.$", section("What may import what"), re.M)
    assert listed == [contract["name"] for contract in contracts()]


def test_the_layers_are_those_of_the_contracts() -> None:
    listed = re.findall(r"^\d+\. (.+)$", section("What may import what"), re.M)
    assert listed == [line for contract in contracts() if contract["type"] == "layers" for line in layers(contract)]
