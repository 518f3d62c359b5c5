"""Models with linear attention in most layers: which are served on CUDA, and with which arguments of SGLang's.

SGLang runs these layers beside the attention backend, from states that it keeps for each request. Policies act on the
other layers, which have keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch

from sglang_winnow.attention_registration import PAGE_SIZE
from sglang_winnow.sglang_versions.arguments import decide, resolved, verifies_drafts
from sglang_winnow.sglang_versions.releases import LINEAR_ATTENTION_ON_CUDA, OLDEST
from winnow_kernels.contract.verification import ALGORITHM

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

SERVED: Final = frozenset(
    {"Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
)
ON_CPU: Final = "models with linear attention on a CPU: SGLang itself cannot run these layers there"
_TRACKED: Final = "extra_buffer"
"""How SGLang keeps states for its radix cache: copies at some positions, for pages of any size."""
_IN_TRITON: Final = "triton"
"""SGLang's kernels for linear attention with which it can keep states so."""
_BLACKWELL: Final = 10


def has_linear_attention(config: ModelConfig) -> bool:
    """Return whether SGLang keeps states beside keys and values for the model."""
    # What it imports waits for SGLang to have chosen its platform.
    from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: PLC0415

    return mambaish_config(config) is not None


def reasons(arguments: ServerArgs, config: ModelConfig) -> Iterator[str]:
    """Yield what a server of a model with linear attention is refused for, before SGLang loads it."""
    if not torch.cuda.is_available():
        yield ON_CPU
        return
    if not LINEAR_ATTENTION_ON_CUDA:
        yield f"linear attention on CUDA with this SGLang (use {OLDEST})"
    if SERVED.isdisjoint(config.hf_config.architectures):
        named = ", ".join(config.hf_config.architectures)
        yield f"linear attention of other models than Qwen3-Next and Qwen3.5 ({named})"
    if torch.cuda.get_device_capability()[0] >= _BLACKWELL:
        yield "linear attention on Blackwell GPUs, where SGLang takes its own backends alone"
    of = resolved(arguments)
    if verifies_drafts(of):
        yield f"--speculative-algorithm {ALGORITHM} with linear attention: states cannot go back to before a draft"
    if of.disable_radix_cache:
        return
    if (strategy := of.mamba_radix_cache_strategy) not in ("auto", _TRACKED):
        yield f"--mamba-radix-cache-strategy {strategy} (use {_TRACKED})"
    if (kernels := of.linear_attn_backend) != _IN_TRITON:
        yield f"--linear-attn-backend {kernels} beside a radix cache (use {_IN_TRITON}, or --disable-radix-cache)"


def decide_arguments(arguments: ServerArgs) -> None:
    """Decide what SGLang chooses the way by in which it keeps states, before it does."""
    of = resolved(arguments)
    decide(
        arguments,
        page_size=PAGE_SIZE if of.page_size in (None, 1) else of.page_size,
        mamba_radix_cache_strategy=of.mamba_radix_cache_strategy if of.disable_radix_cache else _TRACKED,
    )
