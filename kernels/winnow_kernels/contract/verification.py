"""The parameters of verification, which any sparse decode policy can have beside its own."""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated, Any, Final, Literal

from pydantic import PlainValidator, WithJsonSchema

from winnow_kernels.contract.fields import Contract, refuse

ALGORITHM: Final = "WINNOW"
"""The speculative algorithm of a server that verifies (``--speculative-algorithm``)."""
AUTO: Final = "auto"
MAX_DRAFT_TOKENS: Final = 16
DEFAULT_DRAFT_TOKENS: Final = 4
MAX_CHECKED_TOKENS: Final = 256
"""Of one pass on CUDA: buffers are made for as many. More are checked in several passes."""
CHECKED_WIDTHS: Final = (2, 3, 5, 9, MAX_DRAFT_TOKENS + 1)
"""Tokens a row of a check that CUDA graphs are captured for; rows with fewer are filled up."""


def checked_width(tokens: int) -> int:
    """Return which of ``CHECKED_WIDTHS`` a check of so many tokens a row has: the next one."""
    return CHECKED_WIDTHS[bisect_left(CHECKED_WIDTHS, tokens)]


def _draft_tokens(value: Any) -> int | str:
    # One error, where a union has one for each of its members.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value != AUTO and not (is_number and 1 <= value <= MAX_DRAFT_TOKENS):
        refuse(f"must be a whole number from 1 to {MAX_DRAFT_TOKENS}, or {AUTO}")
    return value


DraftTokens = Annotated[
    int | Literal["auto"],
    PlainValidator(_draft_tokens),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_DRAFT_TOKENS}, {"const": AUTO}]}),
]


class Verification(Contract):
    """Draft with the sparse decode policy, check the drafts in one dense step: the answer is that of dense attention.

    Attributes:
        draft_tokens: tokens that are drafted for each dense step, at most; ``auto`` for as many as pay, by how many of
            the request's drafts have stood.
    """

    draft_tokens: DraftTokens = DEFAULT_DRAFT_TOKENS
