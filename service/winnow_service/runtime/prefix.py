"""How a prompt begins: what requests have in common that can use one runtime's radix cache.

The service tells it, hashed, to a balancer in front of several runtimes. See deploy/haproxy.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from pydantic_core import to_json

# Of a prompt; of the system's messages and of the first of the user's each. Less is not worth a cache.
PREFIX_BYTES: Final = 2048
# A token id is a few digits.
_PREFIX_TOKENS: Final = 512
_FIRST_ROLES: Final = ("system", "developer")


def prefix_of(body: Mapping[str, Any]) -> bytes:
    """Return what requests that can share a prefix have in common: it stays the same while a conversation grows."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return _beginning_of_conversation(messages)
    if isinstance(items := body.get("input"), list):
        return _beginning_of_conversation(items)
    prompt: Any = next((body[name] for name in ("prompt", "text", "input_ids", "input") if body.get(name)), "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        # Of several prompts, the first stands for all.
        prompt = prompt[0]
    return _beginning(prompt)


def prefix_key(prefix: bytes) -> bytes:
    """Return ``prefix`` as a balancer finds it in the request's header: 16 hexadecimal digits."""
    return blake2b(prefix, digest_size=8).hexdigest().encode()


def _beginning_of_conversation(messages: list[Any]) -> bytes:
    beginning = []
    for message in messages:
        is_object = isinstance(message, dict)
        beginning.append(_beginning(message.get("content") if is_object else message))
        if not is_object or message.get("role") not in _FIRST_ROLES:
            break
    return b"".join(beginning)


def _beginning(content: Any) -> bytes:
    if isinstance(content, str):
        return content[:PREFIX_BYTES].encode(errors="surrogatepass")
    if isinstance(content, list) and content and isinstance(content[0], dict):
        # Parts: texts, and addresses of images or images themselves.
        values = [value for part in content if isinstance(part, dict) for value in part.values()]
        inner = [value.get("url") if isinstance(value, dict) else value for value in values]
        return b"".join(_beginning(value) for value in inner if isinstance(value, str))
    return to_json(content[:_PREFIX_TOKENS], inf_nan_mode="constants") if isinstance(content, list) else b""
