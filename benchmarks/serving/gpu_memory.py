"""How much memory of a GPU is in use, as its driver tells."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Self

import pynvml  # type: ignore[import-untyped]

_PERIOD_SECONDS: Final = 0.02


class PeakMemory:
    """Watches while the block runs, from a thread of its own. Use it as a context manager.

    Attributes:
        bytes: most that were in use at once, by all processes, on the fullest of the GPUs that this process may use
            (``CUDA_VISIBLE_DEVICES``); None where there is no GPU.
    """

    def __init__(self, used: Callable[[], int | None] | None = None) -> None:
        """``used`` returns what is in use now; by default what NVIDIA's driver says."""
        self.bytes: int | None = None
        self._used = used or used_bytes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._look()
        if self.bytes is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bytes is not None:
            self._done.set()
            self._thread.join()
            self._look()

    def _watch(self) -> None:
        while not self._done.wait(_PERIOD_SECONDS):
            self._look()

    def _look(self) -> None:
        now = self._used()
        if now is not None:
            self.bytes = max(now, self.bytes or 0)


def used_bytes() -> int | None:
    """Return the bytes in use on the fullest of the visible GPUs; None if there is none, or no driver of NVIDIA's."""
    return max((int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in _gpus()), default=None)


@cache
def _gpus() -> list[Any]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = range(pynvml.nvmlDeviceGetCount()) if visible is None else filter(None, visible.split(","))
    return [_gpu_named(str(name)) for name in names]


def _gpu_named(name: str) -> Any:
    # The driver goes by numbers of its own, whatever is visible; so does the variable.
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
