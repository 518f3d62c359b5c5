"""Writing down on which releases of SGLang the tests passed: ``service/winnow_service/tested_releases.json``."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

RECORD: Final = Path(__file__).parents[1] / "service/winnow_service/tested_releases.json"
KINDS: Final = ("start", "cpu", "interpreted", "cuda")
"""What was tested: that a server starts on a CPU and answers each policy; everything on a CPU; kernels in Triton's
interpreter; a GPU."""


def note_tested(kind: str, tests: int, commit: str | None, record: Path = RECORD) -> None:
    """Note that ``tests`` tests of ``kind`` passed on the installed SGLang, today."""
    releases: dict[str, dict[str, Any]] = json.loads(record.read_text()) if record.exists() else {}
    today = datetime.now(UTC).date().isoformat()
    entry = {"date": today, "commit": commit, "torch": version("torch"), "tests": tests}
    releases.setdefault(version("sglang"), {})[kind] = entry
    in_order = sorted(releases.items(), key=lambda item: Version(item[0]))
    kinds = {release: {name: of[name] for name in KINDS if name in of} for release, of in in_order}
    record.write_text(json.dumps(kinds, indent=2) + "\n")
