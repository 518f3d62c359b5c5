"""Policies in ``/v1/responses`` and ``/v1/messages``: each answers as the chat form does, and says what it cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.runtime import Runtime
from tests.sglang_ext.conftest import SERVED_MODEL as MODEL

FORMS = ("/v1/responses", "/v1/messages")
STREAMING = {"decode": {"policy": "streaming_llm", "window": 16}}
TEXT = "abc " * 60
TOKENS = 6
UNKNOWN = "attention.decode.policy: must be one of"


@pytest.fixture(scope="module")
def http(small_server: Runtime) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small_server.url, timeout=60) as client:
        yield client


def body(form: str, policy: Any = STREAMING, **more: Any) -> dict[str, Any]:
    # SGLang gives two tokens less than the responses form asks for.
    own = (
        {"input": TEXT, "max_output_tokens": TOKENS + 2}
        if form == "/v1/responses"
        else {"messages": [{"role": "user", "content": TEXT}], "max_tokens": TOKENS}
    )
    custom = {} if policy is None else {"custom_params": {"attention": json.dumps(policy)}}
    return {"model": MODEL, "temperature": 0} | own | custom | more


def post(http: httpx.Client, path: str, content: Any) -> Any:
    answer = http.post(path, json=content)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, form: str, content: Any) -> list[Any]:
    with http.stream("POST", form, json=content | {"stream": True}) as response:
        return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: {")]


def as_chat(http: httpx.Client, policy: Any) -> Any:
    custom = {} if policy is None else {"custom_params": {"attention": json.dumps(policy)}}
    messages = [{"role": "user", "content": TEXT}]
    return post(
        http,
        "/v1/chat/completions",
        {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": TOKENS} | custom,
    )


def text_of(form: str, answer: Any) -> str:
    content = answer["output"][0]["content"] if form == "/v1/responses" else answer["content"]
    text: str = content[0]["text"]
    return text


def without_cached(cost: Any) -> Any:
    """Return a cost without what depends on the requests before."""
    return cost | {"prefill": cost["prefill"]["policy"]}


@pytest.mark.parametrize("policy", [None, {}, STREAMING])
@pytest.mark.parametrize("form", FORMS)
def test_it_answers_as_the_chat_form(http: httpx.Client, form: str, policy: Any) -> None:
    chat = as_chat(http, policy)
    answer = post(http, form, body(form, policy))
    assert text_of(form, answer) == chat["choices"][0]["message"]["content"]
    assert without_cached(answer["attention"]) == without_cached(chat["attention"])
    steps = answer["attention"]["decode"]["steps"]
    assert steps == TOKENS - 1
    assert (answer["attention"]["decode"]["attended_ratio"] < 0.5) == (policy == STREAMING)


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_has_the_cost_once_at_its_end(http: httpx.Client, form: str) -> None:
    whole = post(http, form, body(form))
    received = events(http, form, body(form))
    (position,) = [number for number, event in enumerate(received) if '"attention":' in json.dumps(event)]
    last = received[position]
    # A message ends with an event that says that it has ended.
    assert position == len(received) - (1 if form == "/v1/responses" else 2)
    cost = last["response"]["attention"] if form == "/v1/responses" else last["attention"]
    assert without_cached(cost) == without_cached(whole["attention"])
    if form == "/v1/responses":
        assert text_of(form, last["response"]) == text_of(form, whole)
    else:
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("custom", "message"),
    [
        ({"attention": json.dumps({"decode": {"policy": "quess"}})}, UNKNOWN),
        ({"attention": {"decode": {"policy": "quest"}}}, "custom_params"),
        ({"attention": json.dumps({"decode": {"policy": "delta"}})}, "attention.decode.delta_layers: "),
        ("quest", "custom_params"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_policy_that_is_not_served_is_refused(
    http: httpx.Client, form: str, custom: Any, message: str, stream: bool
) -> None:
    answer = http.post(form, json=body(form, None, custom_params=custom, stream=stream))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_fetched_later_has_its_cost(http: httpx.Client, stream: bool) -> None:
    form = "/v1/responses"
    first = events(http, form, body(form))[-1]["response"] if stream else post(http, form, body(form))
    assert http.get(f"{form}/{first['id']}").json()["attention"] == first["attention"]
    following = post(http, form, body(form, input="more", previous_response_id=first["id"]))
    context = first["attention"]["decode"]["context_tokens"]
    assert following["attention"]["decode"]["context_tokens"] > context


def test_a_response_in_the_background_has_its_cost(http: httpx.Client) -> None:
    form = "/v1/responses"
    queued = post(http, form, body(form, background=True))
    assert "attention" not in queued
    deadline = time.monotonic() + 30
    while (response := http.get(f"{form}/{queued['id']}").json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < deadline, response
        time.sleep(0.1)
    assert response["attention"]["decode"]["policy"] == "streaming_llm"
