"""``attention`` in SGLang's OpenAI answers: chat and text completions, streamed or not.

Each choice has its own; an answer with one choice has it at the top as well. A stream has one more chunk, just before
its end: without choices (of a text completion with one that says nothing), and with the object of the only choice, or
a list with that of each.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.hooks import Hook
from sglang_winnow.reporting import KEY

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

END: Final = "data: [DONE]\n\n"
_DATA: Final = "data: "
_TEXT: Final = "text_completion"
# SGLang's own benchmark reads the first choice of each chunk of a text completion.
_SAYS_NOTHING: Final = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}


def note_costs(
    response: Any, _serving: object, _request: object, results: Sequence[dict[str, Any]], *_: object, **__: object
) -> None:
    """Note each choice's cost in an answer's metadata: its type, which other forms are made from, has no place."""
    costs = [result["meta_info"].get(KEY) for result in results]
    # An error has no choices.
    if hasattr(response, "choices") and any(costs):
        response.metadata = (response.metadata or {}) | {KEY: costs}


async def answer_with_costs(
    handle_request: Callable[..., Awaitable[Any]], serving: object, *arguments: Any, **options: Any
) -> Any:
    """Answer an OpenAI request with each choice's attention, where it was noted."""
    from fastapi.responses import ORJSONResponse  # noqa: PLC0415

    response = await handle_request(serving, *arguments, **options)
    if (costs := (getattr(response, "metadata", None) or {}).pop(KEY, None)) is None:
        return response
    content = response.model_dump(mode="json")
    for choice, cost in zip(content["choices"], costs, strict=True):
        choice[KEY] = cost
    if len(costs) == 1:
        content[KEY] = costs[0]
    return ORJSONResponse(content)


async def stream_with_costs(
    handle_streaming_request: Callable[..., Awaitable[Any]],
    serving: object,
    adapted: GenerateReqInput,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Answer an OpenAI request with a stream that ends with what its attention cost."""
    response = await handle_streaming_request(serving, adapted, *arguments, **options)
    if hasattr(response, "body_iterator"):
        response.body_iterator = _with_costs(response.body_iterator, adapted)
    return response


async def _with_costs(chunks: AsyncIterator[str], request: GenerateReqInput) -> AsyncIterator[str]:
    last: str | None = None
    async for chunk in chunks:
        if chunk == END and last is not None and (costs := getattr(request, "winnow_costs", None)):
            count = request.batch_size * request.parallel_sample_num
            cost = costs.get(0) if count == 1 else [costs.get(index) for index in range(count)]
            # Like the chunk before, but for what it says.
            like = json.loads(last.removeprefix(_DATA))
            head = {name: like[name] for name in ("id", "object", "created", "model") if name in like}
            choices = [_SAYS_NOTHING] if head.get("object") == _TEXT else []
            yield f"{_DATA}{json.dumps(head | {'choices': choices, KEY: cost}, separators=(',', ':'))}\n\n"
        last = chunk
        yield chunk


_OPENAI: Final = "sglang.srt.entrypoints.openai"
_CHAT: Final = f"{_OPENAI}.serving_chat.OpenAIServingChat"
_COMPLETIONS: Final = f"{_OPENAI}.serving_completions.OpenAIServingCompletion"
HOOKS: Final = (
    Hook(f"{_CHAT}._build_chat_response", note_costs, HookType.AFTER),
    Hook(f"{_COMPLETIONS}._build_completion_response", note_costs, HookType.AFTER),
    Hook(f"{_OPENAI}.serving_base.OpenAIServingBase.handle_request", answer_with_costs, HookType.AROUND),
    Hook(f"{_CHAT}._handle_streaming_request", stream_with_costs, HookType.AROUND),
    Hook(f"{_COMPLETIONS}._handle_streaming_request", stream_with_costs, HookType.AROUND),
)
