"""What decode steps attend to, explained by a real server with the shipped model."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.end_to_end.deployment import Deployment
from tests.models import NEEDLE
from winnow_evaluation.tasks import TASKS

SINKS, WINDOW = 4, 64
STREAMING: dict[str, Any] = {"decode": {"policy": "streaming_llm", "sinks": SINKS, "window": WINDOW}}
QUEST: dict[str, Any] = {"decode": {"policy": "quest", "budget": 128}}
PROMPT = TASKS["niah_multikey_1"].make(random.Random(2), 300).prompt


def explain(deployment: Deployment, **question: Any) -> httpx.Response:
    return httpx.post(f"{deployment.address}/v1/attention:explain", json=question, timeout=280)


def positions(entry: dict[str, Any]) -> list[int]:
    return [position for begin, end in entry["attended"] for position in range(begin, end)]


@pytest.fixture(scope="module")
def explained(deployment: Deployment) -> dict[str, Any]:
    """A text under four policies, one of them by name."""
    answer = explain(
        deployment,
        prompt=PROMPT,
        policies=["exact", STREAMING, QUEST, {"decode": {"policy": "lowbit_top_p", "p": 0.5}}],
        decode_steps=2,
        layers=[0, 5, 11],
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_offsets_are_those_of_the_tokenizer(explained: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(NEEDLE)
    encoded = tokenizer(PROMPT, return_offsets_mapping=True)
    assert explained["prompt"] == {"text": PROMPT, "offsets": [list(place) for place in encoded["offset_mapping"]]}
    assert (explained["steps"], explained["layers"], explained["heads"]) == ([1, 2], [0, 5, 11], [0, 1])


def test_weights_and_shares_agree(explained: dict[str, Any]) -> None:
    prompt_tokens = len(explained["prompt"]["offsets"])
    for policy in explained["policies"]:
        # An answer that misses its needle may end before its third token.
        steps = range(1, policy["decode_steps"] + 1)
        assert len(steps) in {1, 2}
        assert policy["missing_steps"] == list(range(len(steps) + 1, 3))
        combinations = [(entry["step"], entry["layer"], entry["head"]) for entry in policy["entries"]]
        assert combinations == [(step, layer, head) for step in steps for layer in (0, 5, 11) for head in (0, 1)]
        for entry in policy["entries"]:
            weights, attended = entry["weights"], positions(entry)
            assert len(weights) == prompt_tokens + entry["step"]
            assert sum(weights) == pytest.approx(1, abs=1e-3)
            assert entry["share"] == pytest.approx(sum(weights[position] for position in attended), abs=1e-3)
            assert entry["attended_tokens"] == len(attended)


def test_positions_are_those_that_the_policy_selects(explained: dict[str, Any]) -> None:
    dense, streaming, quest, lowbit = explained["policies"]
    assert (dense["policy"], streaming["policy"]) == ("exact", None)
    for entry in dense["entries"]:
        assert entry["dense"]
        assert entry["attended"] == [[0, len(entry["weights"])]]
        assert entry["share"] == 1
    for entry in streaming["entries"]:
        length = len(entry["weights"])
        assert not entry["dense"]
        assert positions(entry) == [*range(SINKS), *range(length - WINDOW, length)]
    for entry in quest["entries"]:
        # Its first two layers are dense.
        assert (entry["attended_tokens"] <= 128) == (entry["layer"] >= 2)
    assert any(entry["share"] < 0.99 for entry in lowbit["entries"])


def test_tokens_are_unchanged(explained: dict[str, Any], deployment: Deployment) -> None:
    for policy in explained["policies"]:
        parameters = {"temperature": 0, "max_new_tokens": 3}
        body = {"text": PROMPT, "sampling_params": parameters, "attention": policy["attention"]}
        plain = httpx.post(f"{deployment.address}/generate", json=body, timeout=280).json()
        assert policy["output"]["text"].startswith(plain["text"])
        assert policy["decode_steps"] == plain["meta_info"]["completion_tokens"] - 1
        assert "explain" not in plain["attention"]
        assert policy["statistics"]["decode"] == plain["attention"]["decode"]


def test_a_conversation_is_explained_as_the_model_reads_it(deployment: Deployment) -> None:
    messages = [{"role": "user", "content": "What is <b>this</b>? \N{ROCKET} Naïve."}]
    answer = explain(deployment, messages=messages, policies=["exact"], decode_steps=8, layers=[3], heads=[1])
    assert answer.status_code == 200, answer.text
    found = answer.json()
    tokenizer = AutoTokenizer.from_pretrained(NEEDLE)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert found["prompt"]["text"] == text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert found["prompt"]["offsets"] == [list(place) for place in encoded["offset_mapping"]]
    [policy] = found["policies"]
    steps = [step for step in (1, 8) if step <= policy["decode_steps"]]
    assert policy["missing_steps"] == [step for step in (1, 8) if step not in steps]
    assert [(each["step"], each["layer"], each["head"]) for each in policy["entries"]] == [
        (step, 3, 1) for step in steps
    ]
    plain = httpx.post(
        f"{deployment.address}/v1/chat/completions",
        json={"model": "needle", "messages": messages, "temperature": 0, "max_tokens": 9},
        timeout=280,
    ).json()
    assert policy["output"]["text"].startswith(plain["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"layers": [12]}, "layers: must be at most 11; there is no layer 12"),
        ({"heads": [2]}, "heads: must be at most 1, KV heads; there is no head 2"),
        (
            {"prompt": "word " * 8000, "decode_steps": 8, "steps": [1, 2, 3], "layers": list(range(12))},
            "steps: steps, layers, heads and tokens must multiply to at most 262144; 3 steps, 12 layers, 2 heads and",
        ),
        ({"policies": ["lossless"]}, "policies.0.verify: is not explained: the answer is dense attention's"),
        (
            {"policies": [{"decode": {"policy": "snapkv", "release": True}}]},
            "policies.0.decode.release: is not explained: the prompt is gone when its steps run",
        ),
    ],
)
def test_what_is_not_explained_is_refused(deployment: Deployment, question: dict[str, Any], message: str) -> None:
    answer = explain(deployment, **{"prompt": "a prompt", "policies": ["exact"]} | question)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"].startswith(message)


def test_the_runtime_itself_refuses_what_it_does_not_explain(deployment: Deployment) -> None:
    asked = '{"steps": [1], "layers": [0], "heads": [0]}'
    custom = {"attention_explain": asked}
    one = {"text": "a prompt", "sampling_params": {"max_new_tokens": 4, "custom_params": custom}}
    several = one | {"sampling_params": {"max_new_tokens": 4, "custom_params": custom, "n": 2}}
    released = '{"decode": {"policy": "snapkv", "release": true}}'
    gone = one | {"sampling_params": {"max_new_tokens": 4, "custom_params": custom | {"attention": released}}}
    for body, message in (
        (several, "sampling_params.n must be 1"),
        (one | {"text": ["one", "two"]}, "is for a single prompt"),
        (gone, "must not be given together with attention.decode.release"),
        ({"text": "a", "sampling_params": {"custom_params": {"attention_explain": "{}"}}}, "attention_explain.steps: "),
    ):
        answer = httpx.post(f"{deployment.runtime_address}/generate", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert message in answer.text
    form = {"model": "needle", "input": "a", "custom_params": custom}
    refused = httpx.post(f"{deployment.runtime_address}/v1/responses", json=form, timeout=60)
    assert refused.status_code == 400
    assert "attention_explain: is not served in this form" in refused.text
