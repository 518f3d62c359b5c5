"""Making SGLang know the attention backend, and the batch known to the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import add_attention_backend_choices

from sglang_winnow.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


NAME: Final = "winnow"


def register_backend() -> None:
    """Register ``--attention-backend winnow``; once is enough."""
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(_create)
        add_attention_backend_choices([NAME])


def _create(runner: ModelRunner) -> AttentionBackend:
    # What it imports is not needed in processes without a model.
    from sglang_winnow.attention_backend import WinnowAttentionBackend  # noqa: PLC0415

    backend: AttentionBackend = WinnowAttentionBackend(runner)
    return backend


def _note_slots(_batch: ForwardBatch, _class: type, batch: ScheduleBatch, model_runner: ModelRunner, **_: Any) -> None:
    if model_runner.server_args.attention_backend == NAME and batch.reqs:
        model_runner.attn_backend.requests.begin(batch.reqs)


def _without_graphs(_nothing: None, arguments: ServerArgs) -> None:
    # As SGLang does for its own backends in torch. It fills in the platform's default before this runs.
    if arguments.attention_backend == NAME:
        arguments.cuda_graph_config.decode.backend = Backend.DISABLED
        arguments.cuda_graph_config.prefill.backend = Backend.DISABLED


def _without_triton(supports: Any, backend: str) -> bool:
    # SGLang takes every backend that it does not know for one whose device launches Triton kernels.
    return bool(supports(backend)) and (backend != NAME or torch.cuda.is_available())


HOOKS: Final = (
    Hook("sglang.srt.server_args.ServerArgs._handle_attention_backend_compatibility", _without_graphs, HookType.AFTER),
    Hook("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", _note_slots, HookType.AFTER),
    *(
        Hook(f"sglang.srt.{module}.support_triton", _without_triton, HookType.AROUND)
        for module in ("mem_cache.allocation", "model_executor.forward_batch_info", "layers.rotary_embedding.mrope")
    ),
)
