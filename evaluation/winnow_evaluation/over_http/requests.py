"""What is asked of an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

Prompt = Mapping[str, Any]
"""The fields of a request that say what is asked."""


class Api(StrEnum):
    """Which of the two OpenAI forms is asked.

    ``tokens`` has the server tokenize a chat prompt once, at ``/v1/tokenize`` as SGLang has it, and then asks the
    completions form with the ids. A server spends more time on tokenizing a long prompt than on answering it from its
    cache.
    """

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKENS = "tokens"

    @property
    def path(self) -> str:
        """Where requests of this form go."""
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"
