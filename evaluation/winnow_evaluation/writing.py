"""Writing what was measured: records, tables, and the parts of documents that are made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write JSON to ``path``, whose folder is made if need be; what was there before is replaced at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def replaced_between(document: str, begin: str, end: str, text: str, name: str = "the document") -> str:
    """Return ``document`` with ``text`` between the marks ``begin`` and ``end``, in a paragraph of its own.

    Args:
        document: Markdown.
        begin: the mark before the text.
        end: the mark behind it.
        text: replaces what was there.
        name: what an error calls the document.

    Raises:
        ValueError: the document does not have both marks, once each and in this order.
    """
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        raise ValueError(f"{name} must hold {begin!r} and {end!r}, once each and in this order")
    before, after = document[: document.index(begin)], document[document.index(end) :]
    return f"{before}{begin}\n\n{text}\n\n{after}"


def number(value: float | None, form: str = ".3f") -> str:
    """Return a figure as a table has it; nothing if there is none."""
    return "" if value is None else format(value, form)


def percent(ratio: float | None) -> str:
    """Return a ratio in percent, without the sign; nothing if there is none."""
    return "" if ratio is None else f"{100 * ratio:.1f}"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], others: str = "---") -> str:
    """Return a table in Markdown; ``others`` aligns all columns but the first."""
    lines = [headings, ["---", *[others] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
