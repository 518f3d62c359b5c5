"""The CPU platform: SGLang from a plain ``pip install``, on any x86-64 or ARM CPU.

SGLang's own CPU engine needs AMX and a CPU build of sglang-kernel. An out-of-tree platform takes SGLang down its
portable paths instead: every operator runs its torch implementation, and the platform supplies the parts that
otherwise launch Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.server_args import ServerArgs

    from sglang_winnow.allocator import TorchPagedAllocator

ATTENTION_BACKEND = "winnow"

# Measured without AMX: as fast as bfloat16 in prefill, several times as fast in decode.
DTYPE = "float32"

DEFAULTS: Final[dict[str, int | float | str]] = {
    "page_size": 16,
    # Other requests decode between the chunks of a long prompt.
    "chunked_prefill_size": 2048,
    # SGLang's own rule reserves 1.5 MiB for every token of a chunk, sized for GPUs.
    "mem_fraction_static": 0.8,
    "max_total_tokens": 131_072,
    # SGLang's own rule gives thousands of rows of a full context's length each.
    "max_running_requests": 64,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
}


def activate() -> str | None:
    """Return the platform class's dotted name, or ``None`` where SGLang's own CUDA or ROCm platform should serve."""
    if torch.cuda.is_available():
        return None
    return f"{CpuPlatform.__module__}.{CpuPlatform.__qualname__}"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU serving with pages of 16 tokens and attention in torch.

    SGLang resolves its platform while the modules of its pools and allocators are still being imported: the methods
    that return such classes import them.
    """

    # SGLang asks the platform for its allocator and backend only if it is out of tree; ``PlatformEnum.CPU`` would send
    # it to the AMX kernels.
    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = 0) -> str:
        """Return the device's name; SGLang's detection of the device splits it as a string."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Fill in what the command line left open; what it says is kept."""
        server_args.device = "cpu"
        # A scheduler that polls takes a core from the requests.
        server_args.sleep_on_idle = True
        # SGLang has by now chosen its AMX backend where none was asked for; a plain installation does not have it.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.attention_backend == ATTENTION_BACKEND:
            # Windowed layers have no pool of their own.
            server_args.disable_hybrid_swa_memory = True
        if server_args.dtype == "auto":
            server_args.dtype = DTYPE
        for name, value in DEFAULTS.items():
            if getattr(server_args, name) is None:
                setattr(server_args, name, value)

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> None:
        """Leave the pool to SGLang, from 0.5.22 on; it warns of platforms with only the method that was before."""

    def get_mha_kv_pool_cls(self) -> type[MHATokenToKVPool]:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type[TorchPagedAllocator]:
        from sglang_winnow.allocator import TorchPagedAllocator  # noqa: PLC0415

        return TorchPagedAllocator
