"""The secret that a client sends, and what is stored of it.

A token is ``winnow_<id>_<secret>``. The id finds the key; the secret has 256 random bits. What is stored is the SHA-256
of the whole token. A slow hash protects secrets that people choose, which can be guessed; nobody guesses 256 bits, and
a slow hash would cost every request tens of milliseconds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

_TOKEN: Final = re.compile(r"winnow_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 32
_NO_DIGEST: Final = "0" * 64


@dataclass(frozen=True)
class Token:
    """A new token. Its text is shown once and never stored."""

    key_id: str
    text: str = field(repr=False)


def new_token() -> Token:
    """Return a token that nobody has."""
    key_id = secrets.token_hex(_ID_BYTES)
    return Token(key_id, f"winnow_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}")


def key_id_of(text: str) -> str | None:
    """Return the id in a token; None if it is no token of ours."""
    match = _TOKEN.fullmatch(text)
    return None if match is None else match[1]


def digest(text: str) -> str:
    """Return what is stored of a token."""
    return hashlib.sha256(text.encode()).hexdigest()


def matches(text: str, stored: str | None) -> bool:
    """Whether ``stored`` is the digest of a token, in a time that does not tell where they differ."""
    same = hmac.compare_digest(digest(text), stored or _NO_DIGEST)
    return same and stored is not None
