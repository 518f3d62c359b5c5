"""Compiling a Triton kernel for Hopper (sm_90) without one, to see what it needs of a multiprocessor.

The compiler does not work in a process whose kernels are interpreted (TRITON_INTERPRET=1), so variants are compiled in
a process of their own, all of one call in the same one:

    [compiled] = compile_for_hopper([Variant("winnow_kernels.attend.gpu:_kernel", {"keys": "*bf16", …}, {"TILE": 64})])
    assert compiled.local_bytes == 0

Compiled kernels stay in Triton's cache, so a second call with the same sources takes no time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_LIMIT: Final = 227 * 1024
"""Bytes of shared memory that one program can have."""

Constant: TypeAlias = int | float | bool | str | None


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel.

    Attributes:
        kernel: ``module:name`` of the jitted function.
        types: Triton's type of each argument that is not a constant, by name: ``*bf16``, ``*i32``, ``i32``, ``fp32``.
            Pointers are taken to be aligned to 16 bytes, as those of whole tensors are.
        constants: values of the ``tl.constexpr`` arguments; also of integer arguments that are 1, which a launch
            specialises to.
        divisible: names of integer arguments that are multiples of 16, which a launch specialises to as well.
    """

    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Constant]
    divisible: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None


@dataclass(frozen=True)
class Compiled:
    """What a variant needs.

    Attributes:
        registers: per thread, at most 255.
        local_bytes: bytes of local memory per thread: spilled registers, and arrays that no register could hold.
        shared_bytes: per program.
        ptx: the assembly.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    ptx: str = field(repr=False)


def compile_for_hopper(variants: Sequence[Variant], timeout: float = 240) -> list[Compiled]:
    """Compile ``variants`` in a process of their own; what the compiler refuses raises, with its words."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([asdict(variant) for variant in variants]),
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
        timeout=timeout,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(process.stderr)
    return [Compiled(**compiled) for compiled in json.loads(process.stdout.splitlines()[-1])]


def _compile(variant: Variant) -> Compiled:
    module, name = variant.kernel.split(":")
    kernel: Any = getattr(import_module(module), name)
    names = kernel.arg_names
    aligned = [n for n in names if variant.types.get(n, "").startswith("*") or n in variant.divisible]
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in variant.constants else variant.types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in variant.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.maxnreg}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared, compiled.asm["ptx"])


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    [line] = [line for line in report.splitlines() if "REG:" in line]
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}


def main() -> None:
    """Compile the variants given as JSON on standard input."""
    variants = [Variant(**variant) for variant in json.load(sys.stdin)]
    json.dump([asdict(_compile(variant)) for variant in variants], sys.stdout)


if __name__ == "__main__":
    main()
