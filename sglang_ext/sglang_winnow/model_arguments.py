"""What SGLang decides of its arguments by the model, where it does not know the attention backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow import linear_attention
from sglang_winnow.attention_registration import is_chosen
from sglang_winnow.hooks import Hook
from sglang_winnow.sglang_versions.arguments import decide, model_config_of, resolved
from sglang_winnow.sglang_versions.hook_targets import target

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_KNOWN_TO_SGLANG: Final = "triton"
"""A backend that SGLang lets attend with sink logits; only asked whether it may."""

_MOE_IN_TORCH: Final = "triton"
"""What SGLang calls the experts' layout that it computes in torch on a CPU."""

_asks_for_sinks: ContextVar[bool] = ContextVar("_asks_for_sinks", default=False)


def _adjust(adjust: Callable[[ServerArgs], None], arguments: ServerArgs) -> None:
    # A model that another instance has is not known here.
    if not is_chosen(arguments) or "://" in arguments.model_path:
        adjust(arguments)
        return
    # What they import waits for SGLang to have chosen its platform.
    from sglang_winnow.refusals import refusal  # noqa: PLC0415
    from sglang_winnow.softmaxes import has_sinks  # noqa: PLC0415

    config = model_config_of(arguments)
    if linear_attention.has_linear_attention(config):
        # SGLang would say of its radix cache for such models what that needs.
        for reason in linear_attention.reasons(arguments, config):
            raise SystemExit(refusal(reason))
        linear_attention.decide_arguments(arguments)
    if not has_sinks(config):
        adjust(arguments)
        return
    if not torch.cuda.is_available() and resolved(arguments).moe_runner_backend == "auto":
        # SGLang would lay the experts' weights out for kernels that a CPU does not have.
        decide(arguments, moe_runner_backend=_MOE_IN_TORCH)
    with _asking_for_sinks():
        adjust(arguments)


@contextmanager
def _asking_for_sinks() -> Iterator[None]:
    token = _asks_for_sinks.set(True)
    try:
        yield
    finally:
        _asks_for_sinks.reset(token)


def _backends_with_sinks(backends_of: Callable[[object], tuple[str, str]], arguments: object) -> tuple[str, str]:
    return (_KNOWN_TO_SGLANG, _KNOWN_TO_SGLANG) if _asks_for_sinks.get() else backends_of(arguments)


HOOKS: Final = (
    Hook(target("adjust arguments to the model"), _adjust, HookType.AROUND),
    Hook("sglang.srt.arg_groups.overrides.attention_backends_of", _backends_with_sinks, HookType.AROUND),
)
