"""The commands and files of benchmarks that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.folders import REPOSITORY

DOCUMENTS = [
    REPOSITORY / "README.md",
    REPOSITORY / "benchmarks" / "NOTES.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
# Modules of commands and in text, and paths below the repository's root.
_NAMED = re.compile(r"(?:python -m |`)(benchmarks(?:\.\w+)+)|(?<![\w./])(benchmarks/[\w./-]*\w)")


def named_in(text: str) -> list[Path]:
    found = []
    for module, path in _NAMED.findall(text):
        found.append(REPOSITORY / (path or f"{module.replace('.', '/')}.py"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(document: Path) -> None:
    text = document.read_text()
    # Links are relative to the document, and have a test of their own.
    text = re.sub(r"\]\([^)]*\)", "]", text)
    assert [str(path.relative_to(REPOSITORY)) for path in named_in(text) if not path.exists()] == []


def test_names_are_found() -> None:
    text = "`python -m benchmarks.a.b run` and `benchmarks.c`, as in `benchmarks/d/e.py`, not kernels/benchmarks/f.py."
    assert [str(path.relative_to(REPOSITORY)) for path in named_in(text)] == [
        "benchmarks/a/b.py",
        "benchmarks/c.py",
        "benchmarks/d/e.py",
    ]
