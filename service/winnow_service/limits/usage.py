"""How many tokens a request may use, as far as that can be told before it runs, and how many it has used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from winnow_service.attention.request import Form

# Of English text; where a tokenizer makes more tokens of a prompt, they are charged when the request ends.
_BYTES_PER_TOKEN: Final = 4
_TOKENS_PER_MESSAGE: Final = 4
# The longest answer when a request does not say: SGLang's own defaults, except that it lets a chat fill the context.
_NATIVE_ANSWER: Final = 128
_COMPLETION_ANSWER: Final = 16
_CHAT_ANSWER: Final = 1024
# No context and no budget of tokens is longer.
_MOST: Final = 1_000_000_000
# As SGLang reads the numbers of the OpenAI forms: "8" and 8.0 are 8.
_NUMBER: Final = TypeAdapter(int)

_COUNTED: Final = b'"completion_tokens"'
_EVENT: Final = b"data: "
_DONE: Final = b"data: [DONE]"


@dataclass(frozen=True)
class Estimate:
    """What a request may use.

    Attributes:
        prompt: tokens of its prompts, roughly.
        answers: tokens of the longest answers that it allows.
        has_many: whether it has several answers, which a native stream gives one by one.
    """

    prompt: int
    answers: int
    has_many: bool


def estimate(body: Mapping[str, Any], form: Form) -> Estimate:
    """Return what the request with this ``body`` may use."""
    return {Form.NATIVE: _estimate_native, Form.COMPLETION: _estimate_completion, Form.CHAT: _estimate_chat}[form](body)


def _estimate_native(body: Mapping[str, Any]) -> Estimate:
    prompts: Any = next((body[name] for name in ("text", "input_ids") if body.get(name)), "")
    count = len(prompts) if _is_batch(prompts) else 1
    parameters = body.get("sampling_params")
    each = parameters if isinstance(parameters, list) else [parameters] * count
    known = [given if isinstance(given, dict) else {} for given in each]
    longest = sum(_count(given.get("max_new_tokens"), _NATIVE_ANSWER) * _count(given.get("n"), 1) for given in known)
    return Estimate(_tokens(prompts), longest, count > 1 or any(_count(given.get("n"), 1) > 1 for given in known))


def _estimate_completion(body: Mapping[str, Any]) -> Estimate:
    prompts: Any = body.get("prompt", "")
    count = len(prompts) if _is_batch(prompts) else 1
    longest = _count(body.get("max_tokens"), _COMPLETION_ANSWER)
    return Estimate(_tokens(prompts), longest * _count(body.get("n"), 1) * count, has_many=False)


def _estimate_chat(body: Mapping[str, Any]) -> Estimate:
    # To SGLang 0 is as good as nothing.
    longest = _count(body.get("max_completion_tokens"), 0) or _count(body.get("max_tokens"), 0) or _CHAT_ANSWER
    messages, token_ids, tools = body.get("messages"), body.get("input_ids"), body.get("tools")
    if isinstance(token_ids, list):
        prompt = len(token_ids)
    else:
        known = messages if isinstance(messages, list) else []
        prompt = sum(_TOKENS_PER_MESSAGE + _tokens_of_message(message) for message in known) + _tokens_of_json(tools)
    return Estimate(prompt, longest * _count(body.get("n"), 1), has_many=False)


def used_tokens(answer: bytes) -> int | None:
    """Return how many tokens an answer says that it took; None if it does not say."""
    if _COUNTED not in answer:
        return None
    try:
        told = from_json(answer)
    except ValueError:
        return None
    uses = [use for use in map(_told, told if isinstance(told, list) else [told]) if use is not None]
    return sum(uses) if uses else None


class StreamUsage:
    """Counts the tokens of a stream as it passes.

    Args:
        estimate: of its request: of the prompt, for a stream that does not say.
    """

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self._events = 0
        # The last event of each answer that says how much it took: a native stream of several has one for each.
        self._last: dict[object, bytes] = {}

    def feed(self, events: bytes) -> bytes:
        """Take whole events, and return them."""
        for line in events.split(b"\n"):
            if line.startswith(_EVENT) and line != _DONE:
                self._events += 1
                if _COUNTED in line:
                    self._last[_index(line) if self._estimate.has_many else None] = line
        return events

    @property
    def tokens(self) -> int:
        """What it took by its own account, or the prompt and one token for each event."""
        told = [used_tokens(line.removeprefix(_EVENT)) for line in self._last.values()]
        known = [tokens for tokens in told if tokens is not None]
        return sum(known) if known else self._estimate.prompt + self._events


def _index(line: bytes) -> object:
    try:
        event = from_json(line.removeprefix(_EVENT))
    except ValueError:
        return None
    return event.get("index") if isinstance(event, dict) else None


def _told(answer: object) -> int | None:
    if not isinstance(answer, dict):
        return None
    for name in ("usage", "meta_info"):
        facts = answer.get(name)
        if isinstance(facts, dict):
            counts = [facts.get("prompt_tokens"), facts.get("completion_tokens")]
            if all(isinstance(count, int) for count in counts):
                return sum(_count(count, 0) for count in counts)
    return None


def _is_batch(prompts: object) -> bool:
    # One prompt may be a list of token ids.
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)


def _tokens_of_message(message: object) -> int:
    if not isinstance(message, dict):
        return 0
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts.append(message.get("reasoning_content"))
    return sum(_tokens(text) for text in texts if isinstance(text, str)) + _tokens_of_json(message.get("tool_calls"))


def _tokens_of_json(value: object) -> int:
    return 0 if value is None else -(-len(to_json(value, inf_nan_mode="constants")) // _BYTES_PER_TOKEN)


def _tokens(prompts: object) -> int:
    if isinstance(prompts, str):
        return -(-len(prompts.encode(errors="surrogatepass")) // _BYTES_PER_TOKEN)
    if not isinstance(prompts, list):
        return 0
    return sum(_tokens(prompt) if isinstance(prompt, str | list) else 1 for prompt in prompts)


def _count(value: object, default: int) -> int:
    try:
        number = _NUMBER.validate_python(value)
    except ValidationError:
        # The runtime refuses it, or has the same default.
        return default
    return min(max(number, 0), _MOST)
