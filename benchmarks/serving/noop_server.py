"""How a server is made to use the SGLang plugin ``noop_attention``, whose attention does nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "noop_attention"
PLUGIN: Final = "noop_attention"
NOOP: Final = "no-op"
"""What records and tables call such a server."""
NOTICE: Final = "attention does nothing"
"""What the log of a server says that uses it."""


def python_path() -> str:
    """Return the ``PYTHONPATH`` with which SGLang finds the plugin."""
    return os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))


def check_log(log: Path) -> None:
    """Raise RuntimeError if the server with this log does not use the plugin: SGLang only logs that it failed."""
    if NOTICE not in log.read_text(errors="replace"):
        raise RuntimeError("SGLang has not loaded the plugin whose attention does nothing")
