"""Kernels run on a GPU if there is one, else in Triton's interpreter, which takes over a whole process.

``make test`` runs these tests in a process of their own, with TRITON_INTERPRET=1. Elsewhere, without a GPU, they are
left out.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not (torch.cuda.is_available() or INTERPRETED):
    collect_ignore_glob = ["test_*.py"]


def _patch_once() -> None:
    """Let a launch alone put the interpreter's operations in place.

    Triton does it anew at each call of a jit function inside a kernel, which takes half the time.
    """
    patch = interpreter._patch_lang
    modules = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})

    def call(helper: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return helper.rewrite()(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda _kernel: patch(modules)
    interpreter.InterpretedFunction.__call__ = call


if INTERPRETED:
    _patch_once()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
