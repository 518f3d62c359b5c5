"""Triton's interpreter, without what it repeats, and with constants that hold tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def patch_once() -> None:
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

    to_tensor = TritonSemantic.to_tensor

    def unwrap(semantic: TritonSemantic[Any], value: Any, *arguments: Any, **named: Any) -> Any:
        # Interpreted, a constant's sum with a tensor is a constant that holds a tensor, which Triton 3.8 does not take.
        value = value.value if isinstance(value, triton.language.constexpr) else value
        return to_tensor(semantic, value, *arguments, **named)

    TritonSemantic.to_tensor = unwrap
    interpreter._patch_lang = lambda _kernel: patch(modules)
    interpreter.InterpretedFunction.__call__ = call
