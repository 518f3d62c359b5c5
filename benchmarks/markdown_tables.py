"""How the documentation's tables word figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def interval(mean: float | None, low: float | None, high: float | None) -> str:
    """Return a difference with its interval; nothing if there is none."""
    return "" if mean is None else f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def in_thousands(tokens: int) -> str:
    """Return a number of tokens as it is said: 32K for 32,768, 96K for 96,000."""
    if tokens < 1000:
        return str(tokens)
    return f"{tokens // (1000 if tokens % 1024 else 1024)}K"


def commit_of(commit: Mapping[str, Any] | None) -> str:
    """Return which commit a record was made with."""
    if not commit:
        return "commit unknown"
    return f"commit {commit['id'][:8]}{' with changes' if commit['modified'] else ''}"
