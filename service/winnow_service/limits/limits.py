"""The limits that a key may have."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Limits of one key over all replicas of the service. None is no limit.

    Attributes:
        requests_per_minute: generation requests in any 60 seconds.
        tokens_per_minute: tokens of prompts and answers in any 60 seconds.
        concurrent_requests: generation requests being answered at once.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    concurrent_requests: Annotated[int, Field(ge=1, le=100_000)] | None = None
