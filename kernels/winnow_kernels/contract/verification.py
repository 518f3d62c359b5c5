"""The parameters of verification, which any sparse decode policy can have beside its own."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from winnow_kernels.contract.fields import Contract

ALGORITHM: Final = "WINNOW"
"""The speculative algorithm of a server that verifies (``--speculative-algorithm``)."""
MAX_DRAFT_TOKENS: Final = 16
DEFAULT_DRAFT_TOKENS: Final = 4


class Verification(Contract):
    """Draft with the sparse decode policy, check the drafts in one dense step: the answer is that of dense attention.

    Attributes:
        draft_tokens: tokens that are drafted for each dense step, at most.
    """

    draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] = DEFAULT_DRAFT_TOKENS
