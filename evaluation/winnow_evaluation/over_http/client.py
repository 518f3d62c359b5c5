"""An OpenAI-compatible server, as the evaluation sees it: models, token counts, timed answers."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import httpx

_CONNECT_SECONDS = 10.0
# Below the 5 s after which uvicorn, the usual server, drops an idle connection: a request never meets a closing one.
_IDLE_CONNECTION_SECONDS = 2.0
_ERROR_CHARACTERS = 300
_SEAM_TOKENS = 2
_NOT_CONTINUED = (
    "the server does not let a chat's answer begin with a given text (continue_final_message): "
    "ask it with --api tokens or --api completions"
)


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


class RequestError(Exception):
    """A request that gave no answer.

    Attributes:
        status: the HTTP status, when the server answered with an error before streaming began.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """Whether the server refused the request for what it asked, as it does with a prompt that is too long."""
        return self.status in (
            HTTPStatus.BAD_REQUEST,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
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


@dataclass(frozen=True)
class Answer:
    """A streamed answer and its times in seconds.

    Attributes:
        latency: from sending the request to the end of the stream.
        ttft: from sending the request to the first token.
        tpot: between the first and the last token, divided by the number of tokens after the first; None when there
            are none, or when the server does not count its tokens.
        attention: the ``attention`` object of the response, if there was one.
    """

    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    latency: float
    ttft: float | None
    tpot: float | None
    attention: Mapping[str, Any] | None


@dataclass
class _StreamState:
    """What has been read of a stream so far; times as of ``time.perf_counter``."""

    pieces: list[str] = field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    attention: Mapping[str, Any] | None = None

    def add(self, chunk: Mapping[str, Any], now: float) -> None:
        if "error" in chunk:
            raise RequestError(f"error during the stream: {_error_text(chunk)}")
        self.usage = chunk.get("usage") or self.usage
        choices = chunk.get("choices") or [{}]
        choice = choices[0]
        text, thought = _texts(choice)
        self.pieces.append(text)
        if text or thought:
            self.first_token = self.first_token or now
            self.last_token = now
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.attention = _attention(chunk) or self.attention

    def answer(self, started: float, ended: float) -> Answer:
        if self.finish_reason is None:
            raise RequestError("the stream ended before the answer did")
        if self.finish_reason == "abort":
            raise RequestError("the server aborted the request")
        tokens = _count(self.usage, "completion_tokens")
        tpot = None
        if self.first_token is not None and self.last_token is not None and tokens is not None and tokens > 1:
            tpot = (self.last_token - self.first_token) / (tokens - 1)
        return Answer(
            text="".join(self.pieces),
            finish_reason=self.finish_reason,
            prompt_tokens=_count(self.usage, "prompt_tokens"),
            completion_tokens=tokens,
            latency=ended - started,
            ttft=None if self.first_token is None else self.first_token - started,
            tpot=tpot,
            attention=self.attention,
        )


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
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(None, connect=min(timeout, _CONNECT_SECONDS)),
            limits=httpx.Limits(
                max_connections=connections,
                max_keepalive_connections=connections,
                keepalive_expiry=_IDLE_CONNECTION_SECONDS,
            ),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

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
        listed = (await self._json("GET", "/v1/models")).get("data")
        served = [
            ServedModel(name=each["id"], max_tokens=_count(each, "max_model_len"))
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
        told: dict[str, Any] = {}
        for path in ("/server_info", "/version"):
            try:
                told = await self._json("GET", path)
                break
            except RequestError:
                continue
        device, version = told.get("device"), told.get("version")
        return ServerFacts(
            device=device if isinstance(device, str) else None,
            version=version if isinstance(version, str) else None,
        )

    async def tokenize(self, text: str) -> int | None:
        """How many tokens the text alone has; None if the server has no ``/tokenize``."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        for path in ("/tokenize", "/v1/tokenize"):
            try:
                return _count(await self._json("POST", path, body), "count")
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
        tokens = _count(answer.get("usage") or {}, "prompt_tokens")
        if tokens is None:
            raise RequestError("the server's answers have no usage.prompt_tokens: lengths cannot be measured")
        return tokens

    async def told_attention(self, prompt: str) -> Mapping[str, Any] | None:
        """What the server tells of the attention of a request with this prompt; None if it tells nothing.

        Raises:
            RequestError: it was refused or failed.
        """
        return _attention(await self._one_token(prompt))

    async def _one_token(self, prompt: str, given: str = "") -> dict[str, Any]:
        return await self._json("POST", self._path, self._body(await self.prepared(prompt, given), max_tokens=1))

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
        if continued > await self.prompt_tokens(prompt + given) + _SEAM_TOKENS:
            raise RequestError(_NOT_CONTINUED)

    async def _token_ids(self, content: Mapping[str, Any]) -> list[int]:
        tokens = (await self._json("POST", "/v1/tokenize", {"model": self._model, **content})).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise RequestError("the server's /v1/tokenize does not tell the tokens of messages (--api tokens)")
        return tokens

    async def ask(self, prompt: Prompt, max_tokens: int) -> Answer:
        """Stream one answer to what ``prepared`` gave, greedily, and time it.

        Raises:
            RequestError: the server refused, failed, took longer than the timeout, or ended the stream early.
        """
        body = self._body(prompt, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        state = _StreamState()
        async with self._limits_of_one_request():
            started = time.perf_counter()
            async with self._http.stream("POST", self._path, json=body) as response:
                if response.status_code != HTTPStatus.OK:
                    await response.aread()
                    raise _status_error(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        break
                    state.add(_json_object(data), time.perf_counter())
            return state.answer(started, time.perf_counter())

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._api is Api.CHAT else "/v1/completions"

    def _body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, "temperature": 0, **prompt}
        if self.attention is not None:
            body["attention"] = self.attention
        return body

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with self._limits_of_one_request():
            response = await self._http.request(method, path, json=body)
        if response.status_code != HTTPStatus.OK:
            raise _status_error(response)
        return _json_object(response.text)

    @asynccontextmanager
    async def _limits_of_one_request(self) -> AsyncIterator[None]:
        """Turn everything that can go wrong on the way into a RequestError."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise RequestError(f"no complete answer within {self._timeout:g} s (--timeout)") from error
        except httpx.ConnectError as error:
            raise RequestError(f"cannot connect to {self.url}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RequestError(f"request to {self.url} failed: {type(error).__name__} {error}".rstrip()) from error


def _texts(choice: Mapping[str, Any]) -> tuple[str, str]:
    """The answer's text and the reasoning text in one chunk of either API."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or "", delta.get("reasoning_content") or ""


def _attention(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``attention`` object of an answer or a chunk of one, or of its first choice; of a list of them the first."""
    for holder in (answer, *(answer.get("choices") or ())[:1]):
        attention = holder.get("attention")
        if isinstance(attention, list) and attention:
            attention = attention[0]
        if isinstance(attention, Mapping) and attention:
            return attention
    return None


def _count(holder: Mapping[str, Any], field_name: str) -> int | None:
    number = holder.get(field_name)
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _json_object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"the server sent what is not JSON: {_shortened(text)}") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"the server sent what is not a JSON object: {_shortened(text)}")
    return parsed


def _status_error(response: httpx.Response) -> RequestError:
    try:
        text = _error_text(response.json())
    except ValueError:
        text = _shortened(response.text)
    return RequestError(f"HTTP {response.status_code}: {text}", status=response.status_code)


def _error_text(body: Any) -> str:
    """The message in an error of OpenAI's, SGLang's or FastAPI's form."""
    for name in ("error", "message", "detail"):
        if isinstance(body, Mapping) and body.get(name):
            return _error_text(body[name])
    return _shortened(body if isinstance(body, str) else json.dumps(body))


def _shortened(text: str) -> str:
    return text if len(text) <= _ERROR_CHARACTERS else f"{text[:_ERROR_CHARACTERS]}..."
