"""Compiling a Triton kernel for Hopper (sm_90) without one, to see what it needs of a multiprocessor.

The compiler does not work in a process whose kernels are interpreted (TRITON_INTERPRET=1), so variants are compiled in
a process of their own, all of one call in the same one: those that a function launches,

    [compiled] = compile_launches(launch, 128)
    assert compiled.local_bytes == 0

or those of which the types are written down:

    [compiled] = compile_for_hopper([Variant("winnow_kernels.attend.gpu:_kernel", {"keys": "*bf16", …}, {"TILE": 64})])

Compiled kernels stay in Triton's cache, so a second call with the same sources takes no time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

SHARED_LIMIT: Final = 227 * 1024
"""Bytes of shared memory that one program can have."""
SPARE_BYTES: Final = 16
"""What a release of Triton's compiler may put aside for a thread where another does not: a few registers."""

_HOPPER: Final = GPUTarget("cuda", 90, 32)
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
        kernel: ``module:name``.
        warps: of a program.
        registers: per thread, at most 255.
        local_bytes: bytes of local memory per thread: spilled registers, and arrays that no register could hold.
        shared_bytes: per program.
        ptx: the assembly.
    """

    kernel: str
    warps: int
    registers: int
    local_bytes: int
    shared_bytes: int
    ptx: str = field(repr=False)


def compile_launches(launch: Callable[..., None], *arguments: Constant, timeout: float = 240) -> list[Compiled]:
    """Call ``launch``, a module's function, in a process of its own that compiles kernels in place of launching them.

    Its tensors, on the CPU, may be as large as on a GPU: nobody reads those of ``torch.empty``.
    """
    return _run({"launch": f"{launch.__module__}:{launch.__name__}", "arguments": arguments}, timeout)


def compile_for_hopper(variants: Sequence[Variant], timeout: float = 240) -> list[Compiled]:
    """Compile ``variants`` in a process of their own; what the compiler refuses raises, with its words."""
    return _run({"variants": [asdict(variant) for variant in variants]}, timeout)


def _run(wanted: Mapping[str, Any], timeout: float) -> list[Compiled]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(wanted),
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


class _Hopper:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return _HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def _compile_launches(launch: str, arguments: Sequence[Constant]) -> list[Compiled]:
    compiled = []

    def compile_in_place(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        name = f"{kernel.module}:{kernel.fn.__name__}"
        return lambda *args, **kwargs: compiled.append(
            _compiled(name, kernel.run(*args, grid=grid, warmup=True, **kwargs))
        )

    # What a module asks of the driver when it is imported, it asks the real one.
    function = _named(launch)
    driver.set_active(_Hopper())
    triton.JITFunction.__getitem__ = compile_in_place
    function(*arguments)
    return compiled


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _compile(variant: Variant) -> Compiled:
    kernel = _named(variant.kernel)
    names = kernel.arg_names
    aligned = [n for n in names if variant.types.get(n, "").startswith("*") or n in variant.divisible]
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in variant.constants else variant.types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in variant.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.maxnreg}
    return _compiled(variant.kernel, triton.compile(source, target=_HOPPER, options=options))


def _compiled(name: str, kernel: Any) -> Compiled:
    usage = _resource_usage(kernel.asm["cubin"])
    return Compiled(
        name,
        kernel.metadata.num_warps,
        usage["REG"],
        usage["STACK"] + usage["LOCAL"],
        kernel.metadata.shared,
        kernel.asm["ptx"],
    )


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
    """Compile what is given as JSON on standard input."""
    wanted = json.load(sys.stdin)
    if "launch" in wanted:
        compiled = _compile_launches(**wanted)
    else:
        compiled = [_compile(Variant(**variant)) for variant in wanted["variants"]]
    json.dump([asdict(each) for each in compiled], sys.stdout)


if __name__ == "__main__":
    main()
