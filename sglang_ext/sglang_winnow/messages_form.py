"""Policies and their cost in SGLang's ``/v1/messages``, whose requests know nothing of ``custom_params``.

SGLang makes chat requests of them, which get what the body has. Answers have ``attention`` at the top, streams in the
event that counts their tokens.
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

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.managers.io_struct import GenerateReqInput

_DATA: Final = "\ndata: "
_COUNTED: Final = "event: message_delta\n"


async def handle_messages(
    handle: Callable[..., Awaitable[Any]], serving: Any, request: object, raw_request: Request
) -> Any:
    """Answer a request of the messages form, or refuse its policy."""
    try:
        await custom_params_of(raw_request, serving.openai_serving_chat.tokenizer_manager)
    except ValueError as error:
        return serving._error_response(400, "invalid_request_error", str(error))  # noqa: SLF001
    return await handle(serving, request, raw_request)


async def handle_as_chat(
    handle: Callable[..., Awaitable[Any]], serving: Any, chat_request: Any, request: object, raw_request: Request
) -> Any:
    """Give the chat request that SGLang makes of one in the messages form what the body has as ``custom_params``."""
    chat_request.custom_params = await custom_params_of(raw_request, serving.openai_serving_chat.tokenizer_manager)
    return await handle(serving, chat_request, request, raw_request)


def convert_with_cost(message: BaseModel, _serving: object, chat_response: Any) -> BaseModel:
    """Add what a chat answer has cost to the answer of the messages form that is made of it."""
    (cost,) = (chat_response.metadata or {}).get(KEY) or [None]
    return message if cost is None else with_cost(message, cost)


async def stream_message(
    stream: Callable[..., AsyncIterator[str]], serving: object, adapted: GenerateReqInput, *arguments: object
) -> AsyncIterator[str]:
    """Stream an answer of the messages form; its cost is where its tokens are counted."""
    async with aclosing(stream(serving, adapted, *arguments)) as events:  # type: ignore[type-var]
        async for event in events:
            if event.startswith(_COUNTED) and (cost := getattr(adapted, "winnow_costs", {}).get(0)) is not None:
                head, data = event.split(_DATA, 1)
                yield f"{head}{_DATA}{json.dumps(json.loads(data) | {KEY: cost}, separators=(',', ':'))}\n\n"
            else:
                yield event


_MESSAGES: Final = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
HOOKS: Final = (
    Hook(f"{_MESSAGES}.handle_messages", handle_messages, HookType.AROUND),
    Hook(f"{_MESSAGES}._handle_non_streaming", handle_as_chat, HookType.AROUND),
    Hook(f"{_MESSAGES}._handle_streaming", handle_as_chat, HookType.AROUND),
    Hook(f"{_MESSAGES}._convert_response", convert_with_cost, HookType.AFTER),
    Hook(f"{_MESSAGES}._generate_anthropic_stream", stream_message, HookType.AROUND),
)
