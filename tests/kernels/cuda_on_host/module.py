"""CUDA C++ on a CPU: the kernels' own source, compiled with the host's compiler over ``device.h``."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from winnow_kernels.cuda.module import DEVICE_SOURCE

COMPILER = shutil.which("g++")
SANITIZER = "WINNOW_CUDA_SANITIZER"
"""In the environment, the sanitizer whose library is loaded and that is to watch kernels: ``thread`` or ``address``."""
_DEVICE = Path(__file__).with_name("device.h")
_SANITIZERS = Path(__file__).with_name("sanitizers.h")
# A GPU refuses what lies across a boundary of its own size. CPUs do not care.
_TRAPS = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")


@dataclass(frozen=True)
class HostKernel:
    """A kernel that runs on the CPU, block by block."""

    function: Any

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        self.function(*grid, ctypes.byref(arguments))

    def blocks_at_once(self, device: torch.device) -> int:
        # So few that a block has parts of several pairs, and a pair several blocks.
        return 3


@cache
def loaded_on_host(source: str, names: tuple[tuple[str, int, int], ...], device: torch.device) -> dict[str, HostKernel]:
    """Return the kernels of ``source`` by name, as ``cuda.module.loaded`` does."""
    assert COMPILER is not None
    source = source.replace(DEVICE_SOURCE.read_text(), _SANITIZERS.read_text() + _DEVICE.read_text())
    source += "".join(
        f'\nextern "C" void run_{name}(int x, int y, const Arguments* all)'
        f" {{ host::run(x, y, {threads}, {shared_bytes}, [all] {{ {name}(*all); }}); }}\n"
        for name, threads, shared_bytes in names
    )
    sanitizer = os.environ.get(SANITIZER)
    watched = () if sanitizer is None else (f"-fsanitize={sanitizer}", "-g")
    folder = Path(mkdtemp(prefix="winnow-cuda-on-host-"))
    try:
        name = hashlib.sha256(source.encode()).hexdigest()[:16]
        file, library = folder / f"{name}.cpp", folder / f"{name}.so"
        file.write_text(source)
        options = ("-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-w", *_TRAPS, *watched)
        subprocess.run([COMPILER, *options, "-o", library, file], check=True)
        functions = ctypes.CDLL(str(library))
    finally:
        if sanitizer:
            # Lines that it tells of are looked up there.
            atexit.register(shutil.rmtree, folder)
        else:
            shutil.rmtree(folder)
    return {name: HostKernel(getattr(functions, f"run_{name}")) for name, _, _ in names}
