"""Where benchmarks find and leave things."""

from __future__ import annotations

from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = REPOSITORY / "benchmarks" / "results"
"""Where records are kept."""
PLOTS: Final = REPOSITORY / "docs" / "benchmarks"
