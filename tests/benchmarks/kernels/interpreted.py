"""Programs that Triton interprets, each in a process of its own: the variable is read when Triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_interpreted(program: str, **environment: str) -> Any:
    """Run a file beside this one, and return the JSON of its last line.

    Raises:
        AssertionError: it has failed.
    """
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program))],
        env=os.environ
        | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
