"""Words that the project once had for what the field has a word for: they do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deployment.repository import ROOT

SOURCE_ROOTS = ("kernels", "sglang_ext", "service", "evaluation", "benchmarks", "models")
FIELD_WORDS = {
    r"\b_?MOST_[A-Z]": "MAX_",
    r"\b_?LEAST_[A-Z]": "MIN_",
    r"(?i)speakers?\b": "representative queries",
    r"\bStanding\b": "quota status",
    r"\bTrial\b": "breaker permit",
    r"\b(class|import) Place\b": "queue ticket",
    r"\b(class|import) Members\b": "endpoints",
    r"\bFAMILIES\b": "policy kinds",
}


def places(pattern: str, paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize(("pattern", "field"), FIELD_WORDS.items())
def test_the_field_has_a_word_for_it(pattern: str, field: str) -> None:
    sources = [path for root in SOURCE_ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert len(sources) > 100
    assert len(documents) > 10
    assert places(pattern, sources + documents) == [], f"say {field}"
