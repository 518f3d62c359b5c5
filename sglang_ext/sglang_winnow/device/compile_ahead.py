"""Compiling Triton kernels before they are launched, several at a time: one after another they take minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

# More would wait for each other: a part of the compiler holds Python's lock.
_MAX_AT_ONCE: Final = 8


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Within, a launch of a kernel has it compiled, if need be, and runs nothing; at the end all are compiled.

    Kernels that are interpreted are launched as ever.
    """
    if knobs.runtime.interpret:
        yield
        return
    launch = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        return launch(kernel, *arguments, grid=grid, warmup=True, **options)

    threads = min(_MAX_AT_ONCE, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch
