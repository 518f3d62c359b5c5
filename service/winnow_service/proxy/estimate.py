"""How many tokens a request may use, as far as that is known before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from winnow_service.proxy.body import Form

# Of English text; where a tokenizer makes more tokens of a prompt, they are charged when the request ends.
_BYTES_PER_TOKEN: Final = 4
_TOKENS_PER_MESSAGE: Final = 4
# The longest answer when a request does not say: SGLang's own defaults, except that it lets a chat fill the context.
_NATIVE_ANSWER: Final = 128
_COMPLETION_ANSWER: Final = 16
_CHAT_ANSWER: Final = 1024
# No context and no budget of tokens is longer.
_MAX_COUNT: Final = 1_000_000_000
# As SGLang reads the numbers of the OpenAI forms: "8" and 8.0 are 8.
_NUMBER: Final = TypeAdapter(int)


@dataclass(frozen=True)
class Estimate:
    """What a request may use.

    Attributes:
        prompt: tokens of its prompts, roughly.
        answers: tokens of the longest answers that it allows.
    """

    prompt: int
    answers: int


def estimate(body: Mapping[str, Any], form: Form) -> Estimate:
    """Return what the request with this ``body`` may use."""
    return _ESTIMATES[form](body)


def has_several_answers(body: Mapping[str, Any], form: Form) -> bool:
    """Whether the request has several answers whose events a stream gives in turn, each with its own counts."""
    if form is not Form.NATIVE:
        return False
    return _is_batch(_native_prompts(body)) or any(_count(each.get("n"), 1) > 1 for each in _native_parameters(body))


def _estimate_native(body: Mapping[str, Any]) -> Estimate:
    longest = sum(
        _count(each.get("max_new_tokens"), _NATIVE_ANSWER) * _count(each.get("n"), 1)
        for each in _native_parameters(body)
    )
    return Estimate(_tokens(_native_prompts(body)), longest)


def _native_prompts(body: Mapping[str, Any]) -> Any:
    return next((body[name] for name in ("text", "input_ids") if body.get(name)), "")


def _native_parameters(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sampling parameters of each prompt."""
    prompts, parameters = _native_prompts(body), body.get("sampling_params")
    each = parameters if isinstance(parameters, list) else [parameters] * (len(prompts) if _is_batch(prompts) else 1)
    return [given if isinstance(given, dict) else {} for given in each]


def _estimate_completion(body: Mapping[str, Any]) -> Estimate:
    prompts: Any = body.get("prompt", "")
    count = len(prompts) if _is_batch(prompts) else 1
    longest = _count(body.get("max_tokens"), _COMPLETION_ANSWER)
    return Estimate(_tokens(prompts), longest * _count(body.get("n"), 1) * count)


def _estimate_chat(body: Mapping[str, Any]) -> Estimate:
    # To SGLang 0 is as good as nothing.
    longest = _count(body.get("max_completion_tokens"), 0) or _count(body.get("max_tokens"), 0) or _CHAT_ANSWER
    messages, token_ids, tools = body.get("messages"), body.get("input_ids"), body.get("tools")
    told = _tokens_of_messages(messages) + _tokens_of_json(tools)
    prompt = len(token_ids) if isinstance(token_ids, list) else told
    return Estimate(prompt, longest * _count(body.get("n"), 1))


def _estimate_responses(body: Mapping[str, Any]) -> Estimate:
    given = body.get("input")
    prompt = _tokens(given) if isinstance(given, str) else _tokens_of_messages(given)
    prompt += _tokens(body.get("instructions")) + _tokens_of_json(body.get("tools"))
    return Estimate(prompt, _count(body.get("max_output_tokens"), _CHAT_ANSWER))


def _estimate_messages(body: Mapping[str, Any]) -> Estimate:
    system = _tokens_of_message({"content": body.get("system")})
    prompt = system + _tokens_of_messages(body.get("messages")) + _tokens_of_json(body.get("tools"))
    return Estimate(prompt, _count(body.get("max_tokens"), _CHAT_ANSWER))


_ESTIMATES: Final = {
    Form.NATIVE: _estimate_native,
    Form.COMPLETION: _estimate_completion,
    Form.CHAT: _estimate_chat,
    Form.RESPONSES: _estimate_responses,
    Form.MESSAGES: _estimate_messages,
}


def _is_batch(prompts: object) -> bool:
    # One prompt may be a list of token ids.
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)


def _tokens_of_messages(messages: object) -> int:
    known = messages if isinstance(messages, list) else []
    return sum(_TOKENS_PER_MESSAGE + _tokens_of_message(message) for message in known)


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
    return min(max(number, 0), _MAX_COUNT)
