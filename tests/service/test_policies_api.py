"""Policies as resources, and what requests get of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.policy_strategies import valid_policies
from tests.service.conftest import Deployment
from tests.service.control import ADMIN_KEY, bearer, make_key, replica
from tests.service.redis_servers import redis_server
from tests.service.test_streaming import events
from tests.service.waiting import eventually
from winnow_kernels.policies.attention_policy import check_against_model, json_schema, parse_policy
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES
from winnow_service.errors import PolicyForbidden
from winnow_service.policies.bounds import Bounds
from winnow_service.policies.names import is_policy_name
from winnow_service.policies.presets import BUILT_IN, PRESETS

ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]
QUEST: dict[str, Any] = {"decode": {"policy": "quest", "budget": 512}}
TACTIC: dict[str, Any] = {"decode": {"policy": "tactic", "p": 0.5}}
SERVED = {
    "layers": 12,
    "context_length": 32768,
    "delta_layers": [2, 6],
    "policies": list(DECODE_POLICIES),
    "prefill_policies": list(PREFILL_POLICIES),
}


@pytest_asyncio.fixture
async def policies(service: Deployment) -> Deployment:
    service.runtime.server_info = {"winnow": SERVED}
    return service


@pytest_asyncio.fixture
async def client(policies: Deployment) -> httpx.AsyncClient:
    return policies.client


def canonical(policy: dict[str, Any]) -> Any:
    return json.loads(parse_policy(policy).canonical())


def forwarded(deployment: Deployment, route: str) -> Any:
    """The policy in the last request that the runtime got."""
    body = json.loads(deployment.runtime.asked[-1].body)
    assert "attention" not in body
    holder = body["sampling_params"] if route == "/generate" else body
    return json.loads(holder["custom_params"]["attention"])


def problem(answer: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """The message of an error, all of whose parts agree."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert body["title"]
    assert body["type"].endswith(code.replace("rate_limited", "quota-exceeded"))
    assert body["detail"] == body["error"]["message"]
    assert body["error"]["code"] == code
    assert body["error"]["param"] == param
    message: str = body["detail"]
    return message


# The resource.


