"""Triton's interpreter, without what it repeats, and with constants that hold tensors and numbers of bfloat16."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


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
    _compute_with_bfloat16()


def _compute_with_bfloat16() -> None:
    """Let products and conversions take the bits of bfloat16 as the numbers that they are, and round to the nearest."""
    cast, multiply = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    bfloat16, float32 = triton.language.bfloat16, triton.language.float32

    def cast_exactly(builder: Any, source: Any, target: Any) -> Any:
        if bfloat16 not in (source.dtype.scalar, target.scalar) or source.dtype.scalar == target.scalar:
            return cast(builder, source, target)
        if source.dtype.scalar == bfloat16:
            return cast(builder, _widened(source), target)
        wide = torch.from_numpy(np.ascontiguousarray(cast(builder, source, float32).data))
        return TensorHandle(wide.bfloat16().view(torch.uint16).numpy(), bfloat16)

    def multiply_exactly(builder: Any, first: Any, second: Any, *others: Any) -> Any:
        return multiply(builder, _widened(first), _widened(second), *others)

    def _widened(numbers: Any) -> Any:
        if numbers.dtype.scalar != bfloat16:
            return numbers
        return TensorHandle((numbers.data.astype(np.uint32) << 16).view(np.float32), float32)

    InterpreterBuilder.cast_impl = cast_exactly
    InterpreterBuilder.create_dot = multiply_exactly
