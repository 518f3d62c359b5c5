"""The general SGLang plugin, for every platform: the attention backend, and requests that have policies.

No request stops the server or stays in it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow import (
    attention_field,
    attention_registration,
    block_states,
    chunk_ends,
    messages_form,
    metrics,
    model_arguments,
    next_token_audit,
    openai_forms,
    radix,
    rank_cores,
    released_prompts,
    reporting,
    responses_form,
    rows_with_tokens,
    server_information,
    server_options,
    token_logprobs,
    verification,
)
from sglang_winnow.admission import attach_policy, check_request, check_tokens, limits_of
from sglang_winnow.attention_registration import register_backend
from sglang_winnow.audit_share import server_share
from sglang_winnow.crossover import of_all_policies
from sglang_winnow.explain_requests import note_explained_prompt
from sglang_winnow.graph_sets import graph_sets
from sglang_winnow.hooks import Hook, install, refusing_to_start
from sglang_winnow.key_bits import index_settings
from sglang_winnow.profile_settings import default_kl, load_requests, profile, under_load_kl
from sglang_winnow.served_policies import served_policies
from sglang_winnow.server_information import served_model_of
from sglang_winnow.sglang_versions.releases import UNUSED_STATES_REMOVED, runs
from sglang_winnow.sglang_versions.requests import requests_of
from sglang_winnow.verification import register_algorithm

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import (
        EmbeddingReqInput,
        GenerateReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register() -> None:
    """Offer the attention backend and install the hooks.

    Raises:
        SystemExit: the environment, or SGLang, is not what the hooks need.
    """
    with refusing_to_start():
        graph_sets(served_policies(verifies=True))
        index_settings()
        of_all_policies()
        server_share()
        profile()
        default_kl()
        load_requests()
        under_load_kl()
    register_backend()
    register_algorithm()
    install(HOOKS)


def _check_before_anything_else(
    manager: TokenizerManager, request: GenerateReqInput | EmbeddingReqInput, *_: object, **__: object
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

    if not isinstance(request, GenerateReqInput):
        return
    try:
        check_request(request, limits_of(manager))
    except ValueError:
        # When a native stream ends, SGLang aborts the request that it was for: it must find one that was never sent.
        request.rid, request.is_single = None, True
        request.regenerate_rid()
        raise


def _check_after_tokenizing(
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
    manager: TokenizerManager,
    request: GenerateReqInput | EmbeddingReqInput,
    *_: Any,
    **__: Any,
) -> None:
    # A multimodal processor's placeholders may lie outside the vocabulary; SGLang replaces them in the scheduler.
    if tokenized.input_ids is not None and tokenized.mm_inputs is None:
        check_tokens(tokenized.input_ids, manager.model_config.vocab_size)
        note_explained_prompt(request, tokenized.input_ids, tokenized.sampling_params.custom_params)


def _forget_unused_states(
    _nothing: None, manager: TokenizerManager, request: GenerateReqInput | EmbeddingReqInput, *_: object, **__: object
) -> None:
    # For several samples of a prompt SGLang makes a state each, makes others under new ids and removes only the first
    # of these: the rest stay in memory, and a server told to stop waits for them in vain.
    if getattr(request, "is_single", True) or getattr(request, "parallel_sample_num", 1) == 1:
        return
    for rid in request.rid[request.batch_size :]:
        manager.rid_to_state.pop(rid, None)


def _attach_before_queueing(scheduler: Scheduler, req: Req, *_: object, **__: object) -> None:
    # A retracted request comes here again.
    if not req.retraction_count:
        attach_policy(req, served_model_of(scheduler), scheduler.tree_cache, partial(requests_of, scheduler))


def _hide_keys(shown: str, arguments: ServerArgs) -> str:
    # SGLang logs its arguments at every start.
    for name in ("api_key", "admin_api_key", "ssl_keyfile_password"):
        if (secret := getattr(arguments, name)) is not None:
            shown = shown.replace(f"{name}={secret!r}", f"{name}='***'")
    return shown


def _hooks_on_device() -> tuple[Hook, ...]:
    if not torch.cuda.is_available():
        return ()
    from sglang_winnow.device import memory, variants  # noqa: PLC0415

    return (*memory.HOOKS, *variants.HOOKS)


HOOKS: Final = (
    *_hooks_on_device(),
    *attention_registration.HOOKS,
    *model_arguments.HOOKS,
    *metrics.HOOKS,
    *server_information.HOOKS,
    *server_options.HOOKS,
    *verification.HOOKS,
    *rows_with_tokens.HOOKS,
    *rank_cores.HOOKS,
    *radix.HOOKS,
    *released_prompts.HOOKS,
    *chunk_ends.HOOKS,
    *block_states.HOOKS,
    *next_token_audit.HOOKS,
    *reporting.HOOKS,
    *token_logprobs.HOOKS,
    *attention_field.HOOKS,
    *openai_forms.HOOKS,
    *responses_form.HOOKS,
    *messages_form.HOOKS,
    Hook("sglang.srt.server_args.ServerArgs.__repr__", _hide_keys, HookType.AFTER),
    Hook("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", _attach_before_queueing, HookType.BEFORE),
    Hook(f"{_TOKENIZER_MANAGER}.generate_request", _check_before_anything_else, HookType.BEFORE),
    Hook(f"{_TOKENIZER_MANAGER}._create_tokenized_object", _check_after_tokenizing, HookType.AFTER),
    *(
        []
        if runs(UNUSED_STATES_REMOVED)
        else [Hook(f"{_TOKENIZER_MANAGER}._init_req_state", _forget_unused_states, HookType.AFTER)]
    ),
)
