"""What the two commands share: progress as lines ``DONE TOTAL`` on standard output, and errors in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

Report = Callable[[int, int], None]


def run(out: Path, write: Callable[[Report], None]) -> None:
    """Call ``write`` with a function that reports progress; end with status 1 and one sentence if it fails."""
    if out.exists() and any(out.iterdir()):
        sys.exit(f"error: {out} is not empty")
    try:
        write(_report)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def _report(done: int, total: int) -> None:
    sys.stdout.write(f"{done} {total}\n")
    sys.stdout.flush()
