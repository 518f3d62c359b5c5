"""Compiling CUDA C++ with NVRTC, which comes with torch, and launching it on torch's stream.

No compiler has to be installed, and nothing is written to a disk: a module takes a second or two when a server starts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from cuda.bindings import driver, nvrtc

DEVICE_SOURCE: Final = Path(__file__).with_name("device.cuh")
_TYPES: Final = Path(__file__).with_name("types.cuh")
_WARP: Final = Path(__file__).with_name("warp.cuh")
_CAPABILITY: Final = (9, 0)


def source_of(*files: Path, macros: Mapping[str, object]) -> str:
    """Return one source: what kernels use of a GPU and of a warp, the macros, and the files in order."""
    defined = "\n".join(f"#define {name} {value}" for name, value in macros.items())
    shared = (_TYPES, DEVICE_SOURCE, _WARP)
    return "\n".join([*(file.read_text() for file in shared), defined, *(file.read_text() for file in files)])


def runs_on(device: torch.device) -> bool:
    """Return whether ``device`` has the instructions that kernels use: those of Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


class Launchable(Protocol):
    """A kernel on a device."""

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        """Launch it on torch's current stream; a CUDA graph may be capturing there.

        It may begin when the last kernel lets it, and then has to wait (``wait_for_last_kernel``) before it reads what
        that one writes.

        Args:
            grid: blocks in both dimensions.
            arguments: the kernel's only one.
        """

    def blocks_at_once(self, device: torch.device) -> int:
        """Return how many blocks the device runs at a time."""


class Load(Protocol):
    """What loads kernels: ``loaded``, or what takes its place where there is no GPU."""

    def __call__(
        self, source: str, names: tuple[tuple[str, int, int], ...], device: torch.device
    ) -> Mapping[str, Launchable]: ...


@dataclass(frozen=True)
class Kernel:
    """A kernel on one device.

    Attributes:
        function: its handle.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    function: Any
    threads: int
    shared_bytes: int

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [early], 1
        _check(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))

    def blocks_at_once(self, device: torch.device) -> int:
        of_multiprocessor = _check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, self.threads, self.shared_bytes)
        )
        return torch.cuda.get_device_properties(device).multi_processor_count * int(of_multiprocessor)


def compiled(source: str, architecture: str) -> bytes:
    """Return the machine code of ``source`` for an architecture such as ``sm_90``; needs no GPU.

    Raises:
        RuntimeError: the compiler refuses it; with its words.
    """
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"--extra-device-vectorization"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC: {log.decode(errors='replace')}")
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    return code


@cache
def loaded(source: str, names: tuple[tuple[str, int, int], ...], device: torch.device) -> dict[str, Kernel]:
    """Return the kernels of ``source`` by name, on ``device``.

    Args:
        source: all of it (``source_of``).
        names: of the kernels, with the threads and the dynamic shared bytes of their blocks.
        device: whose context torch has made.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        major, minor = torch.cuda.get_device_capability(device)
        # A module outlives its last launch: it is never unloaded.
        module = _check(driver.cuModuleLoadData(compiled(source, f"sm_{major}{minor}")))
        kernels = {}
        for name, threads, shared_bytes in names:
            function = _check(driver.cuModuleGetFunction(module, name.encode()))
            attribute = driver.CUfunction_attribute
            _check(
                driver.cuFuncSetAttribute(
                    function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
                )
            )
            # Unasked, a multiprocessor may be left with room for one block alone.
            _check(
                driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            )
            kernels[name] = Kernel(function, threads, shared_bytes)
        return kernels


def _check(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None
