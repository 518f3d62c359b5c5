"""The ``attention`` field, on its way to the runtime and back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.policy_strategies import valid_policies
from tests.service.conftest import Deployment
from tests.service.test_forwarding import key, samples
from tests.service.test_streaming import events
from tests.service.waiting import eventually
from winnow_evaluation.over_http.client import OpenAIClient
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES
from winnow_service.policies.presets import PRESETS
from winnow_service.proxy.attention_field import place_policies, read_policies
from winnow_service.proxy.body import Form

ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
OPENAI_ROUTES = ROUTES[1:]
QUEST = {"decode": {"policy": "quest", "budget": 512}}
TACTIC = {"decode": {"policy": "tactic"}}
DELTA = {"decode": {"policy": "delta"}}
SERVED = {
    "layers": 12,
    "context_length": 32768,
    "delta_layers": [2, 6],
    "policies": list(DECODE_POLICIES),
    "prefill_policies": list(PREFILL_POLICIES),
    "verifies": True,
}
DENSE_ALONE = {"policies": ["dense"], "prefill_policies": ["dense"]}
STATISTICS = {"decode": {"policy": "quest", "steps": 3, "attended_ratio": 0.25}, "warnings": []}
COUNTER = "winnow_requests_by_decode_policy_total"


@pytest_asyncio.fixture
async def policies(service: Deployment) -> Deployment:
    """A service whose runtime serves policies."""
    service.runtime.server_info = {"winnow": SERVED, "version": "0"}
    return service


def canonical(policy: dict[str, Any]) -> str:
    return parse_policy(policy).canonical()


def forwarded(deployment: Deployment) -> Any:
    """The body of the one request that the runtime got."""
    [asked] = deployment.runtime.asked
    return json.loads(asked.body)


def custom_params(route: str, body: dict[str, Any]) -> Any:
    return (body["sampling_params"] if route == "/generate" else body)["custom_params"]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_policy_reaches_the_runtime_in_custom_params(policies: Deployment, route: str) -> None:
    body = {"text": "x", "sampling_params": {"temperature": 0.1}, "max_tokens": 5}
    assert (await policies.client.post(route, json={**body, "attention": QUEST})).status_code == 200
    got = forwarded(policies)
    assert custom_params(route, got) == {"attention": canonical(QUEST)}
    del (got["sampling_params"] if route == "/generate" else got)["custom_params"]
    assert got == body


@pytest.mark.parametrize("route", ROUTES)
async def test_other_custom_params_are_kept(policies: Deployment, route: str) -> None:
    own = {"custom_params": {"mine": [1, 2]}}
    body = {"sampling_params": own} if route == "/generate" else own
    await policies.client.post(route, json={**body, "attention": QUEST})
    assert custom_params(route, forwarded(policies)) == {"mine": [1, 2], "attention": canonical(QUEST)}


@pytest.mark.parametrize("nothing", [{}, {"sampling_params": None}, {"sampling_params": {"custom_params": None}}])
async def test_absent_and_null_parameters_are_filled_in(policies: Deployment, nothing: dict[str, Any]) -> None:
    await policies.client.post("/generate", json={"text": "x", **nothing, "attention": QUEST})
    assert forwarded(policies)["sampling_params"] == {"custom_params": {"attention": canonical(QUEST)}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("attention", [b"", b', "attention": null'])
async def test_a_request_without_a_policy_is_passed_on_byte_by_byte(
    policies: Deployment, route: str, attention: bytes
) -> None:
    body = b'{ "text" : "caf\xc3\xa9",  "temperature": 0.10' + attention + b" }"
    await policies.client.post(route, content=body, headers={"content-type": "application/json"})
    assert policies.runtime.asked[0].body == body
    assert policies.runtime.server_info_asked == []
    assert (await samples(policies.client))[key(COUNTER, decode_policy="default")] == 1


@pytest.mark.parametrize(
    ("attention", "param", "says"),
    [
        ({"decode": {"policy": "quest", "budget": 15}}, "attention.decode.budget", "greater than or equal to 16"),
        ({"decode": {"policy": "quest", "p": 1}}, "attention.decode.p", "unknown field"),
        ({"decode": {"policy": "best"}}, "attention.decode.policy", "must be one of dense, streaming_llm"),
        ({"decode": {"policy": "delta", "delta_layers": [2, 12]}}, "attention.decode.delta_layers", "12 layers"),
        (
            {"decode": {"policy": "snapkv"}, "prefill": {"policy": "quoka", "dense_prefix": 40000}},
            "attention.prefill.dense_prefix",
            "at most 32768, the model's context length",
        ),
        (
            "quest",
            "attention",
            """there is no policy 'quest'; GET /v1/policies lists them, and {"decode": {"policy": """,
        ),
        ("quests", "attention", "there is no policy 'quests'; GET /v1/policies lists them"),
        ('{"decode": {"policy": "quest"}}', "attention", "must be an object"),
        (5, "attention", "must be an object"),
    ],
)
async def test_a_policy_that_cannot_be_served_is_refused(
    policies: Deployment, attention: Any, param: str, says: str
) -> None:
    for route, stream in itertools.product(ROUTES, (False, True)):
        answer = await policies.client.post(route, json={"text": "x", "stream": stream, "attention": attention})
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_policy", param)
        assert error["message"].startswith(f"{param}: ")
        assert says in error["message"]
    assert policies.runtime.asked == []
    assert not any(name == COUNTER for name, _ in await samples(policies.client))


@pytest.mark.parametrize(
    ("own", "param", "says"),
    [
        ({"attention": canonical(TACTIC)}, "attention", "not both"),
        ({"attention": None}, "attention", "not both"),
        ([], "custom_params", "must be an object"),
        ("text", "custom_params", "must be an object"),
    ],
)
async def test_custom_params_that_cannot_take_a_policy_are_refused(
    policies: Deployment, own: Any, param: str, says: str
) -> None:
    for route in ROUTES:
        body = {"sampling_params": {"custom_params": own}} if route == "/generate" else {"custom_params": own}
        answer = await policies.client.post(route, json={**body, "attention": QUEST})
        assert answer.status_code == 422
        assert answer.json()["error"]["param"].endswith(param)
        assert says in answer.json()["error"]["message"]
    assert policies.runtime.asked == []


async def test_a_policy_in_custom_params_alone_is_left_to_the_runtime(policies: Deployment) -> None:
    body = {"sampling_params": {"custom_params": {"attention": "anything"}}}
    assert (await policies.client.post("/generate", json=body)).status_code == 200
    assert forwarded(policies) == body


@pytest.mark.parametrize("route", ROUTES)
async def test_delta_gets_the_models_profile(policies: Deployment, route: str) -> None:
    await policies.client.post(route, json={"attention": DELTA})
    policy = parse_policy(custom_params(route, forwarded(policies))["attention"])
    assert policy == parse_policy({"decode": {"policy": "delta", "delta_layers": [2, 6]}})


async def test_delta_without_layers_or_a_profile_is_refused(policies: Deployment) -> None:
    policies.runtime.server_info = {"winnow": {**SERVED, "delta_layers": None}}
    answer = await policies.client.post("/generate", json={"attention": DELTA})
    assert answer.status_code == 422
    assert "no calibrated profile" in answer.json()["error"]["message"]


@pytest.mark.parametrize("prompts", [{"text": ["a", "b"]}, {"input_ids": [[1], [2]]}])
@pytest.mark.parametrize("given", [None, {"temperature": 0}, [{"temperature": 0}, None]])
async def test_a_batch_has_one_policy_or_one_for_each_prompt(
    policies: Deployment, prompts: dict[str, Any], given: Any
) -> None:
    body = {**prompts, "sampling_params": given}

    await policies.client.post("/generate", json={**body, "attention": QUEST})
    one = {"custom_params": {"attention": canonical(QUEST)}}
    expected = [{"temperature": 0, **one}, one] if isinstance(given, list) else {**(given or {}), **one}
    assert forwarded(policies)["sampling_params"] == expected

    policies.runtime.asked.clear()
    await policies.client.post("/generate", json={**body, "attention": [DELTA, {}]})
    first, second = forwarded(policies)["sampling_params"]
    rows = given if isinstance(given, list) else [given, given]
    resolved = canonical({"decode": {"policy": "delta", "delta_layers": [2, 6]}})
    assert first == {**(rows[0] or {}), "custom_params": {"attention": resolved}}
    assert second == {**(rows[1] or {}), "custom_params": {"attention": canonical({})}}

    found = await samples(policies.client)
    assert {name: found[key(COUNTER, decode_policy=name)] for name in ("quest", "delta", "dense")} == {
        "quest": 1,
        "delta": 1,
        "dense": 1,
    }


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"text": "a", "attention": [QUEST]}, "attention: a list is for a list of prompts"),
        ({"input_ids": [1, 2], "attention": [QUEST, QUEST]}, "attention: a list is for a list of prompts"),
        ({"text": ["a", "b"], "attention": [QUEST]}, "attention: 1 policies for 2 prompts"),
        ({"text": ["a"], "attention": [None]}, "attention.0: must be an object"),
        (
            {"text": ["a", "b"], "attention": [{}, {"decode": {"policy": "tactic", "p": 2}}]},
            "attention.1.decode.p: must be less than or equal to 1",
        ),
        (
            {"text": ["a", "b"], "attention": [{}, {"decode": {"policy": "delta", "delta_layers": [20]}}]},
            "attention.1.decode.delta_layers: must be at most 11",
        ),
        (
            {"text": ["a", "b"], "attention": [{}, {}], "sampling_params": [{}]},
            "sampling_params: 1 values for 2 prompts",
        ),
        ({"text": ["a"], "attention": {}, "sampling_params": ["x"]}, "sampling_params.0: must be an object"),
        ({"text": "a", "attention": {}, "sampling_params": "x"}, "sampling_params: must be an object"),
    ],
)
async def test_a_batch_that_does_not_fit_its_policies_is_refused(
    policies: Deployment, body: dict[str, Any], says: str
) -> None:
    answer = await policies.client.post("/generate", json=body)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith(says)
    assert policies.runtime.asked == []


@pytest.mark.parametrize("route", OPENAI_ROUTES)
async def test_the_openai_forms_take_one_policy(policies: Deployment, route: str) -> None:
    answer = await policies.client.post(route, json={"prompt": ["a", "b"], "attention": [QUEST, QUEST]})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "attention: must be an object"


async def test_the_rest_of_a_rewritten_body_keeps_its_values(policies: Deployment) -> None:
    values = '{"a": 12345678901234567890123, "b": 1e-7, "c": "é\\u2028\\"", "d": [0.1, -0.0, null], "e": {"": false}}'
    body = f'{{"rest": {values}, "attention": {{}}}}'.encode()
    await policies.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert forwarded(policies)["rest"] == json.loads(values)


# What the runtime tells.


async def test_the_runtime_is_asked_once_until_it_starts_anew(policies: Deployment) -> None:
    async def ready(status: int) -> None:
        async def look() -> bool | None:
            return (await policies.client.get("/readyz")).status_code == status or None

        await eventually(look)

    async def post() -> int:
        return (await policies.client.post("/generate", json={"attention": DELTA})).status_code

    await ready(200)
    assert [await post() for _ in range(3)] == [200] * 3
    assert len(policies.runtime.server_info_asked) == 1

    await policies.stop_runtime()
    await ready(503)
    assert await post() in (502, 503)
    policies.runtime.server_info = {"winnow": {**SERVED, "layers": 6, "delta_layers": [3]}}
    await policies.start_runtime()
    await ready(200)
    assert [await post() for _ in range(3)] == [200] * 3
    assert len(policies.runtime.server_info_asked) == 2
    last = json.loads(policies.runtime.asked[-1].body)
    assert '"delta_layers":[3]' in custom_params("/generate", last)["attention"]


@pytest.mark.parametrize("told", [{}, {"winnow": None}, {"winnow": {**SERVED, **DENSE_ALONE}}])
@pytest.mark.parametrize("policy", [QUEST, {"prefill": {"policy": "quoka"}}, {"early_termination": {}}])
async def test_a_runtime_without_the_backend_serves_dense_alone(
    service: Deployment, told: dict[str, Any], policy: dict[str, Any]
) -> None:
    service.runtime.server_info = told
    answer = await service.client.post("/generate", json={"attention": policy})
    assert answer.status_code == 422
    assert "--attention-backend winnow" in answer.json()["error"]["message"]
    assert service.runtime.asked == []
    assert (await service.client.post("/generate", json={"attention": {}})).status_code == 200


async def test_a_policy_that_the_runtime_does_not_know_is_refused(service: Deployment) -> None:
    service.runtime.server_info = {"winnow": {**SERVED, "policies": ["dense", "quest"]}}
    assert (await service.client.post("/generate", json={"attention": QUEST})).status_code == 200
    answer = await service.client.post("/generate", json={"attention": TACTIC})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == (
        "attention.decode.policy: tactic is not served here; set WINNOW_POLICIES=quest,tactic"
    )


async def test_a_preset_of_a_policy_that_the_runtime_does_not_serve_is_refused(service: Deployment) -> None:
    service.runtime.server_info = {"winnow": {**SERVED, "policies": ["dense"]}}
    for name, preset in PRESETS.items():
        policy = preset.attention.decode.policy
        answer = await service.client.post("/generate", json={"attention": name})
        if policy == "dense":
            assert answer.status_code == 200
            continue
        assert answer.status_code == 422
        message = answer.json()["error"]["message"]
        assert message.startswith(f"attention.decode.policy: in the policy {name!r}, {policy} is not served here")
        assert message.endswith(f"; set WINNOW_POLICIES={policy}")


async def test_a_default_that_the_runtime_does_not_serve_is_refused_by_its_name(service: Deployment) -> None:
    service.runtime.server_info = {"winnow": {**SERVED, "policies": ["dense"]}}
    settings = {"policy": "mine"}
    assert (await service.client.put("/v1/policies/mine", json={"attention": QUEST})).status_code == 201
    assert (await service.client.put("/v1/policy-defaults/needle", json=settings)).status_code == 201
    for body in ({"model": "needle"}, {"attention": "mine"}):
        answer = await service.client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "attention.decode.policy")
        assert "in the policy 'mine', quest is not served here; set WINNOW_" in answer.json()["error"]["message"]


async def test_prefill_policies_do_not_depend_on_decode_policies(service: Deployment) -> None:
    service.runtime.server_info = {"winnow": {**SERVED, "policies": ["dense"]}}
    quoka = {"prefill": {"policy": "quoka"}}
    assert (await service.client.post("/generate", json={"attention": quoka})).status_code == 200


VERIFIED = {**QUEST, "verify": {"draft_tokens": 2}}


async def test_verification_is_passed_on(policies: Deployment) -> None:
    assert (await policies.client.post("/generate", json={"attention": VERIFIED})).status_code == 200


# Runtimes of before do not tell.
@pytest.mark.parametrize("told", [{"verifies": False}, {}])
async def test_verification_is_refused_where_the_runtime_does_not_verify(
    service: Deployment, told: dict[str, Any]
) -> None:
    service.runtime.server_info = {"winnow": {name: SERVED[name] for name in SERVED if name != "verifies"} | told}
    answer = await service.client.post("/generate", json={"attention": VERIFIED})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "attention.verify")
    assert "start the server with --speculative-algorithm WINNOW" in answer.json()["error"]["message"]


@pytest.mark.parametrize("told", [{"winnow": {"layers": 0}}, {"winnow": 5}, {"winnow": {**SERVED, "layers": "many"}}])
async def test_a_runtime_that_tells_nonsense_is_502(service: Deployment, told: dict[str, Any]) -> None:
    service.runtime.server_info = told
    answer = await service.client.post("/generate", json={"attention": QUEST})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "runtime_unusable")
    assert (await samples(service.client))[key("winnow_runtime_errors_total", kind="runtime_unusable")] == 1
    service.runtime.server_info = {"winnow": SERVED}
    assert (await service.client.post("/generate", json={"attention": QUEST})).status_code == 200


async def test_a_runtime_that_is_away_is_503(deployment: Deployment) -> None:
    answer = await deployment.client.post("/generate", json={"attention": QUEST})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "runtime_unavailable")


async def test_the_runtime_is_asked_with_the_clients_authorization(policies: Deployment) -> None:
    policies.runtime.server_info_status = 401
    answer = await policies.client.post("/generate", json={"attention": QUEST})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "runtime_refused")
    policies.runtime.server_info_status = 200
    headers = {"authorization": "Bearer t"}
    assert (await policies.client.post("/generate", json={"attention": QUEST}, headers=headers)).status_code == 200
    assert [asked.get("authorization") for asked in policies.runtime.server_info_asked] == [None, "Bearer t"]


async def test_a_runtime_that_fails_to_tell_is_502(policies: Deployment) -> None:
    policies.runtime.server_info_status = 500
    answer = await policies.client.post("/v1/completions", json={"attention": QUEST})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "runtime_unusable")


# What comes back.


def native(text: str, **facts: Any) -> dict[str, Any]:
    return {"text": text, "meta_info": {"id": "1", "prompt_tokens": 4, **facts}}


async def test_a_native_answer_has_its_attention_at_the_top(policies: Deployment) -> None:
    answered = native('says "attention"', attention=STATISTICS)
    answer = await policies.client.post("/generate", json={"fake": {"answer": answered}, "attention": QUEST})
    assert answer.json() == {**answered, "attention": STATISTICS}
    assert answer.headers["content-type"] == "application/json"


async def test_each_native_answer_of_a_batch_has_its_own(policies: Deployment) -> None:
    answered = [native("a", attention={"n": 1}), native("b"), native("c", attention={"n": 3})]
    answer = await policies.client.post("/generate", json={"fake": {"answer": answered}})
    assert answer.json() == [
        {**answered[0], "attention": {"n": 1}},
        answered[1],
        {**answered[2], "attention": {"n": 3}},
    ]


@pytest.mark.parametrize("answered", [native('"attention"'), {"attention": 1}, ["attention"], "attention", 5])
async def test_an_answer_without_statistics_stays_as_it_is(policies: Deployment, answered: Any) -> None:
    answer = await policies.client.post("/generate", json={"fake": {"answer": answered}})
    assert answer.json() == answered


async def test_the_last_native_event_has_its_attention_at_the_top(policies: Deployment) -> None:
    streamed = [
        native("a"),
        native('a "attention"\n\ndata: [DONE]'),
        native("a b", attention=STATISTICS, finish_reason={"type": "stop"}),
    ]
    body = {"stream": True, "fake": {"events": streamed}, "attention": QUEST}
    answer = await policies.client.post("/generate", json=body)
    assert events(answer.text) == [*streamed[:2], {**streamed[2], "attention": STATISTICS}, "[DONE]"]


@pytest.mark.parametrize("route", OPENAI_ROUTES)
async def test_openai_answers_are_passed_on_as_they_are(policies: Deployment, route: str) -> None:
    answered = {
        "choices": [{"index": 0, "attention": STATISTICS, "meta_info": {"attention": 1}}],
        "attention": STATISTICS,
    }
    answer = await policies.client.post(route, json={"fake": {"answer": answered}, "attention": QUEST})
    assert answer.json() == answered

    streamed = [{"choices": [{"index": 0}]}, {"id": "1", "choices": [], "attention": [STATISTICS, STATISTICS]}]
    body = {"stream": True, "fake": {"events": streamed}, "attention": QUEST}
    answer = await policies.client.post(route, json=body)
    assert events(answer.text) == [*streamed, "[DONE]"]


async def test_the_openai_client_sends_a_policy_and_reads_what_it_cost(policies: Deployment) -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "needle", "attention": STATISTICS}
    answered = {**whole, "choices": [{**choice, "attention": STATISTICS}]}
    piece = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "needle"}
    delta = {"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}
    streamed = [{**piece, "choices": [delta]}, {**piece, "choices": [], "attention": STATISTICS}]
    fake = {"answer": answered, "events": streamed}
    async with openai.AsyncOpenAI(base_url=f"{policies.client.base_url}/v1", api_key="t", max_retries=0) as client:
        extra = {"attention": QUEST, "fake": fake}
        messages: Any = [{"role": "user", "content": "hello"}]
        answer = await client.chat.completions.create(model="needle", messages=messages, extra_body=extra)
        assert answer.model_extra is not None
        assert answer.model_extra["attention"] == STATISTICS

        stream = await client.chat.completions.create(model="needle", messages=messages, stream=True, extra_body=extra)
        told = [(chunk.model_extra or {}).get("attention") async for chunk in stream]
        assert told == [None, STATISTICS]

        wrong = {"attention": {"decode": {"policy": "quest", "budget": 1}}}
        with pytest.raises(openai.UnprocessableEntityError, match=r"attention\.decode\.budget: must be") as caught:
            await client.chat.completions.create(model="needle", messages=messages, extra_body=wrong)
        assert caught.value.param == "attention.decode.budget"
    assert forwarded_all(policies) == [{"attention": canonical(QUEST)}] * 2


def forwarded_all(deployment: Deployment) -> list[Any]:
    return [json.loads(asked.body)["custom_params"] for asked in deployment.runtime.asked]


@pytest.mark.parametrize("many", [False, True])
async def test_the_evaluation_reads_the_statistics_of_the_extra_chunk(many: bool) -> None:
    streamed = [
        {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]},
        {"choices": [], "attention": [STATISTICS] if many else STATISTICS},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}},
    ]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in streamed) + "data: [DONE]\n\n"
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
    async with OpenAIClient("http://x", attention=QUEST, transport=transport) as client:
        answer = await client.ask(await client.prepared("hello"), 10)
    assert answer.attention == STATISTICS
    assert (answer.text, answer.prompt_tokens) == ("yes", 9)


@given(valid_policies, st.sampled_from(list(Form)), st.dictionaries(st.sampled_from(["text", "n"]), st.text()))
def test_placing_a_policy_loses_nothing(policy: dict[str, Any], form: Form, rest: dict[str, Any]) -> None:
    asked = read_policies({**rest, "attention": policy}, form, lambda _: AttentionPolicy())
    assert isinstance(asked, AttentionPolicy)
    placed = place_policies({**rest, "attention": policy}, form, asked)
    holder = placed.pop("sampling_params") if form is Form.NATIVE else placed
    assert parse_policy(holder.pop("custom_params")["attention"]) == asked
    assert placed == rest
