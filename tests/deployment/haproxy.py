"""What HAProxy says of its configuration."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def check_haproxy(
    files: Mapping[str, str], command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> None:
    """Check that ``command`` would start with ``files``, which it finds in /etc/haproxy."""
    for name, content in files.items():
        (folder / name).write_text(content)
    given = [argument.replace("/etc/haproxy", str(folder)) for argument in command]
    checked = subprocess.run(
        [*given, "-c"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert "[WARNING]" not in checked.stderr
