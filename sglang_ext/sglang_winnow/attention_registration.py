"""Making SGLang know the attention backend, and the batch known to the backend."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import add_attention_backend_choices

from sglang_winnow.backend_name import NAME
from sglang_winnow.hooks import Hook
from sglang_winnow.own_backend import own_backend
from sglang_winnow.sglang_versions.arguments import decide, decide_graph_backends, resolved
from sglang_winnow.sglang_versions.hook_targets import target
from sglang_winnow.sglang_versions.releases import MIXED_POSITIONS, runs

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

PAGE_SIZE: Final = 16
"""On CUDA, unless the command line asks for larger pages."""
MAX_RUNNING: Final = 256
"""Requests that run at once on CUDA, unless the command line says otherwise: buffers are made for as many."""

logger = logging.getLogger(__name__)


def register_backend() -> None:
    """Register ``--attention-backend winnow``; once is enough."""
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(_create)
        add_attention_backend_choices([NAME])


def _create(runner: ModelRunner) -> AttentionBackend:
    # What they import is not needed in processes without a model. Triton's interpreter, for tests, needs no CUDA.
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        from sglang_winnow.device.backend import WinnowDeviceBackend  # noqa: PLC0415

        on_device: AttentionBackend = WinnowDeviceBackend(runner)
        return on_device
    from sglang_winnow.attention_backend import WinnowAttentionBackend  # noqa: PLC0415

    backend: AttentionBackend = WinnowAttentionBackend(runner)
    return backend


def _note_requests(
    forward_batch: ForwardBatch, _class: type, batch: ScheduleBatch, model_runner: ModelRunner, **_: Any
) -> None:
    if resolved(model_runner.server_args).attention_backend == NAME and batch.reqs:
        decoding = len(batch.decoding_reqs) if forward_batch.forward_mode.is_mixed() else 0
        own_backend(model_runner).note(batch.reqs, forward_batch, decoding)


def _place_decoding_rows(_nothing: None, batch: ScheduleBatch, running: ScheduleBatch, *_: Any) -> None:
    # SGLang counts generated tokens instead, of which the newest are known one pass later or, after a prefill that is
    # not mixed, are known by now: positions would be off by one.
    decoding = len(running.reqs)
    batch.prefix_lens[-decoding:] = [length - 1 for length in running.seq_lens_cpu.tolist()]


def is_chosen(arguments: ServerArgs) -> bool:
    """Return whether ``arguments`` choose the attention backend for both phases."""
    # SGLang fills in the platform's default before this is asked, but not what is named for both phases by itself.
    of = resolved(arguments)
    return of.attention_backend == NAME or (of.prefill_attention_backend, of.decode_attention_backend) == (NAME, NAME)


def _fill_in_arguments(_nothing: None, arguments: ServerArgs) -> None:
    if not is_chosen(arguments):
        return
    if not torch.cuda.is_available():
        # As SGLang does for its own backends in torch.
        decide_graph_backends(arguments, prefill=Backend.DISABLED, decode=Backend.DISABLED)
        return
    of = resolved(arguments)
    if (kind := of.cuda_graph_config.prefill.backend) not in (Backend.BREAKABLE, Backend.DISABLED):
        # Others capture attention, too, which for a policy depends on the prompt.
        logger.warning("Winnow prefills without CUDA graphs: it has none of the kind %r.", kind)
        decide_graph_backends(arguments, prefill=Backend.DISABLED)
    decide(
        arguments,
        max_running_requests=of.max_running_requests or MAX_RUNNING,
        page_size=PAGE_SIZE if of.page_size in (None, 1) else of.page_size,
        # Windowed layers have no pool of their own.
        disable_hybrid_swa_memory=True,
    )


def _sized_before_capture(planned: Callable[[ServerArgs], bool], arguments: ServerArgs) -> bool:
    # Indexes are as large as the KV cache, and graphs are captured with both: no pool may change its size later.
    return not is_chosen(arguments) and planned(arguments)


def _without_triton(supports: Any, backend: str) -> bool:
    # SGLang takes every backend that it does not know for one whose device launches Triton kernels.
    return bool(supports(backend)) and (backend != NAME or torch.cuda.is_available())


_BATCH: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch"
HOOKS: Final = (
    Hook(target("resolve the attention backend"), _fill_in_arguments, HookType.AFTER),
    Hook(target("plan to size the KV cache after graphs"), _sized_before_capture, HookType.AROUND),
    *([] if runs(MIXED_POSITIONS) else [Hook(f"{_BATCH}.mix_with_running", _place_decoding_rows, HookType.AFTER)]),
    Hook("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", _note_requests, HookType.AFTER),
    *(
        Hook(f"sglang.srt.{module}.support_triton", _without_triton, HookType.AROUND)
        for module in ("mem_cache.allocation", "model_executor.forward_batch_info", "layers.rotary_embedding.mrope")
    ),
)
