"""SGLang's own attention backend, which on CUDA computes what is dense: which one, and what it knows of models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import torch

from sglang_winnow.backend_name import NAME
from sglang_winnow.sglang_versions.arguments import default_attention_backend
from sglang_winnow.softmaxes import has_sinks

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

DENSE_ENVIRONMENT: Final = "WINNOW_DENSE_BACKEND"
TRITON: Final = "triton"
_HOPPER: Final = 9
FA3: Final = "fa3"
WITH_WINDOWS: Final = (FA3, TRITON)
"""SGLang's backends that see no further than a window: within the chunk that it prefills, FlashInfer's sees all."""
WITH_CAPS_AND_SINKS: Final = (FA3, TRITON)
"""Those that bound scores, and take sink logits.

FlashInfer's takes no sinks. A cap it is told when it attends, after its kernels were chosen without one.
"""


def mend_windows(dense: AttentionBackend, name: str) -> None:
    """Have the dense backend ``name`` see in a layer with a window what the model says, before graphs are captured.

    Triton's takes the token itself for one of those before it when it decodes, so that it misses the oldest; when it
    prefills, its kernel masks what is one too many. It also takes the layers of Gemma 3 for bidirectional if a server
    has neither graphs nor chunks: those of the model with images are, and it is refused.
    """
    if name == TRITON:
        dense.sliding_window_size += 1
        dense.allow_bidirectional_attention_in_extend = False


def dense_backend(runner: ModelRunner) -> str:
    """Return the name of the backend for dense batches: ``WINNOW_DENSE_BACKEND``, or SGLang's own choice."""
    if name := os.environ.get(DENSE_ENVIRONMENT):
        return name
    if has_sinks(runner.model_config):
        # What SGLang chooses for gpt-oss; its own choice for other models may take no sinks.
        return FA3 if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == _HOPPER else TRITON
    choice = default_attention_backend(runner.server_args, runner.model_config)
    # Winnow's own platform for CPUs knows no other: there, Triton's interpreter is tested.
    return "torch_native" if choice == NAME else choice
