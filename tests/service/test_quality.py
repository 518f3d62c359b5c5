"""Requests that leave their policy to the runtime, on their way to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio

from tests.service.conftest import Deployment
from tests.service.test_attention import SERVED, custom_params, forwarded
from tests.service.test_forwarding import key, samples
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_kernels.policies.bounds import PolicyBounds
from winnow_service.errors import PolicyForbidden
from winnow_service.policies.bounds import Bounds, OnViolation

PROFILE = {"model": "needle", "lengths": [1024], "policies": [], "kl": 0.02}
ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest_asyncio.fixture
async def calibrated(service: Deployment) -> Deployment:
    """A service whose runtime has a profile."""
    service.runtime.server_info = {"winnow": SERVED | {"profile": PROFILE}, "version": "0"}
    return service


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("asked", "quality"),
    [
        ("auto", {}),
        ({"quality": {"kl": 0.05}}, {"kl": 0.05}),
        ({"quality": {"top1": 0.97}}, {"top1": 0.97}),
        *(({"quality": quality}, quality) for quality in ({"kl": 0.02, "under_load": {"kl": 0.05}},)),
    ],
)
async def test_a_quality_reaches_the_runtime(calibrated: Deployment, route: str, asked: Any, quality: Any) -> None:
    assert (await calibrated.client.post(route, json={"attention": asked})).status_code == 200
    sent = json.loads(custom_params(route, forwarded(calibrated))["attention"])
    assert sent["quality"] == quality
    assert (await samples(calibrated.client))[key("winnow_requests_by_decode_policy_total", decode_policy="auto")] == 1


@pytest.mark.parametrize("profile", [{}, {"profile": None}])
async def test_without_a_profile_it_is_refused_with_the_command(service: Deployment, profile: dict[str, Any]) -> None:
    service.runtime.server_info = {"winnow": SERVED | profile, "version": "0"}
    answer = await service.client.post("/v1/completions", json={"attention": "auto"})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["param"] == "attention.quality"
    assert "winnow calibrate profile --model MODEL" in error["message"]
    assert "WINNOW_PROFILE" in error["message"]
    assert service.runtime.asked == []


@pytest.mark.parametrize(
    ("attention", "param"),
    [
        ({"quality": {"kl": 0}}, "attention.quality.kl"),
        ({"quality": {"kl": 11}}, "attention.quality.kl"),
        ({"quality": {"top1": 1.5}}, "attention.quality.top1"),
        ({"quality": {"loss": 1}}, "attention.quality.loss"),
        ({"quality": {"under_load": {}}}, "attention.quality.under_load"),
        ({"quality": {"under_load": {"kl": 0}}}, "attention.quality.under_load.kl"),
        ({"quality": {"under_load": {"loss": 1}}}, "attention.quality.under_load.loss"),
        ({"quality": {"under_load": 0.05}}, "attention.quality.under_load"),
        ({"quality": {"kl": 0.05, "under_load": {"kl": 0.02}}}, "attention.quality.under_load"),
        ({"quality": {"kl": 0.05, "under_load": {"top1": 0.9}}}, "attention.quality.under_load"),
        ({"quality": {"top1": 0.9, "under_load": {"kl": 0.05}}}, "attention.quality.under_load"),
        ({"quality": {"top1": 0.9, "under_load": {"top1": 0.95}}}, "attention.quality.under_load"),
        ({"quality": {"within": {"decode": ["best"]}}}, "attention.quality.within.decode"),
        ({"quality": {"within": {"min_budget": 64, "max_budget": 32}}}, "attention.quality.within"),
        ({"quality": {}, "decode": {"policy": "quest"}}, "attention.quality"),
        ({"quality": {}, "prefill": {"policy": "quoka"}}, "attention.quality"),
        ({"quality": {}, "early_termination": {}}, "attention.quality"),
        ({"quality": {}, "keep": True}, "attention.quality"),
        ({"quality": "auto"}, "attention.quality"),
    ],
)
async def test_what_is_no_quality_is_refused(calibrated: Deployment, attention: Any, param: str) -> None:
    answer = await calibrated.client.post("/v1/completions", json={"attention": attention})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param


async def test_auto_is_a_name_that_is_there_from_the_start(calibrated: Deployment) -> None:
    client = calibrated.client
    listed = {one["name"]: one for one in (await client.get("/v1/policies")).json()["policies"]}
    assert listed["auto"]["preset"]
    assert (await client.put("/v1/policies/auto", json={"attention": {}})).status_code == 409
    answer = await client.post("/v1/policies:validate", json={"attention": "auto"})
    assert answer.json()["attention"]["quality"] == {}


def test_bounds_of_a_key_go_to_the_runtime() -> None:
    bounds = Bounds(decode=("quest", "dense"), max_budget=512, max_audit=0.1)
    policy, changes = bounds.apply(parse_policy({"quality": {"kl": 0.1}, "audit": 0.1}))
    assert changes == []
    assert policy.quality is not None
    assert policy.quality.within == PolicyBounds(decode=("quest", "dense"), max_budget=512)
    assert parse_policy(policy.canonical()) == policy
    with pytest.raises(PolicyForbidden, match=r"attention\.audit"):
        bounds.apply(parse_policy({"quality": {}, "audit": 0.2}))
    with pytest.raises(PolicyForbidden, match=r"attention\.quality\.within: must be absent"):
        bounds.apply(parse_policy({"quality": {"within": {"decode": ["tactic"]}}}))


def test_bounds_of_a_key_hold_under_load() -> None:
    asked = parse_policy({"quality": {"kl": 0.02, "top1": 0.97, "under_load": {"kl": 0.2, "top1": 0.8}}})
    assert Bounds(max_kl=0.2, min_top1=0.8).apply(asked) == (asked, [])
    with pytest.raises(PolicyForbidden, match=r"attention\.quality\.under_load\.kl: must be at most 0\.1; it is 0\.2"):
        Bounds(max_kl=0.1).apply(asked)
    with pytest.raises(
        PolicyForbidden, match=r"attention\.quality\.under_load\.top1: must be at least 0\.9; it is 0\.8"
    ):
        Bounds(min_top1=0.9).apply(asked)
    clamped, changes = Bounds(max_kl=0.01, min_top1=0.98, on_violation=OnViolation.CLAMP).apply(asked)
    assert clamped.quality is not None
    assert clamped.quality.model_dump() == {"kl": 0.01, "top1": 0.98, "under_load": {"kl": 0.01, "top1": 0.98}}
    assert len(changes) == 4


def test_a_key_with_a_bound_never_gets_the_servers_own_quality_under_load() -> None:
    with pytest.raises(PolicyForbidden, match=r"attention\.quality\.kl: must be given, at most 0\.1"):
        Bounds(max_kl=0.1).apply(parse_policy({"quality": {}}))
    clamped, _ = Bounds(max_kl=0.1, on_violation=OnViolation.CLAMP).apply(parse_policy({"quality": {}}))
    assert clamped.quality is not None
    # A quality that is named has no lower one but that which it names.
    assert (clamped.quality.kl, clamped.quality.under_load) == (0.1, None)


def test_bounds_that_bind_nothing_leave_a_quality_as_it_is() -> None:
    asked = parse_policy({"quality": {}})
    assert Bounds(max_audit=0.5).apply(asked) == (asked, [])


def test_within_allows_what_the_bounds_of_a_key_do() -> None:
    within = PolicyBounds(decode=("lowbit_top_k",), max_budget=512)

    def allows(policy: dict[str, Any]) -> bool:
        read: AttentionPolicy = parse_policy(policy)
        return within.allow(read.decode, read.prefill, read.model_dump(mode="json", exclude_none=True))

    assert allows({"decode": {"policy": "lowbit_top_k", "budget": 512}})
    assert not allows({"decode": {"policy": "lowbit_top_k", "budget": 513}})
    assert not allows({"decode": {"policy": "quest", "budget": 512}})
    assert not allows({"decode": {"policy": "lowbit_top_k", "budget": 512}, "prefill": {"policy": "quoka"}})
