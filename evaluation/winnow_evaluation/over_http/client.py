"""An OpenAI-compatible server, as the evaluation sees it: models, token counts, timed answers.

The OpenAI SDK sends the requests and reads the streams. Answers stay plain JSON: the SDK's own objects cost 0.13 ms a
chunk, which would be in the times, and lack ``attention``.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

import httpx
import openai

from winnow_evaluation.over_http.answers import (
    Answer,
    RequestError,
    StreamedAnswer,
    attention_of,
    count_of,
    error_text,
    shortened,
)
from winnow_evaluation.over_http.requests import Api, Prompt
from winnow_evaluation.tasks.sizing import SEAM_TOKENS

_CONNECT_SECONDS = 10.0
# Below the 5 s after which uvicorn, the usual server, drops an idle connection: a request never meets a closing one.
_IDLE_CONNECTION_SECONDS = 2.0
_NOT_CONTINUED = (
    "the server does not let a chat's answer begin with a given text (continue_final_message): "
    "ask it with --api tokens or --api completions"
)


@dataclass(frozen=True)
class ServedModel:
    """A model that the server lists; ``max_tokens`` is its context length where the server tells."""

    name: str
    max_tokens: int | None


@dataclass(frozen=True)
class ServerFacts:
    """What the server tells about itself, each None where it does not."""

    device: str | None
    version: str | None


class OpenAIClient:
    """Requests to one model of one server, all with one ``attention``. Use it as an asynchronous context manager."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api: Api = Api.CHAT,
        attention: Mapping[str, Any] | str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        connections: int = 64,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        Args:
            url: the server's address, with or without a closing ``/v1``.
            model: the model's name; without it, ``select_model`` must be called before anything is asked.
            attention: sent as the top-level field of that name.
            timeout: seconds for one request, from sending it to the end of its stream.
            connections: how many requests can be under way at once.
            transport: replaces the network, in tests.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._api = api
        self.attention = attention
        self._timeout = timeout
        self._sdk = openai.AsyncOpenAI(
            base_url=self.url,
            # Without a key no header is sent; None would have the SDK look for one of OpenAI's.
            api_key=api_key or "",
            timeout=httpx.Timeout(None, connect=min(timeout, _CONNECT_SECONDS)),
            # A request that failed is a result.
            max_retries=0,
            http_client=httpx.AsyncClient(
                limits=httpx.Limits(
                    max_connections=connections,
                    max_keepalive_connections=connections,
                    keepalive_expiry=_IDLE_CONNECTION_SECONDS,
                ),
                transport=transport,
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sdk.close()

    def with_attention(self, attention: Mapping[str, Any] | str | None) -> Self:
        """The same server and model, asked with another ``attention``; the connections are shared, and closed here."""
        other = copy.copy(self)
        other.attention = attention
        return other

    async def select_model(self) -> ServedModel:
        """Settle which model is asked: the one named, or else the first that the server lists.

        Raises:
            RequestError: the server does not list its models, or lists none.
        """
        listed = (await self._json("/v1/models")).get("data")
        served = [
            ServedModel(name=each["id"], max_tokens=count_of(each, "max_model_len"))
            for each in (listed if isinstance(listed, list) else [])
            if isinstance(each, Mapping) and isinstance(each.get("id"), str)
        ]
        if self._model is None:
            if not served:
                raise RequestError(f"{self.url}/v1/models lists no model: name one with --model")
            self._model = served[0].name
        named = [each for each in served if each.name == self._model]
        # A name that is not listed is left to the server to judge: some serve aliases.
        return named[0] if named else ServedModel(name=self._model, max_tokens=None)

    async def facts(self) -> ServerFacts:
        """Device and version, from a server that has ``/server_info`` (SGLang) or ``/version`` (vLLM)."""
        reported: dict[str, Any] = {}
        for path in ("/server_info", "/version"):
            try:
                reported = await self._json(path)
                break
            except RequestError:
                continue
        device, version = reported.get("device"), reported.get("version")
        return ServerFacts(
            device=device if isinstance(device, str) else None, version=version if isinstance(version, str) else None
        )

    async def tokenize(self, text: str) -> int | None:
        """How many tokens the text alone has; None if the server has no ``/tokenize``."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        for path in ("/tokenize", "/v1/tokenize"):
            try:
                return count_of(await self._json(path, body), "count")
            except RequestError as error:
                if error.status is None or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise
        return None

    async def prompt_tokens(self, prompt: str, given: str = "") -> int:
        """How many tokens a request with this prompt has, chat template included, by letting the server read it.

        Args:
            given: the beginning of the answer.

        Raises:
            RequestError: it was refused or failed, or the server does not tell the usage.
        """
        answer = await self._one_token(prompt, given)
        tokens = count_of(answer.get("usage") or {}, "prompt_tokens")
        if tokens is None:
            raise RequestError("the server's answers have no usage.prompt_tokens: lengths cannot be measured")
        return tokens

    async def reported_attention(self, prompt: str) -> Mapping[str, Any] | None:
        """What the server tells of the attention of a request with this prompt; None if it tells nothing.

        Raises:
            RequestError: it was refused or failed.
        """
        return attention_of(await self._one_token(prompt))

    async def _one_token(self, prompt: str, given: str = "") -> dict[str, Any]:
        return await self._json(self._api.path, self._body(await self.prepared(prompt, given), max_tokens=1))

    async def prepared(self, prompt: str, given: str = "") -> Prompt:
        """What ``ask`` sends for a prompt: do this once for a prompt that is asked several times.

        Args:
            given: the beginning of the answer, which the model is to continue. It follows the chat template's opening
                of the assistant's turn, or the plain prompt.

        Raises:
            RequestError: the server does not tell the ids of a chat prompt's tokens.
        """
        messages = [{"role": "user", "content": prompt}]
        if self._api is Api.COMPLETIONS:
            # A model without a chat template needs to be told that the answer is due.
            return {"prompt": prompt + (given or "\nAnswer:")}
        if self._api is Api.TOKENS:
            tokens = await self._token_ids({"messages": messages})
            if given:
                tokens += await self._token_ids({"prompt": given, "add_special_tokens": False})
            return {"prompt": tokens}
        if not given:
            return {"messages": messages}
        return {
            "messages": [*messages, {"role": "assistant", "content": given}],
            # SGLang and vLLM know the first; vLLM wants the second with it.
            "continue_final_message": True,
            "add_generation_prompt": False,
        }

    async def check_continues(self, prompt: str, given: str) -> None:
        """Check that the server has the model continue the beginning of an answer.

        A server that does not know how closes the turn and opens another: that makes more tokens than the same text
        at the end of the user's message does.

        Raises:
            RequestError: it does not, or refuses.
        """
        try:
            continued = await self.prompt_tokens(prompt, given)
        except RequestError as error:
            if not error.refused:
                raise
            raise RequestError(f"{_NOT_CONTINUED} ({error})", error.status) from error
        if continued > await self.prompt_tokens(prompt + given) + SEAM_TOKENS:
            raise RequestError(_NOT_CONTINUED)

    async def _token_ids(self, content: Mapping[str, Any]) -> list[int]:
        tokens = (await self._json("/v1/tokenize", {"model": self._model, **content})).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise RequestError("the server's /v1/tokenize does not tell the tokens of messages (--api tokens)")
        return tokens

    async def ask(self, prompt: Prompt, max_tokens: int) -> Answer:
        """Stream one answer to what ``prepared`` gave, greedily, and time it.

        Raises:
            RequestError: the server refused, failed, took longer than the timeout, or ended the stream early.
        """
        body = self._body(prompt, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        streamed = StreamedAnswer()
        async with self._limits_of_one_request():
            started = time.perf_counter()
            stream = await self._sdk.post(
                self._api.path, cast_to=object, body=body, stream=True, stream_cls=openai.AsyncStream[object]
            )
            async with stream:
                async for chunk in stream:
                    streamed.add(chunk, time.perf_counter())
            return streamed.answer(started, time.perf_counter())

    def _body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, "temperature": 0, **prompt}
        if self.attention is not None:
            body["attention"] = self.attention
        return body

    async def _json(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Post ``body``, or get ``path`` if there is none."""
        async with self._limits_of_one_request():
            if body is None:
                response = await self._sdk.get(path, cast_to=httpx.Response)
            else:
                response = await self._sdk.post(path, cast_to=httpx.Response, body=body)
            parsed = json.loads(response.text)
        if not isinstance(parsed, dict):
            raise RequestError(f"the server sent what is not a JSON object: {shortened(response.text)}")
        return parsed

    @asynccontextmanager
    async def _limits_of_one_request(self) -> AsyncIterator[None]:
        """Turn everything that can go wrong on the way into a RequestError."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise RequestError(f"no complete answer within {self._timeout:g} s (--timeout)") from error
        except openai.APIStatusError as error:
            raise _status_error(error.response) from error
        except openai.APIConnectionError as error:
            raise self._network_error(error.__cause__ or error) from error
        except openai.APIError as error:
            raise RequestError(f"error during the stream: {error_text(error.body)}") from error
        except httpx.HTTPError as error:
            raise self._network_error(error) from error
        except json.JSONDecodeError as error:
            raise RequestError(f"the server sent what is not JSON: {shortened(error.doc)}") from error

    def _network_error(self, error: BaseException) -> RequestError:
        if isinstance(error, httpx.ConnectError):
            return RequestError(f"cannot connect to {self.url}: {error}")
        return RequestError(f"request to {self.url} failed: {type(error).__name__} {error}".rstrip())


def _status_error(response: httpx.Response) -> RequestError:
    try:
        text = error_text(response.json())
    except ValueError:
        text = shortened(response.text)
    return RequestError(f"HTTP {response.status_code}: {text}", status=response.status_code)
