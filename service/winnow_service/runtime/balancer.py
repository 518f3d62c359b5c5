"""Which of several runtimes a request goes to: the one that has its prefix cached, unless that one has too much to do.

Rendezvous hashing ranks the runtimes for each prefix, in every replica alike; when one comes or goes, only the prefixes
that it ranks first for move. A request goes to the first in its ranking whose load stays within a bound, as in
"Consistent hashing with bounded loads" (Mirrokni, Thorup, Zadimoghaddam; 2018): a prefix that is too popular for one
runtime is then cached by a second, always the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from pydantic_core import to_json

# Of a prompt; of the system's messages and of the first of the user's each. Less is not worth a cache.
PREFIX_BYTES: Final = 2048
# A token id is a few digits.
_PREFIX_TOKENS: Final = 512
# By so many requests a runtime may be ahead of the least loaded one, whatever the factor: with little to do, all are
# fast, and a prefix is worth more than evenness.
SLACK: Final = 4
_FIRST_ROLES: Final = ("system", "developer")


def prefix_of(body: Mapping[str, Any]) -> bytes:
    """Return what requests that can share a prefix have in common: it stays the same while a conversation grows."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return _beginning_of_conversation(messages)
    prompt: Any = next((body[name] for name in ("prompt", "text", "input_ids") if body.get(name)), "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        # Of several prompts, the first stands for all.
        prompt = prompt[0]
    return _beginning(prompt)


def prefix_key(prefix: bytes) -> bytes:
    """Return ``prefix`` as the header has it in which a balancer finds it: 16 hexadecimal digits."""
    return blake2b(prefix, digest_size=8).hexdigest().encode()


def rank(prefix: bytes, names: Sequence[str]) -> list[str]:
    """Return ``names`` in the order in which they should serve ``prefix``."""
    return sorted(names, key=lambda name: blake2b(prefix, digest_size=8, key=name.encode()[:64]).digest())


def choose(ranking: Sequence[str], loads: Mapping[str, int], factor: float) -> str:
    """Return the first of ``ranking`` that may have one request more.

    Args:
        loads: how many requests each of them has.
        factor: by which a load may be over the mean of all, with this request.
    """
    of_all = [loads[name] for name in ranking]
    bound = max(math.ceil(factor * (sum(of_all) + 1) / len(of_all)), min(of_all) + SLACK)
    return next(name for name in ranking if loads[name] < bound)


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
