"""An SGLang plugin for benchmarks: attention that costs nothing, and so bounds what any attention can reach.

With this folder on ``PYTHONPATH``, ``--attention-backend torch_native`` writes keys and values to the cache as ever and
answers zeros. It takes the place of ``torch_native``, because SGLang knows by that name which backends launch neither
Triton kernels nor graphs.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

IN_PLACE: Final = "attention does nothing"

logger = logging.getLogger(__name__)


class NoopAttentionBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """``torch_native`` without the attention."""

    def _run_sdpa_forward_extend(self, _query: Any, output: Any, *_: Any, **__: Any) -> Any:
        return output.zero_()

    def _run_sdpa_forward_decode(self, _query: Any, output: Any, *_: Any, **__: Any) -> Any:
        return output.zero_()


def register() -> None:
    """Take the place of ``torch_native``; SGLang calls this in each of its processes."""
    ATTENTION_BACKENDS["torch_native"] = _create


def _create(runner: Any) -> NoopAttentionBackend:
    logger.warning(IN_PLACE)
    return NoopAttentionBackend(runner)
