"""Token counts of prompts, from the server that is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from winnow_evaluation.over_http.answers import RequestError
from winnow_evaluation.tasks.sizing import SEAM_TOKENS, TokenCounter

if TYPE_CHECKING:
    from winnow_evaluation.over_http.client import OpenAIClient

_TEMPLATE_PROBE = "The lamp is lit. The road is long. Which way does the river run?"


class TokenizeCounter:
    """Counts with the server's ``/tokenize``, and adds what the chat template adds."""

    samples = 4
    cheap = True

    def __init__(self, client: OpenAIClient, overhead: int) -> None:
        self._client = client
        self._overhead = overhead

    async def count(self, prompt: str, given: str = "") -> int | None:
        tokens = await self._client.tokenize(prompt + given)
        if tokens is None:
            raise RequestError("the server's /tokenize answered before and does not now")
        return tokens + self._overhead


class UsageCounter:
    """Counts by asking for one token, which makes the server read the whole prompt: few samples, and slow."""

    samples = 3
    cheap = False

    def __init__(self, client: OpenAIClient) -> None:
        self._client = client

    async def count(self, prompt: str, given: str = "") -> int | None:
        try:
            return await self._client.prompt_tokens(prompt, given)
        except RequestError as error:
            if error.refused:
                return None
            raise


async def token_counter(client: OpenAIClient) -> TokenCounter:
    """The better of the two counters that the server allows.

    Raises:
        RequestError: the server does not answer even a short prompt, or does not tell its usage.
    """
    whole = await client.prompt_tokens(_TEMPLATE_PROBE)
    alone = await client.tokenize(_TEMPLATE_PROBE)
    return UsageCounter(client) if alone is None else TokenizeCounter(client, whole - alone + SEAM_TOKENS)
