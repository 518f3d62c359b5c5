"""Winnow's attention backend of a model, which SGLang may have put beside one of its own."""

from __future__ import annotations

from typing import Any


def own_backend(runner: Any) -> Any:
    """Return the backend of ``runner`` that computes layers with full attention.

    Of models with linear attention SGLang's ``HybridLinearAttnBackend`` has it beside the one for the other layers.
    """
    backend = runner.attn_backend
    return getattr(backend, "full_attn_backend", backend)
