"""What a client sees of a real runtime behind the service."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import openai
import pytest

from tests.end_to_end.deployment import Deployment
from tests.service.test_streaming import events

MODEL = "needle"
PROMPT = "The morning was quiet and the harbor was empty."
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
LONG_ANSWER = 20_000
# SGLang looks for a closed connection every 4 seconds when an answer is not streamed, and 2 seconds after when it is.
ABORT_SECONDS = 10


@pytest.fixture
def client(deployment: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{deployment.address}/v1", api_key="none", max_retries=0, timeout=120)


def post(deployment: Deployment, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(deployment.address + path, json=body, timeout=120)


def long_prompt() -> str:
    return "the quiet harbor " * 30_000


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 32_768
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.models.retrieve("nothing")


def test_chat_streamed_and_whole_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0, stream=True)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_completions_streamed_and_whole_are_the_same(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True}
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0, extra_body=extra)
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0, stream=True, extra_body=extra
    )
    chunks = [chunk for chunk in stream if chunk.choices]
    assert len(chunks) > 4
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_native_streamed_and_whole_are_the_same(deployment: Deployment) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}}
    whole = post(deployment, "/generate", body).json()
    streamed = events(post(deployment, "/generate", {**body, "stream": True}).text)
    assert whole["meta_info"]["completion_tokens"] == 16
    assert streamed[-1] == "[DONE]"
    assert streamed[-2]["output_ids"] == whole["output_ids"]
    assert len(streamed) > 5


def test_the_service_gives_what_the_runtime_gives(deployment: Deployment) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}}
    direct = httpx.post(f"{deployment.runtime_address}/generate", json=body, timeout=120).json()
    assert post(deployment, "/generate", body).json()["output_ids"] == direct["output_ids"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokenize_counts_what_the_runtime_reads(deployment: Deployment, path: str) -> None:
    counted = post(deployment, path, {"model": MODEL, "messages": MESSAGES}).json()["count"]
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    assert post(deployment, "/v1/chat/completions", chat).json()["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_400_in_openai_forms(client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": long_prompt()}]
    with pytest.raises(openai.BadRequestError, match=r"longer than the model's context length \(32768 tokens\)"):
        client.chat.completions.create(model=MODEL, messages=messages, stream=stream)
    with pytest.raises(openai.BadRequestError, match=r"longer than the model's context length \(32768 tokens\)"):
        client.completions.create(model=MODEL, prompt=long_prompt(), stream=stream)


def test_a_prompt_longer_than_the_context_is_refused_in_the_native_form(deployment: Deployment) -> None:
    answer = post(deployment, "/generate", {"text": long_prompt()})
    assert answer.status_code == 400
    assert "context length (32768 tokens)" in answer.json()["error"]["message"]

    # SGLang has sent status 200 before it sees the length.
    answer = post(deployment, "/generate", {"text": long_prompt(), "stream": True})
    assert answer.status_code == 200
    error, done = events(answer.text)
    assert "context length (32768 tokens)" in error["error"]["message"]
    assert error["error"]["code"] == 400
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": LONG_ANSWER, "ignore_eos": True}}),
        ("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": LONG_ANSWER, "ignore_eos": True}),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": LONG_ANSWER, "ignore_eos": True}),
    ],
)
async def test_a_client_that_leaves_frees_the_runtime(
    deployment: Deployment, path: str, body: dict[str, Any], stream: bool
) -> None:
    deployment.wait_for_requests(0, ABORT_SECONDS)
    async with httpx.AsyncClient(timeout=120) as client:
        waiting = asyncio.create_task(client.post(deployment.address + path, json={**body, "stream": stream}))
        await asyncio.to_thread(deployment.wait_for_requests, 1, 30)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.to_thread(deployment.wait_for_requests, 0, ABORT_SECONDS)


async def test_two_hundred_requests_at_once(deployment: Deployment) -> None:
    forms: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}}),
        ("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}),
        ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}, "stream": True}),
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=deployment.address, timeout=120, limits=limits) as client:
        answers = await asyncio.gather(*(client.post(path, json=body) for path, body in forms * 50))
    assert [answer.status_code for answer in answers] == [200] * 200
    for answer in answers:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert events(answer.text)[-1] == "[DONE]"
        else:
            assert "error" not in answer.json()


def test_garbage_is_refused_and_the_runtime_lives(deployment: Deployment) -> None:
    rng = random.Random(0)
    garbage = rng.randbytes(1024 * 1024)
    headers = {"content-type": "application/json"}
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/tokenize"):
        answer = httpx.post(deployment.address + path, content=garbage, headers=headers, timeout=120)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"
    # Garbage that is valid JSON reaches the runtime's own checks.
    text = "".join(chr(rng.randrange(32, 0xD000)) for _ in range(350_000))
    bodies: list[tuple[str, Any]] = [
        ("/generate", {"text": text}),
        ("/generate", {}),
        ("/generate", {"text": 5}),
        ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": -1}}),
        ("/v1/completions", {"model": MODEL, "prompt": text}),
        ("/v1/chat/completions", {"model": MODEL, "messages": text}),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": "many"}),
    ]
    for path, body in bodies:
        answer = post(deployment, path, body)
        assert 400 <= answer.status_code < 500, f"{path} {json.dumps(body)[:80]}: {answer.status_code} {answer.text}"
    assert post(deployment, "/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {"input_ids": [99_999_999]}, "input_ids: token ids must be from 0 to 6271"),
        ("/generate", {"input_ids": [-1]}, "input_ids: token ids must be from 0 to 6271"),
        ("/v1/completions", {"model": MODEL, "prompt": [99_999_999]}, "token ids must be from 0 to 6271"),
        (
            "/generate",
            {"text": PROMPT, "sampling_params": {"temperature": -1}},
            "sampling_params.temperature: Input should be greater than or equal to 0",
        ),
    ],
)
def test_what_would_end_the_runtime_is_refused_by_name(
    deployment: Deployment, path: str, body: dict[str, Any], message: str
) -> None:
    answer = post(deployment, path, body)
    assert answer.status_code == 400
    # The native form wraps the message in {"error": ...}, the OpenAI forms do not.
    assert message in answer.text
    assert post(deployment, "/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}}).status_code == 200