async def test_a_policy_is_made_read_replaced_and_deleted(client: httpx.AsyncClient) -> None:
    made = await client.put("/v1/policies/mine", json={"attention": QUEST, "description": "Ours."})
    assert made.status_code == 201
    assert made.headers["etag"] == '"1"'
    body = made.json()
    assert {name: body[name] for name in ("name", "attention", "description", "preset", "revision", "updated_by")} == {
        "name": "mine",
        "attention": canonical(QUEST),
        "description": "Ours.",
        "preset": False,
        "revision": 1,
        "updated_by": "open",
    }
    assert body["fingerprint"] == parse_policy(QUEST).fingerprint()
    got = await client.get("/v1/policies/mine")
    assert (got.json(), got.headers["etag"]) == (body, '"1"')
    assert (await client.get("/v1/policies/mine", headers={"if-none-match": 'W/"0", "1"'})).status_code == 304

    replaced = await client.put("/v1/policies/mine", json={"attention": TACTIC}, headers={"if-match": '"1"'})
    assert (replaced.status_code, replaced.headers["etag"]) == (200, '"2"')
    assert (await client.get("/v1/policies/mine", headers={"if-none-match": '"1"'})).json()["description"] == ""

    assert (await client.delete("/v1/policies/mine", headers={"if-match": '"2"'})).status_code == 204
    problem(await client.get("/v1/policies/mine"), 404, "not_found")
    assert (await client.put("/v1/policies/mine", json={"attention": {}})).headers["etag"] == '"4"'
    revisions = (await client.get("/v1/policies/mine/revisions")).json()["revisions"]
    assert [(each["revision"], each["attention"]) for each in revisions] == [
        (4, canonical({})),
        (3, None),
        (2, canonical(TACTIC)),
        (1, canonical(QUEST)),
    ]
    problem(await client.get("/v1/policies/other/revisions"), 404, "not_found")


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 428, "precondition_required"),
        ({"if-none-match": "*"}, 412, "precondition_failed"),
        ({"if-match": '"1"'}, 412, "precondition_failed"),
        ({"if-match": '"3"'}, 412, "precondition_failed"),
        ({"if-match": 'W/"2"'}, 412, "precondition_failed"),
        ({"if-match": '"other"'}, 412, "precondition_failed"),
        ({"if-match": "2"}, 422, "invalid_field"),
        ({"if-match": '"1" "2"'}, 422, "invalid_field"),
        ({"if-none-match": '"2"'}, 422, "invalid_field"),
        ({"if-none-match": "*", "if-match": "*"}, 422, "invalid_field"),
    ],
)
async def test_a_policy_is_not_overwritten_unseen(
    client: httpx.AsyncClient, headers: dict[str, str], status: int, code: str
) -> None:
    await client.put("/v1/policies/mine", json={"attention": QUEST})
    before = await client.put("/v1/policies/mine", json={"attention": TACTIC}, headers={"if-match": "*"})
    answer = await client.put("/v1/policies/mine", json={"attention": {}}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    if status != 422:
        assert answer.headers["etag"] == '"2"'
    if "if-none-match" not in headers:
        answer = await client.delete("/v1/policies/mine", headers=headers)
        assert answer.status_code == status
    assert (await client.get("/v1/policies/mine")).json() == before.json()


@pytest.mark.parametrize("if_match", ['"2"', '"7", "2"', "*", '"2" , W/"9"'])
async def test_the_right_condition_replaces(client: httpx.AsyncClient, if_match: str) -> None:
    await client.put("/v1/policies/mine", json={"attention": QUEST})
    await client.put("/v1/policies/mine", json={"attention": TACTIC}, headers={"if-match": '"1"'})
    answer = await client.put("/v1/policies/mine", json={"attention": {}}, headers={"if-match": if_match})
    assert (answer.status_code, answer.json()["revision"]) == (200, 3)


@pytest.mark.parametrize("if_match", ['"1"', "*"])
async def test_what_does_not_exist_is_not_replaced(client: httpx.AsyncClient, if_match: str) -> None:
    answer = await client.put("/v1/policies/mine", json={"attention": {}}, headers={"if-match": if_match})
    problem(answer, 412, "precondition_failed")
    problem(await client.delete("/v1/policies/mine", headers={"if-match": if_match}), 404, "not_found")


REFUSED: list[tuple[Any, int, str | None, str]] = [
    ({}, 422, "attention", "required"),
    ({"attention": "exact"}, 422, "attention", "must be an object"),
    ({"attention": {}, "more": 1}, 422, "more", "unknown field; there are attention, description"),
    ({"attention": {}, "description": "x" * 501}, 422, "description", "at most 500"),
    ({"attention": {"decode": {"policy": "quest", "budget": 1}}}, 422, "attention.decode.budget", "equal to 16"),
    ({"attention": {"decode": {"policy": "best"}}}, 422, "attention.decode.policy", "must be one of dense"),
    ([], 400, None, "JSON object"),
]


async def test_a_policy_that_cannot_be_is_refused(client: httpx.AsyncClient) -> None:
    for body, status, param, says in REFUSED:
        answer = await client.put("/v1/policies/mine", json=body)
        assert answer.status_code == status, body
        assert answer.json()["error"]["param"] == param
        assert says in answer.json()["detail"]
    assert (await client.get("/v1/policies/mine")).status_code == 404


async def test_names_have_a_syntax(client: httpx.AsyncClient) -> None:
    for name in ("Mine", "-a", "a.", "a" * 65, "a%20b", "%C3%A9", "a%0A", "_"):
        problem(await client.put(f"/v1/policies/{name}", json={"attention": {}}), 422, "invalid_field", "name")
        problem(await client.get(f"/v1/policies/{name}"), 422, "invalid_field", "name")


@given(st.text(max_size=70))
def test_a_name_is_safe_in_paths_headers_and_logs(name: str) -> None:
    if is_policy_name(name):
        assert 1 <= len(name) <= 64
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")


async def test_presets_are_there_and_stay(client: httpx.AsyncClient) -> None:
    await client.put("/v1/policies/mine", json={"attention": QUEST})
    await client.put("/v1/policies/a", json={"attention": QUEST})
    listed = (await client.get("/v1/policies")).json()["policies"]
    assert [each["name"] for each in listed] == [*PRESETS, "auto", "a", "mine"]
    assert all(each["preset"] and each["revision"] is None for each in listed[: len(BUILT_IN)])
    assert listed[0]["attention"] == canonical({})
    for name in BUILT_IN:
        for headers in ({}, {"if-match": "*"}):
            problem(await client.put(f"/v1/policies/{name}", json={"attention": {}}, headers=headers), 409, "preset")
            problem(await client.delete(f"/v1/policies/{name}", headers=headers), 409, "preset")
        got = await client.get(f"/v1/policies/{name}")
        known = await client.get(f"/v1/policies/{name}", headers={"if-none-match": got.headers["etag"]})
        assert (got.status_code, known.status_code) == (200, 304)
        assert (await client.get(f"/v1/policies/{name}/revisions")).json() == {"name": name, "revisions": []}


def test_presets_are_valid_for_any_model_and_warn_of_nothing() -> None:
    assert list(PRESETS) == ["exact", "balanced", "fast", "lossless", "long-prompt", "reasoning"]
    assert PRESETS["exact"].attention.is_dense
    for preset in PRESETS.values():
        assert check_against_model(preset.attention, 1, 16, None) == preset.attention
        assert preset.attention.warnings() == []


async def test_the_schema(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/policies:schema")
    assert answer.headers["content-type"] == "application/schema+json"
    assert answer.json() == json.loads(json.dumps(json_schema()))


async def test_validation_tells_what_a_request_would_get(policies: Deployment) -> None:
    client = policies.client
    delta = {"decode": {"policy": "delta"}}
    answer = (await client.post("/v1/policies:validate", json={"attention": delta})).json()
    assert answer["attention"] == canonical({"decode": {"policy": "delta", "delta_layers": [2, 6]}})
    assert answer["checked_against_model"]
    assert answer["warnings"] == []
    named = (await client.post("/v1/policies:validate", json={"attention": "fast"})).json()
    assert named["attention"] == json.loads(PRESETS["fast"].attention.canonical())
    warned = await client.post("/v1/policies:validate", json={"attention": {"early_termination": {}}})
    assert "loses retrieval" in warned.json()["warnings"][0]

    for attention, param in (
        ("nothing", "attention"),
        ({"decode": {"policy": "tactic", "p": 2}}, "attention.decode.p"),
        ({"decode": {"policy": "delta", "delta_layers": [40]}}, "attention.decode.delta_layers"),
    ):
        refused = await client.post("/v1/policies:validate", json={"attention": attention})
        problem(refused, 422, "invalid_policy", param)
        same = await client.post("/generate", json={"text": "x", "attention": attention})
        assert same.json() == refused.json()


async def test_validation_without_the_runtime_says_so(deployment: Deployment) -> None:
    answer = await deployment.client.post("/v1/policies:validate", json={"attention": QUEST})
    assert (answer.status_code, answer.json()["checked_against_model"]) == (200, False)
    dense = await deployment.client.post("/v1/policies:validate", json={"attention": {}})
    assert dense.json()["checked_against_model"]
    await deployment.start_runtime()
    refused = await deployment.client.post("/v1/policies:validate", json={"attention": QUEST})
    assert "--attention-backend winnow" in problem(refused, 422, "invalid_policy", "attention")


# What requests get.


@pytest.mark.parametrize("route", ROUTES)
async def test_a_request_names_its_policy(policies: Deployment, route: str) -> None:
    await policies.client.put("/v1/policies/mine", json={"attention": QUEST})
    assert (await policies.client.post(route, json={"text": "x", "attention": "mine"})).status_code == 200
    assert forwarded(policies, route) == canonical(QUEST)
    assert (await policies.client.post(route, json={"text": "x", "attention": "exact"})).status_code == 200
    assert forwarded(policies, route) == canonical({})
    answer = await policies.client.post(route, json={"text": "x", "attention": "yours"})
    assert "there is no policy 'yours'" in problem(answer, 422, "invalid_policy", "attention")
    assert len(policies.runtime.asked) == 2


async def test_each_prompt_of_a_batch_names_its_own(policies: Deployment) -> None:
    body = {"text": ["a", "b"], "attention": ["fast", QUEST]}
    assert (await policies.client.post("/generate", json=body)).status_code == 200
    rows = json.loads(policies.runtime.asked[-1].body)["sampling_params"]
    assert [json.loads(row["custom_params"]["attention"]) for row in rows] == [
        json.loads(PRESETS["fast"].attention.canonical()),
        canonical(QUEST),
    ]
    answer = await policies.client.post("/generate", json={"text": ["a", "b"], "attention": ["fast", "slow"]})
    problem(answer, 422, "invalid_policy", "attention.1")


async def test_a_model_has_a_default(policies: Deployment) -> None:
    client = policies.client
    await client.put("/v1/policies/mine", json={"attention": QUEST})
    made = await client.put("/v1/policy-defaults/org/needle", json={"policy": "mine"})
    assert (made.status_code, made.json()["model"], made.json()["policy"]) == (201, "org/needle", "mine")

    async def asked(**body: Any) -> Any:
        policies.runtime.asked.clear()
        assert (await client.post("/v1/completions", json={"prompt": "x", **body})).status_code == 200
        custom = json.loads(policies.runtime.asked[0].body).get("custom_params")
        return custom and json.loads(custom["attention"])

    assert await asked(model="org/needle") == canonical(QUEST)
    assert await asked(model="other") is None
    assert await asked() is None
    await client.put("/v1/policy-defaults/*", json={"policy": "exact"})
    assert await asked(model="other") == canonical({})
    assert await asked(model=5) == canonical({})
    assert await asked(model="org/needle", attention=TACTIC) == canonical(TACTIC)
    own = {"custom_params": {"attention": json.dumps(TACTIC)}}
    assert await asked(model="org/needle", **own) == TACTIC
    await client.post("/generate", json={"text": ["a", "b"]})
    rows = json.loads(policies.runtime.asked[-1].body)["sampling_params"]
    assert rows == {"custom_params": {"attention": json.dumps(canonical({}), sort_keys=True, separators=(",", ":"))}}

    listed = (await client.get("/v1/policy-defaults")).json()["defaults"]
    assert [(each["model"], each["policy"]) for each in listed] == [("*", "exact"), ("org/needle", "mine")]
    problem(await client.delete("/v1/policies/mine", headers={"if-match": "*"}), 409, "in_use")
    problem(await client.put("/v1/policy-defaults/a", json={"policy": "yours"}), 422, "invalid_field", "policy")
    problem(
        await client.put("/v1/policy-defaults/*", json={"policy": "fast"}), 428, "precondition_required", "If-Match"
    )
    problem(await client.get("/v1/policy-defaults/a%20b"), 422, "invalid_field", "model")
    assert (await client.delete("/v1/policy-defaults/org/needle", headers={"if-match": '"1"'})).status_code == 204
    problem(await client.get("/v1/policy-defaults/org/needle"), 404, "not_found")
    assert await asked(model="org/needle") == canonical({})
    assert (await client.delete("/v1/policies/mine", headers={"if-match": "*"})).status_code == 204


async def test_a_request_in_flight_keeps_its_policy(policies: Deployment) -> None:
    client = policies.client
    await client.put("/v1/policies/mine", json={"attention": QUEST})
    body = {"stream": True, "attention": "mine", "fake": {"chunks": 2, "gated": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        await client.put("/v1/policies/mine", json={"attention": TACTIC}, headers={"if-match": "*"})
        await client.delete("/v1/policies/mine", headers={"if-match": "*"})
        for _ in range(2):
            policies.runtime.gate.release()
        assert len(events((await answer.aread()).decode())) == 3
    [asked] = policies.runtime.asked
    assert json.loads(json.loads(asked.body)["custom_params"]["attention"]) == canonical(QUEST)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_every_replica_sees_a_change(tmp_path: Path, kind: str) -> None:
    async def check(url: str) -> None:
        async with replica(url) as one, replica(url) as other:
            made = await one.put("/v1/policies/mine", json={"attention": QUEST})

            async def seen() -> bool | None:
                return (await other.get("/v1/policies/mine")).json() == made.json() or None

            await eventually(seen)
            changed = await other.put("/v1/policies/mine", json={"attention": {}}, headers={"if-match": '"1"'})
            assert changed.status_code == 200
            stale = await one.put("/v1/policies/mine", json={"attention": {}}, headers={"if-match": '"1"'})
            problem(stale, 412, "precondition_failed")

    if kind == "sqlite":
        await check(f"sqlite:///{tmp_path}/control.db")
    else:
        async with redis_server(tmp_path) as server:
            await check(server.url)


async def test_requests_go_on_while_redis_is_away(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, replica(server.url, admin_key=ADMIN_KEY) as client:
        admin = bearer(ADMIN_KEY)
        key = bearer((await make_key(client, scopes=["read"]))["key"])
        await client.put("/v1/policies/mine", json={"attention": QUEST}, headers=admin)
        await server.kill()

        async def degraded(expected: bool) -> bool | None:
            return (await client.get("/readyz")).json()["store"]["healthy"] is not expected or None

        await eventually(lambda: degraded(True))
        assert (await client.get("/v1/policies/mine", headers=key)).status_code == 200
        assert (await client.post("/v1/policies:validate", json={"attention": "mine"}, headers=key)).status_code == 200
        answer = await client.put("/v1/policies/other", json={"attention": QUEST}, headers=admin)
        assert str(server.port) in problem(answer, 503, "store_unavailable")
        assert answer.headers["retry-after"]
        problem(await client.get("/v1/policies/mine/revisions", headers=key), 503, "store_unavailable")
        await server.start()
        await eventually(lambda: degraded(False))
        assert (await client.put("/v1/policies/other", json={"attention": {}}, headers=admin)).status_code == 201


async def test_readiness_says_degraded_while_requests_are_served(policies: Deployment) -> None:
    async def ready() -> dict[str, Any] | None:
        answer = await policies.client.get("/readyz")
        return answer.json() if answer.status_code == 200 else None

    state = await eventually(ready)
    [runtime] = state.pop("runtimes")
    assert (runtime["usable"], runtime["breaker"], runtime["model"]) == (True, "closed", "needle")
    assert state == {
        "ready": True,
        "degraded": False,
        "draining": False,
        "reason": "The runtime answers.",
        "store": {"healthy": True, "reason": "The store answers."},
    }


# Bounds.


@pytest.mark.parametrize(
    ("bounds", "policy", "path", "clamped"),
    [
        ({"min_p": 0.8}, TACTIC, "attention.decode.p", {"decode": {"policy": "tactic", "p": 0.8}}),
        (
            {"max_budget": 256},
            {"decode": QUEST["decode"], "prefill": {"policy": "quoka"}},
            "attention.decode.budget",
            {"decode": {"policy": "quest", "budget": 256}, "prefill": {"policy": "quoka", "budget": 256}},
        ),
        ({"min_budget": 1024}, QUEST, "attention.decode.budget", {"decode": {"policy": "quest", "budget": 1024}}),
        (
            {"max_budget": 256},
            {"decode": {"policy": "snapkv", "budget_ratio": 0.5}},
            "attention.decode.budget_ratio",
            {"decode": {"policy": "snapkv", "budget": 256}},
        ),
        (
            {"max_budget_ratio": 0.25},
            {"decode": {"policy": "quoka", "budget_ratio": 0.5}},
            "attention.decode.budget_ratio",
            {"decode": {"policy": "quoka", "budget_ratio": 0.25}},
        ),
        (
            {"max_budget": 4096},
            {"decode": {"policy": "tactic"}},
            "attention.decode.max_tokens",
            {"decode": {"policy": "tactic", "max_tokens": 4096}},
        ),
        (
            {"max_budget": 256},
            {"decode": {"policy": "lowbit_top_p", "min_tokens": 512, "max_tokens": 1024}},
            "attention.decode.max_tokens",
            {"decode": {"policy": "lowbit_top_p", "min_tokens": 256, "max_tokens": 256}},
        ),
        (
            {"max_budget": 100},
            {"decode": {"policy": "streaming_llm", "sinks": 4, "window": 512}},
            "attention.decode.window",
            {"decode": {"policy": "streaming_llm", "sinks": 4, "window": 96}},
        ),
        (
            {"max_budget": 40},
            {"decode": {"policy": "quest", "sinks": 30}},
            "attention.decode.budget",
            {"decode": {"policy": "quest", "sinks": 24, "budget": 40}},
        ),
        (
            {"max_budget": 40},
            {"decode": {"policy": "tactic", "sinks": 30}},
            "attention.decode.max_tokens",
            {"decode": {"policy": "tactic", "sinks": 24, "max_tokens": 40}},
        ),
        (
            {"max_budget": 40},
            {"decode": {"policy": "snapkv", "budget_ratio": 0.5}},
            "attention.decode.budget_ratio",
            {"decode": {"policy": "snapkv", "sinks": 7, "budget": 40}},
        ),
        (
            {"max_budget": 140},
            {"decode": {"policy": "delta"}},
            "attention.decode.budget",
            {"decode": {"policy": "delta", "sinks": 12, "budget": 140}},
        ),
        (
            {"max_budget": 30},
            {"decode": {"policy": "streaming_llm", "sinks": 64, "window": 512}},
            "attention.decode.window",
            {"decode": {"policy": "streaming_llm", "sinks": 14, "window": 16}},
        ),
        (
            {"min_budget": 20},
            {"decode": {"policy": "quoka", "budget_ratio": 0.5}},
            "attention.decode.budget_ratio",
            {"decode": {"policy": "quoka", "budget": 32}},
        ),
        (
            {"early_termination": False},
            {"decode": {"policy": "tactic"}, "early_termination": {}},
            "attention.early_termination",
            {"decode": {"policy": "tactic"}},
        ),
        (
            {"keep": False},
            {"decode": {"policy": "tactic"}, "keep": True},
            "attention.keep",
            {"decode": {"policy": "tactic"}},
        ),
        (
            {"max_draft_tokens": 2},
            {"decode": {"policy": "tactic"}, "verify": {}},
            "attention.verify.draft_tokens",
            {"decode": {"policy": "tactic"}, "verify": {"draft_tokens": 2}},
        ),
        (
            {"max_audit": 0.01},
            {"decode": {"policy": "tactic"}, "audit": 0.5},
            "attention.audit",
            {"decode": {"policy": "tactic"}, "audit": 0.01},
        ),
        (
            {"max_audit": 0.01},
            {"decode": {"policy": "tactic"}, "audit": {"share": 0.5, "kl": True}},
            "attention.audit.share",
            {"decode": {"policy": "tactic"}, "audit": {"share": 0.01, "kl": True}},
        ),
        ({"max_kl": 0.01}, {"quality": {"kl": 0.02}}, "attention.quality.kl", {"quality": {"kl": 0.01}}),
        ({"max_kl": 0.01}, {"quality": {}}, "attention.quality.kl", {"quality": {"kl": 0.01}}),
        ({"min_top1": 0.9}, {"quality": {"top1": 0.5}}, "attention.quality.top1", {"quality": {"top1": 0.9}}),
        (
            {"max_draft_tokens": 8},
            {"decode": {"policy": "tactic"}, "verify": {"draft_tokens": "auto"}},
            "attention.verify.draft_tokens",
            {"decode": {"policy": "tactic"}, "verify": {"draft_tokens": 8}},
        ),
    ],
)
def test_bounds_refuse_or_clamp(
    bounds: dict[str, Any], policy: dict[str, Any], path: str, clamped: dict[str, Any]
) -> None:
    asked = parse_policy(policy)
    with pytest.raises(PolicyForbidden) as caught:
        Bounds(**bounds).apply(asked)
    assert caught.value.path == path
    within, changes = Bounds.model_validate_json(json.dumps({**bounds, "on_violation": "clamp"})).apply(asked)
    assert within == parse_policy(clamped)
    assert changes[0].startswith(f"{path} was ")
    assert Bounds(**bounds).apply(within) == (within, [])


def test_a_clamped_policy_that_cannot_be_is_refused() -> None:
    bounds = Bounds.model_validate_json('{"max_budget": 16, "on_violation": "clamp"}')
    with pytest.raises(PolicyForbidden, match=r"must be less than 16: .* \(max_budget of this key is 16\)"):
        bounds.apply(parse_policy({"decode": {"policy": "snapkv"}}))


@pytest.mark.parametrize("on_violation", ["refuse", "clamp"])
def test_who_may_not_verify_gets_no_other_answer_instead(on_violation: str) -> None:
    bounds = Bounds.model_validate_json(json.dumps({"verify": False, "on_violation": on_violation}))
    with pytest.raises(PolicyForbidden, match="must be absent") as caught:
        bounds.apply(parse_policy({"decode": {"policy": "quest"}, "verify": {}}))
    assert caught.value.path == "attention.verify"


def test_a_client_is_told_that_a_bound_lowered_its_sinks() -> None:
    bounds = Bounds.model_validate_json('{"max_budget": 20, "on_violation": "clamp"}')
    _, changes = bounds.apply(parse_policy({"decode": {"policy": "quest"}}))
    assert changes[1] == (
        "attention.decode.sinks was set to 4: it must be at most 4, for max_budget (20) holds them and what is recent"
        " (bounds of this key)"
    )


@given(
    valid_policies,
    st.fixed_dictionaries(
        {},
        optional={
            "min_p": st.floats(0.1, 1),
            "max_budget": st.integers(16, 4096),
            "max_budget_ratio": st.floats(0.1, 1),
            "early_termination": st.booleans(),
            "keep": st.booleans(),
            "verify": st.booleans(),
            "max_draft_tokens": st.integers(1, 16),
            "max_audit": st.floats(0, 1),
        },
    ),
)
def test_what_bounds_let_through_is_within_them(policy: dict[str, Any], given_bounds: dict[str, Any]) -> None:
    bounds = Bounds.model_validate_json(json.dumps({**given_bounds, "on_violation": "clamp"}))
    strict = Bounds(**given_bounds)
    asked = parse_policy(policy)
    try:
        within, changes = bounds.apply(asked)
    except PolicyForbidden:
        return
    assert strict.apply(within) == (within, [])
    assert (within == asked) == (not changes)
    most = given_bounds.get("max_budget")
    for part in (within.decode, within.prefill):
        for field in ("budget", "max_tokens", "min_tokens"):
            assert most is None or (getattr(part, field, None) or 0) <= most


REFUSED_BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"min_budget": 512, "max_budget": 256}, "min_budget must be at most max_budget"),
    ({"decode": ["best"]}, "there is no policy 'best'"),
    ({"decode": []}, "at least 1"),
    ({"min_p": 0}, "greater than 0"),
    ({"max_budget": 1}, "greater than or equal to 16"),
    ({"max_draft_tokens": 17}, "less than or equal to 16"),
    ({"max_audit": 1.5}, "less than or equal to 1"),
    ({"max_kl": 0}, "greater than 0"),
    ({"min_top1": 2}, "less than or equal to 1"),
    ({"on_violation": "ignore"}, "'refuse' or 'clamp'"),
    ({"other": 1}, "not permitted"),
]


async def test_bounds_that_cannot_be_are_refused(client: httpx.AsyncClient) -> None:
    for bounds, says in REFUSED_BOUNDS:
        answer = await client.post("/v1/keys", json={"name": "a", "scopes": ["admin"], "bounds": bounds})
        assert answer.status_code == 422
        assert answer.json()["error"]["param"].startswith("bounds")
        assert says in answer.json()["detail"]


STATISTICS = {"decode": {"policy": "tactic"}, "warnings": ["earlier"]}


@pytest_asyncio.fixture
async def keyed(policies: Deployment) -> AsyncIterator[Deployment]:
    """A service with a first key; its client sends it."""
    made = await policies.client.post("/v1/keys", json={"name": "root", "scopes": ["admin", "read", "infer"]})
    policies.client.headers.update(bearer(made.json()["key"]))
    yield policies


async def make(client: httpx.AsyncClient, **settings: Any) -> dict[str, str]:
    made = await client.post("/v1/keys", json={"name": "t", "scopes": ["infer", "read"], **settings})
    assert made.status_code == 201, made.text
    return bearer(made.json()["key"])


@pytest.mark.parametrize("route", ROUTES)
async def test_the_bounds_of_a_key_refuse(keyed: Deployment, route: str) -> None:
    key = await make(keyed.client, bounds={"min_p": 0.8, "decode": ["tactic", "lowbit_top_p", "dense"]})
    await keyed.client.put("/v1/policies/low", json={"attention": TACTIC})
    for attention in (TACTIC, "low"):
        answer = await keyed.client.post(route, json={"text": "x", "attention": attention}, headers=key)
        assert "at least 0.8; it is 0.5" in problem(answer, 403, "policy_forbidden", "attention.decode.p")
    answer = await keyed.client.post(route, json={"text": "x", "attention": QUEST}, headers=key)
    problem(answer, 403, "policy_forbidden", "attention.decode.policy")
    own = {"custom_params": {"attention": "{}"}}
    hidden = {"sampling_params": own} if route == "/generate" else own
    problem(
        await keyed.client.post(route, json={"text": "x", **hidden}, headers=key),
        *(403, "policy_forbidden", "custom_params.attention"),
    )
    assert keyed.runtime.asked == []
    for allowed in ("balanced", "exact", None):
        body = {"text": "x", "attention": allowed}
        assert (await keyed.client.post(route, json=body, headers=key)).status_code == 200


async def test_a_key_may_forbid_dense_attention(keyed: Deployment) -> None:
    balanced = PRESETS["balanced"].attention
    bounds = {"decode": [balanced.decode.policy]}
    key = await make(keyed.client, bounds=bounds)
    answer = await keyed.client.post("/generate", json={"text": "x"}, headers=key)
    problem(answer, 403, "policy_forbidden", "attention.decode.policy")
    key = await make(keyed.client, bounds=bounds, default_policy="balanced")
    assert (await keyed.client.post("/generate", json={"text": "x"}, headers=key)).status_code == 200
    assert forwarded(keyed, "/generate") == json.loads(balanced.canonical())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_the_bounds_of_a_key_clamp_and_say_so(keyed: Deployment, route: str, stream: bool) -> None:
    key = await make(keyed.client, bounds={"min_p": 0.8, "on_violation": "clamp"})
    answered: Any = {"text": "a", "meta_info": {"attention": STATISTICS}}
    if route != "/generate":
        answered = {"choices": [{"index": 0, "attention": STATISTICS}], "attention": STATISTICS}
    fake = {"events": [{"text": "attention"}, answered]} if stream else {"answer": answered}
    body = {"text": "x", "attention": TACTIC, "stream": stream, "fake": fake}
    answer = await keyed.client.post(route, json=body, headers=key)
    assert answer.status_code == 200
    assert forwarded(keyed, route)["decode"]["p"] == 0.8
    warning = answer.headers["winnow-warning"]
    assert warning.startswith("attention.decode.p was set to 0.8")
    told = events(answer.text)[1] if stream else answer.json()
    assert told["attention"]["warnings"] == ["earlier", warning]
    inner = told["meta_info"] if route == "/generate" else told["choices"][0]
    assert inner["attention"]["warnings"] == ["earlier", warning]
    within = await keyed.client.post(route, json={**body, "attention": "balanced"}, headers=key)
    assert "winnow-warning" not in within.headers


async def test_each_prompt_of_a_batch_is_within_bounds(keyed: Deployment) -> None:
    key = await make(keyed.client, bounds={"min_p": 0.8})
    body = {"text": ["a", "b"], "attention": [{}, TACTIC]}
    answer = await keyed.client.post("/generate", json=body, headers=key)
    problem(answer, 403, "policy_forbidden", "attention.1.decode.p")


async def test_a_key_has_a_default(keyed: Deployment) -> None:
    await keyed.client.put("/v1/policies/mine", json={"attention": QUEST})
    await keyed.client.put("/v1/policy-defaults/*", json={"policy": "exact"})
    key = await make(keyed.client, default_policy="mine")
    await keyed.client.post("/v1/completions", json={"prompt": "x"}, headers=key)
    assert forwarded(keyed, "/v1/completions") == canonical(QUEST)
    problem(await keyed.client.delete("/v1/policies/mine", headers={"if-match": "*"}), 409, "in_use")
    answer = await keyed.client.post("/v1/keys", json={"name": "a", "scopes": ["infer"], "default_policy": "no"})
    problem(answer, 422, "invalid_field", "default_policy")


async def test_validation_is_within_the_bounds_of_the_key(keyed: Deployment) -> None:
    key = await make(keyed.client, bounds={"min_p": 0.8, "on_violation": "clamp"})
    answer = await keyed.client.post("/v1/policies:validate", json={"attention": TACTIC}, headers=key)
    assert answer.json()["attention"]["decode"]["p"] == 0.8
    assert answer.json()["warnings"][0].startswith("attention.decode.p was set to 0.8")


async def test_writes_at_once_lose_nothing(client: httpx.AsyncClient) -> None:
    await client.put("/v1/policies/sum", json={"attention": {}, "description": "0"})

    async def add() -> None:
        while True:
            got = await client.get("/v1/policies/sum")
            body = {"attention": {}, "description": str(int(got.json()["description"]) + 1)}
            answer = await client.put("/v1/policies/sum", json=body, headers={"if-match": got.headers["etag"]})
            if answer.status_code == 200:
                return
            assert answer.status_code == 412

    await asyncio.gather(*(add() for _ in range(30)))
    assert (await client.get("/v1/policies/sum")).json()["description"] == "30"
