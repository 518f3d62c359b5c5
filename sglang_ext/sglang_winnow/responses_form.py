"""Policies and their cost in SGLang's ``/v1/responses``, whose requests know nothing of ``custom_params``.

They are taken from the body, as in the chat form. Answers have ``attention`` at the top, streams in the response of
their last event; it is kept with responses that are fetched later.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel
from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.body_fields import custom_params_of, with_cost
from sglang_winnow.hooks import Hook
from sglang_winnow.reporting import KEY
from winnow_kernels.contract.request_body import CUSTOM

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.managers.io_struct import GenerateReqInput

_DATA: Final = "\ndata: "
# What answers end with; until 0.5.19 one whose tokens were used up was called completed, too.
_LAST_EVENTS: Final = tuple(f"event: response.{status}\n" for status in ("completed", "incomplete", "failed"))


async def create_response(
    create_responses: Callable[..., Awaitable[Any]], serving: Any, request: object, raw_request: Request | None = None
) -> Any:
    """Answer a request of the responses form, or refuse its policy."""
    try:
        await custom_params_of(raw_request, serving.tokenizer_manager)
    except ValueError as error:
        return serving.create_error_response(str(error))
    return await create_responses(serving, request, raw_request)


async def generate_response(
    generate: Callable[..., AsyncIterator[Any]],
    serving: Any,
    request_id: str,
    prompt: object,
    adapted: GenerateReqInput,
    sampling_params: dict[str, Any],
    context: object,
    raw_request: Request | None = None,
    **options: object,
) -> AsyncIterator[Any]:
    """Generate with what the body of a request of the responses form has as ``custom_params``."""
    if (custom := await custom_params_of(raw_request, serving.tokenizer_manager)) is not None:
        # Those of ``adapted``, and of the requests that follow it when tools are called.
        sampling_params[CUSTOM] = custom
    contexts = generate(
        serving, request_id, prompt, adapted, sampling_params, context, raw_request=raw_request, **options
    )
    async with aclosing(contexts) as generated:  # type: ignore[type-var]
        async for each in generated:
            yield each


async def complete_response(
    responses_full_generator: Callable[..., Awaitable[Any]],
    serving: Any,
    request: object,
    sampling_params: object,
    generated: AsyncIterator[Any],
    context: object,
    *arguments: object,
    **options: object,
) -> Any:
    """Make a whole answer of the responses form, with its cost; also of the one that is kept for later."""
    response = await responses_full_generator(
        serving, request, sampling_params, generated, context, *arguments, **options
    )
    if isinstance(response, BaseModel) and (cost := _cost(context)) is not None:
        response = with_cost(response, cost)
        await _keep(serving, response)
    return response


async def stream_response(
    responses_stream_generator: Callable[..., AsyncIterator[str]],
    serving: Any,
    request: object,
    sampling_params: object,
    generated: AsyncIterator[Any],
    *arguments: object,
    **options: object,
) -> AsyncIterator[str]:
    """Stream an answer of the responses form, whose last event has its cost."""
    context: object = None

    async def noted() -> AsyncIterator[Any]:
        nonlocal context
        async with aclosing(generated) as contexts:  # type: ignore[type-var]
            async for context in contexts:
                yield context

    events = responses_stream_generator(serving, request, sampling_params, noted(), *arguments, **options)
    async with aclosing(events) as stream:  # type: ignore[type-var]
        async for event in stream:
            if event.startswith(_LAST_EVENTS) and (cost := _cost(context)) is not None:
                head, data = event.split(_DATA, 1)
                last = json.loads(data)
                last["response"][KEY] = cost
                if (stored := serving.response_store.get(last["response"]["id"])) is not None:
                    await _keep(serving, with_cost(stored, cost))
                yield f"{head}{_DATA}{json.dumps(last, separators=(',', ':'))}\n\n"
            else:
                yield event


def _cost(context: Any) -> Any:
    last = getattr(context, "last_output", None)
    return last["meta_info"].get(KEY) if isinstance(last, dict) else None


async def _keep(serving: Any, response: Any) -> None:
    """Replace a response that is kept, unless it was cancelled, by itself with its cost."""
    async with serving.response_store_lock:
        stored = serving.response_store.get(response.id)
        if stored is not None and stored.status == response.status:
            serving.response_store[response.id] = response


_RESPONSES: Final = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
HOOKS: Final = (
    Hook(f"{_RESPONSES}.create_responses", create_response, HookType.AROUND),
    Hook(f"{_RESPONSES}._generate_with_builtin_tools", generate_response, HookType.AROUND),
    Hook(f"{_RESPONSES}.responses_full_generator", complete_response, HookType.AROUND),
    Hook(f"{_RESPONSES}.responses_stream_generator_non_harmony", stream_response, HookType.AROUND),
)
