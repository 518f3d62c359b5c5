"""How a server is made to use one of the SGLang plugins that lie here, each in a folder of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class ServerPlugin:
    """A plugin in the folder that has its name.

    Attributes:
        name: by which SGLang knows it.
        notice: what the log of a server says that uses it.
    """

    name: str
    notice: str

    @property
    def folder(self) -> Path:
        return Path(__file__).parent / self.name

    def check_log(self, log: Path) -> None:
        """Raise RuntimeError if the server with this log does not use it: SGLang only logs that it failed."""
        if self.notice not in log.read_text(errors="replace"):
            raise RuntimeError(f"SGLang has not loaded the plugin {self.name}")


NOOP_ATTENTION: Final = ServerPlugin("noop_attention", "attention does nothing")
PEAKED_ATTENTION: Final = ServerPlugin("peaked_attention", "random weights attend to few tokens")
NATIVE_LAYERS: Final = ServerPlugin("native_layers", "norms and activations are torch's")
GAIN_SETTING: Final = "PEAKED_ATTENTION_GAIN"
"""The variable of the environment that has the gain of ``PEAKED_ATTENTION``."""
NOOP: Final = "no-op"
"""What records and tables call a server whose attention does nothing."""


def python_path(*plugins: ServerPlugin) -> str:
    """Return the ``PYTHONPATH`` with which SGLang finds ``plugins``."""
    return os.pathsep.join(filter(None, (*(str(each.folder) for each in plugins), os.environ.get("PYTHONPATH"))))
