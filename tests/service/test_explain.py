"""``POST /v1/attention:explain``: what the runtime is asked, what the client gets, and who may ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.service.conftest import Deployment
from tests.service.control import ADMIN_KEY, bearer, make_key, replica, runtime
from tests.service.test_policies_api import problem
from winnow_kernels.policies.attention_policy import parse_policy
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES
from winnow_service.policies.explanation import MAX_PROMPT_CHARACTERS, Explanation

ROUTE = "/v1/attention:explain"
QUEST: dict[str, Any] = {"decode": {"policy": "quest", "budget": 512}}
SERVED: dict[str, Any] = {
    "layers": 12,
    "context_length": 32768,
    "delta_layers": [2, 6],
    "policies": list(DECODE_POLICIES),
    "prefill_policies": list(PREFILL_POLICIES),
    "verifies": True,
    "sliding_layers": [0, 1],
    "linear_layers": [3],
    "kv_heads": 8,
    "explains": True,
}
ENTRY: dict[str, Any] = {
    "step": 1,
    "layer": 2,
    "head": 0,
    "dense": False,
    "attended": [[0, 1]],
    "attended_tokens": 1,
    "share": 0.75,
    "weights": [0.75, 0.25],
}
PROMPT: dict[str, Any] = {"text": "a", "offsets": [[0, 1]]}
OUTPUT: dict[str, Any] = {"text": "bc", "offsets": [[0, 1], [1, 2]]}
STATISTICS: dict[str, Any] = {"decode": {"policy": "quest", "steps": 1}, "warnings": []}
EXPLAINED: dict[str, Any] = STATISTICS | {
    "explain": {"decode_steps": 1, "missing_steps": [8], "entries": [ENTRY], "prompt": PROMPT, "output": OUTPUT}
}


@pytest_asyncio.fixture
async def explaining(service: Deployment) -> Deployment:
    """A service whose runtime explains."""
    service.runtime.server_info = {"winnow": SERVED}
    service.runtime.explanation = {"text": "bc", "meta_info": {"attention": EXPLAINED}}
    return service


async def ask(deployment: Deployment, **question: Any) -> httpx.Response:
    return await deployment.client.post(ROUTE, json={"prompt": "a", "policies": [QUEST]} | question)


def asked(deployment: Deployment) -> list[dict[str, Any]]:
    return [json.loads(each.body) for each in deployment.runtime.asked]


async def test_each_policy_is_asked_for_and_explained(explaining: Deployment) -> None:
    answer = await ask(explaining, policies=[QUEST, "fast"])
    assert answer.status_code == 200, answer.text
    found = answer.json()
    Explanation.model_validate_json(answer.content)
    assert found["prompt"] == PROMPT
    assert (found["steps"], found["layers"], found["heads"]) == ([1, 8], [2, 6, 8, 11], [0, 7])
    quest, fast = found["policies"]
    assert (quest["policy"], fast["policy"]) == (None, "fast")
    assert quest["attention"] == json.loads(parse_policy(QUEST).canonical())
    assert quest["fingerprint"] == parse_policy(QUEST).fingerprint()
    assert fast["attention"]["decode"]["policy"] == "lowbit_top_k"
    for policy in (quest, fast):
        assert policy["statistics"] == STATISTICS
        assert (policy["output"], policy["entries"], policy["missing_steps"]) == (OUTPUT, [ENTRY], [8])
    for request, policy in zip(asked(explaining), (quest, fast), strict=True):
        parameters = request["sampling_params"]
        assert (request["text"], parameters["temperature"], parameters["max_new_tokens"]) == ("a", 0, 9)
        custom = parameters["custom_params"]
        assert json.loads(custom["attention"]) == policy["attention"]
        assert json.loads(custom["attention_explain"]) == {
            "steps": [1, 8],
            "layers": [2, 6, 8, 11],
            "heads": [0, 7],
        }


async def test_a_conversation_goes_through_the_chat_form(explaining: Deployment) -> None:
    explaining.runtime.explanation = {"choices": [], "attention": EXPLAINED}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    question = {
        "prompt": None,
        "messages": messages,
        "decode_steps": 3,
        "steps": [3, 2, 3],
        "layers": [4],
        "heads": [1],
    }
    answer = await ask(explaining, **question)
    assert answer.status_code == 200, answer.text
    [request] = asked(explaining)
    assert explaining.runtime.asked[0].path == "/v1/chat/completions"
    assert (request["messages"], request["temperature"], request["max_tokens"]) == (messages, 0, 4)
    wanted = {"steps": [2, 3], "layers": [4], "heads": [1]}
    assert json.loads(request["custom_params"]["attention_explain"]) == wanted
    assert {name: answer.json()[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("question", "param", "says"),
    [
        ({"prompt": None}, "body", "prompt: give exactly one of prompt and messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "body", "prompt: give exactly one of prompt and messages"),
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "a" * (MAX_PROMPT_CHARACTERS + 1)}, "prompt", "at most 1000000 characters"),
        ({"prompt": None, "messages": []}, "messages", "at least 1 item"),
        (
            {"prompt": None, "messages": [{"role": "user", "content": "a" * 600_000}] * 2},
            "body",
            "messages: must have at most 1000000 characters in all",
        ),
        ({"prompt": None, "messages": [{"role": "root", "content": "a"}]}, "messages.0.role", "must be 'system'"),
        ({"policies": []}, "policies", "at least 1 item"),
        ({"policies": [QUEST] * 5}, "policies", "at most 4 items"),
        ({"policies": ["none"]}, "policies.0", "there is no policy 'none'"),
        ({"policies": [3]}, "policies.0", "must be an object"),
        ({"policies": [QUEST, {"decode": {"policy": "quest", "budget": 1}}]}, "policies.1.decode.budget", "16"),
        ({"policies": ["lossless"]}, "policies.0.verify", "is not explained: the answer is dense attention's"),
        (
            {"policies": [{"decode": {"policy": "snapkv", "release": True}}]},
            "policies.0.decode.release",
            "is not explained: the prompt is gone",
        ),
        ({"decode_steps": 0}, "decode_steps", "greater than or equal to 1"),
        ({"decode_steps": 257}, "decode_steps", "less than or equal to 256"),
        ({"steps": [9]}, "body", "steps: must be at most decode_steps, 8"),
        ({"steps": []}, "steps", "at least 1 item"),
        ({"layers": [12]}, "layers", "must be at most 11; there is no layer 12"),
        ({"layers": [1]}, "layers", "layer 1 has a sliding window"),
        ({"layers": [3]}, "layers", "layer 3 has linear attention"),
        ({"heads": [8]}, "heads", "must be at most 7, KV heads; there is no head 8"),
        ({"heads": [-1]}, "heads.0", "greater than or equal to 0"),
        ({"step": [1]}, "step", "unknown field; there are prompt, messages, policies, decode_steps"),
    ],
)
async def test_what_cannot_be_explained_is_refused(
    explaining: Deployment, question: dict[str, Any], param: str, says: str
) -> None:
    code = "invalid_policy" if param.startswith("policies.") else "invalid_field"
    assert says in problem(await ask(explaining, **question), 422, code, param)
    assert explaining.runtime.asked == []


@pytest.mark.parametrize("told", [{"explains": False}, {"explains": True, "kv_heads": None}, {}])
async def test_a_runtime_that_explains_nothing_is_not_asked(explaining: Deployment, told: dict[str, Any]) -> None:
    others = {name: value for name, value in SERVED.items() if name not in ("explains", "kv_heads")}
    explaining.runtime.server_info = {"winnow": others | told}
    assert "The runtime cannot explain" in problem(await ask(explaining), 422, "explain_not_served")
    assert explaining.runtime.asked == []


@pytest.mark.parametrize("nested", [True, False])
async def test_too_much_to_explain_is_refused_by_the_field(explaining: Deployment, nested: bool) -> None:
    said = {
        "message": "attention_explain.steps: steps, layers, heads and tokens must multiply to at most 262144; 2 ..."
    }
    explaining.runtime.explanation = {"error": said} if nested else said
    explaining.runtime.explanation_status = 400
    assert "must multiply to at most 262144" in problem(await ask(explaining), 422, "invalid_field", "steps")


async def test_what_else_the_runtime_refuses_is_passed_on(explaining: Deployment) -> None:
    explaining.runtime.explanation = {"error": {"message": "the prompt is longer than the context"}}
    explaining.runtime.explanation_status = 400
    answer = await ask(explaining, policies=[QUEST, "fast"])
    assert (answer.status_code, answer.json()) == (400, explaining.runtime.explanation)
    assert len(explaining.runtime.asked) == 1


@pytest.mark.parametrize("told", [{}, {"meta_info": {}}, {"meta_info": {"attention": STATISTICS}}])
async def test_an_answer_without_an_explanation_is_the_runtimes_failure(
    explaining: Deployment, told: dict[str, Any]
) -> None:
    explaining.runtime.explanation = told
    assert "explains nothing" in problem(await ask(explaining), 502, "runtime_unusable")


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_an_ordinary_request_cannot_ask_to_be_explained(explaining: Deployment, route: str) -> None:
    custom = {"custom_params": {"attention_explain": '{"steps": [1], "layers": [2], "heads": [0]}'}}
    body = {"sampling_params": custom} if route == "/generate" else custom
    answer = await explaining.client.post(route, json={"text": "a", "prompt": "a", "messages": []} | body)
    told = problem(answer, 422, "invalid_field", "custom_params.attention_explain")
    assert "must be absent: ask POST /v1/attention:explain" in told
    if route == "/generate":
        several = {"text": ["a", "b"], "sampling_params": [{}, custom]}
        problem(
            await explaining.client.post(route, json=several), 422, "invalid_field", "custom_params.attention_explain"
        )
    assert explaining.runtime.asked == []


async def test_only_administrators_ask_and_within_the_bounds_of_their_key(tmp_path: Path) -> None:
    async with (
        runtime() as (fake, address),
        replica(f"sqlite:///{tmp_path}/control.db", address, admin_key=ADMIN_KEY) as client,
    ):
        fake.server_info = {"winnow": SERVED}
        fake.explanation = {"meta_info": {"attention": EXPLAINED}}
        body = {"prompt": "a", "policies": [{"decode": {"policy": "quest", "budget": 4096}}]}
        for scope in ("infer", "read"):
            key = await make_key(client, scopes=[scope])
            problem(await client.post(ROUTE, json=body, headers=bearer(key["key"])), 403, "scope_missing")
        bounds: dict[str, Any] = {"max_budget": 1024}
        strict = await make_key(client, scopes=["admin"], bounds=bounds)
        answer = await client.post(ROUTE, json=body, headers=bearer(strict["key"]))
        assert "at most 1024" in problem(answer, 403, "policy_forbidden", "policies.0.decode.budget")
        lenient = await make_key(client, scopes=["admin"], bounds=bounds | {"on_violation": "clamp"})
        answer = await client.post(ROUTE, json=body, headers=bearer(lenient["key"]))
        [policy] = answer.json()["policies"]
        assert policy["attention"]["decode"]["budget"] == 1024
        assert len(policy["warnings"]) == 1


async def test_every_turn_is_given_back(explaining: Deployment) -> None:
    await ask(explaining, policies=["exact", "fast"])
    explaining.runtime.explanation_status = 500
    await ask(explaining)
    await explaining.stop_runtime()
    problem(await ask(explaining), 503, "runtime_unavailable")
    metrics = (await explaining.client.get("/metrics")).text
    assert "winnow_admitted_requests 0.0" in metrics
