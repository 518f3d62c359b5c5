"""The general SGLang plugin, for every platform: no request stops the server or stays in it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.admission import Limits, check_request, check_tokens
from sglang_winnow.hooks import Hook, install
from sglang_winnow.sampling_parameters import SamplingParameters

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import (
        EmbeddingReqInput,
        GenerateReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register() -> None:
    """Install the hooks; SGLang calls this, by its entry point, in each of its processes."""
    install(HOOKS)


def _check_before_anything_else(
    manager: TokenizerManager, request: GenerateReqInput | EmbeddingReqInput, *_: object, **__: object
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

    if not isinstance(request, GenerateReqInput):
        return
    try:
        check_request(request, _limits(manager))
    except ValueError:
        # When a native stream ends, SGLang aborts the request that it was for: it must find one that was never sent.
        request.rid, request.is_single = None, True
        request.regenerate_rid()
        raise


def _check_after_tokenizing(
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, manager: TokenizerManager, *_: Any, **__: Any
) -> None:
    # A multimodal processor's placeholders may lie outside the vocabulary; SGLang replaces them in the scheduler.
    if tokenized.input_ids is not None and tokenized.mm_inputs is None:
        check_tokens(tokenized.input_ids, manager.model_config.vocab_size)


def _forget_unused_states(
    _nothing: None, manager: TokenizerManager, request: GenerateReqInput | EmbeddingReqInput, *_: object, **__: object
) -> None:
    # For several samples of a prompt SGLang makes a state each, makes others under new ids and removes only the first
    # of these: the rest stay in memory, and a server told to stop waits for them in vain.
    if getattr(request, "is_single", True) or getattr(request, "parallel_sample_num", 1) == 1:
        return
    for rid in request.rid[request.batch_size :]:
        manager.rid_to_state.pop(rid, None)


@cache
def _later_parameters() -> frozenset[str]:
    from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

    return frozenset(SamplingParams.__struct_fields__) - SamplingParameters.model_fields.keys()


def _limits(manager: TokenizerManager) -> Limits:
    arguments = manager.server_args
    return Limits(
        vocab_size=manager.model_config.vocab_size,
        context_length=manager.context_len,
        hidden_size=manager.model_config.hidden_size,
        metric_labels=frozenset(arguments.tokenizer_metrics_allowed_custom_labels or ()),
        multi_item_scoring=bool(arguments.enable_mis),
        multimodal=bool(manager.model_config.is_multimodal),
        later_parameters=_later_parameters(),
    )


HOOKS: Final = (
    Hook(f"{_TOKENIZER_MANAGER}.generate_request", _check_before_anything_else, HookType.BEFORE),
    Hook(f"{_TOKENIZER_MANAGER}._create_tokenized_object", _check_after_tokenizing, HookType.AFTER),
    Hook(f"{_TOKENIZER_MANAGER}._init_req_state", _forget_unused_states, HookType.AFTER),
)
