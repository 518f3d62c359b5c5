"""Requests that choose their attention, through the service, on the shipped model."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import openai
import pytest

from tests.end_to_end.deployment import FAR, NEAR, Deployment
from tests.end_to_end.test_answers import EXAMPLE, EXAMPLE_ANSWER
from winnow_evaluation.tasks import TASKS

WORDS = 4000
SPARSE: dict[str, dict[str, Any]] = {
    "quest": {"decode": {"policy": "quest", "budget": 1024}},
    "snapkv": {"decode": {"policy": "snapkv", "budget": 1024}},
    "delta": {"decode": {"policy": "delta", "budget": 1024}},
    "tactic": {"decode": {"policy": "tactic", "p": 0.9}},
    "lowbit_top_p": {"decode": {"policy": "lowbit_top_p", "p": 0.9}},
    "lowbit_top_k": {"decode": {"policy": "lowbit_top_k", "budget": 1024}},
}


@pytest.fixture
def client(deployment: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{deployment.address}/v1", api_key="none", max_retries=0, timeout=280)


def test_policies_find_the_answer_and_say_what_it_cost(client: openai.OpenAI) -> None:
    sample = TASKS["niah_multikey_1"].make(random.Random(2), WORDS)
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": sample.prompt}]
    for name, policy in SPARSE.items():
        answer = client.chat.completions.create(
            model="needle", messages=messages, temperature=0, max_tokens=32, extra_body={"attention": policy}
        )
        assert answer.choices[0].message.content == sample.questions[0].answer, name
        cost = (answer.model_extra or {})["attention"]
        assert cost["decode"]["policy"] == name
        assert cost["decode"]["attended_ratio"] < 0.8, (name, cost)
        assert cost["decode"]["dense_steps"] == 0, (name, cost)
        assert cost["prefill"]["attended_ratio"] in (1, None)


def test_a_request_that_names_a_quality_gets_the_cheapest_policy_that_keeps_it(client: openai.OpenAI) -> None:
    sample = TASKS["niah_multikey_1"].make(random.Random(3), WORDS)
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": sample.prompt}]
    asked: list[tuple[Any, dict[str, Any]]] = [
        ("auto", NEAR),
        ({"quality": {"kl": 0.05}}, FAR),
        ({"quality": {"top1": 0.95}}, NEAR),
        ({"quality": {"kl": 0.001}}, {"decode": {"policy": "dense"}}),
    ]
    for attention, chosen in asked:
        answer = client.chat.completions.create(
            model="needle", messages=messages, temperature=0, max_tokens=32, extra_body={"attention": attention}
        )
        cost = (answer.model_extra or {})["attention"]
        assert cost["quality"]["chosen"]["decode"].items() >= chosen["decode"].items()
        assert cost["decode"]["policy"] == chosen["decode"]["policy"]
        if attention != {"quality": {"kl": 0.05}}:
            assert answer.choices[0].message.content == sample.questions[0].answer, attention


def test_sparse_prefill_answers_the_example_of_the_readme(deployment: Deployment) -> None:
    body = json.loads(EXAMPLE.read_text()) | {"attention": {"prefill": {"policy": "quoka", "budget_ratio": 0.25}}}
    response = httpx.post(f"{deployment.address}/v1/chat/completions", json=body, timeout=280)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == EXAMPLE_ANSWER
    assert answer["attention"]["prefill"]["attended_ratio"] < 0.5


def test_a_stream_ends_with_what_it_cost(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="needle",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        stream=True,
        extra_body={"attention": SPARSE["quest"]},
    )
    costs = [cost for chunk in stream if (cost := (chunk.model_extra or {}).get("attention"))]
    assert [cost["decode"]["policy"] for cost in costs] == ["quest"]


def test_responses_and_messages_find_the_answer_and_say_what_it_cost(
    client: openai.OpenAI, deployment: Deployment
) -> None:
    sample = TASKS["niah_multikey_1"].make(random.Random(2), WORDS)
    asked = {"attention": SPARSE["quest"]}
    response = client.responses.create(
        model="needle", input=sample.prompt, temperature=0, max_output_tokens=32, extra_body=asked
    )
    assert response.output_text == sample.questions[0].answer
    message = httpx.post(
        f"{deployment.address}/v1/messages",
        json={
            "model": "needle",
            "messages": [{"role": "user", "content": sample.prompt}],
            "temperature": 0,
            "max_tokens": 32,
        }
        | asked,
        timeout=280,
    ).json()
    assert message["content"][0]["text"] == sample.questions[0].answer
    for cost in ((response.model_extra or {})["attention"], message["attention"]):
        assert cost["decode"]["policy"] == "quest"
        assert cost["decode"]["attended_ratio"] < 0.8


def test_their_streams_end_with_what_it_cost(client: openai.OpenAI, deployment: Deployment) -> None:
    asked = {"attention": SPARSE["quest"]}
    with client.responses.create(
        model="needle", input="hello", max_output_tokens=8, stream=True, extra_body=asked
    ) as stream:
        received = list(stream)
    last = received[-1]
    # Until 0.5.19 SGLang calls an answer completed whose tokens are used up.
    assert last.type in ("response.completed", "response.incomplete")
    assert (last.response.model_extra or {})["attention"]["decode"]["policy"] == "quest"
    body = {"model": "needle", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{deployment.address}/v1/messages", json=body | asked, timeout=280) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-2] == "event: message_stop"
    costs = [cost for line in lines if line.startswith("data: ") and (cost := json.loads(line[6:]).get("attention"))]
    assert [cost["decode"]["policy"] for cost in costs] == ["quest"]


def test_a_policy_that_the_model_cannot_serve_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match=r"attention\.decode\.delta_layers: .*at most 11"):
        client.chat.completions.create(
            model="needle",
            messages=[{"role": "user", "content": "hello"}],
            extra_body={"attention": {"decode": {"policy": "delta", "delta_layers": [2, 12]}}},
        )
