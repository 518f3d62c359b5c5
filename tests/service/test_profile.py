"""``GET /v1/profile``: what policies lose and read on the served model, as the runtime tells it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import Deployment
from tests.service.control import ADMIN_KEY, bearer, make_key, replica, runtime
from tests.service.test_attention import SERVED
from tests.service.test_policies_api import problem
from tests.service.waiting import eventually
from winnow_kernels.policies.attention_policy import parse_policy

ROUTE = "/v1/profile"


def point(length: int, kl: float, kl_high: float, top1: float, read: float) -> dict[str, Any]:
    """What was measured at a length, with made-up figures."""
    of_top1 = {"top1": top1, "top1_low": top1 - 0.01}
    of_kl = {"kl": kl, "kl_high": kl_high}
    return {"length": length, "prompts": 8, **of_kl, **of_top1, "true_share": 0.9, "kv_read_ratio": read}


def curve(policy: dict[str, Any], *points: dict[str, Any], served: bool = True) -> dict[str, Any]:
    """A policy's points, as the runtime tells them. Those that have no time get none."""
    timed = [{"time": None} | each for each in points]
    return {"attention": json.loads(parse_policy(policy).canonical()), "served": served, "points": timed}


def timed(profile: dict[str, Any], length: int, ratios: Sequence[float | None]) -> dict[str, Any]:
    """``profile`` with times of its curves at that length, as a runtime on the machine that they are of tells it."""
    curves = []
    for of_policy, ratio in zip(profile["curves"], ratios, strict=True):
        points = [each | {"time": time(ratio) if each["length"] == length else None} for each in of_policy["points"]]
        curves.append(of_policy | {"points": points})
    return profile | {"times_are_of_this_machine": True, "curves": curves}


def time(ratio: float | None) -> dict[str, float] | None:
    """The time of a policy beside dense attention that takes 20 ms."""
    return None if ratio is None else {"seconds": 0.02 * ratio, "ratio": ratio}


def budget(tokens: int) -> dict[str, Any]:
    """A policy that reads the best tokens by its low-bit keys."""
    return {"decode": {"policy": "lowbit_top_k", "budget": tokens}}


QUOKA: dict[str, Any] = {"prefill": {"policy": "quoka"}}
PROFILE: dict[str, Any] = {
    "model": "needle",
    "kl": 0.02,
    "device": "made up",
    "under_load_kl": None,
    "load_requests": None,
    "times_are_of_this_machine": False,
    "dtype": "float32",
    "date": "2026-11-26T00:00:00+00:00",
    "data": {"source": "prose, validation", "prompts": 8, "tokens": 32},
    "lengths": [1024, 4096, 16384],
    "floor": [point(length, 0.0, 0.0, 1.0, 1.0) for length in (1024, 4096, 16384)],
    "curves": [
        curve(budget(512), point(1024, 0.01, 0.014, 0.97, 0.6), point(4096, 0.06, 0.08, 0.9, 0.2)),
        curve(budget(2048), point(4096, 0.008, 0.01, 0.98, 0.55)),
        # Reads more than the one before, and loses more.
        curve({"decode": {"policy": "quest", "budget": 2560}}, point(4096, 0.02, 0.04, 0.95, 0.65), served=False),
        curve({"decode": {"policy": "lowbit_top_p", "p": 0.9}}, point(4096, 0.0, 0.0, 1.0, 0.9)),
        curve(QUOKA, point(4096, 0.02, 0.03, 0.95, 0.3)),
        curve(budget(512) | QUOKA, point(4096, 0.08, 0.1, 0.88, 0.2)),
    ],
}


# The policy that reads least is not the fastest that is served. None of those at 1,024 tokens was timed.
TIMED = timed(PROFILE, 4096, [0.8, 0.5, 0.3, 1.6, None, 0.8])


@pytest.mark.parametrize("profile", [PROFILE, TIMED], ids=["without times", "with times"])
async def test_the_profile_is_the_runtimes(service: Deployment, profile: dict[str, Any]) -> None:
    service.runtime.server_info = {"winnow": SERVED | {"profile": profile}}

    async def ready() -> bool | None:
        return (await service.client.get("/readyz")).status_code == 200 or None

    # It is asked anew whenever it has become ready.
    await eventually(ready)
    for _ in range(3):
        answer = await service.client.get(ROUTE)
        assert (answer.status_code, answer.json()) == (200, profile)
    assert len(service.runtime.server_info_asked) == 1
    assert service.runtime.asked == []


@pytest.mark.parametrize("told", [{}, {"winnow": SERVED}, {"winnow": SERVED | {"profile": None}}])
async def test_without_one_the_command_that_makes_it_is_told(service: Deployment, told: dict[str, Any]) -> None:
    service.runtime.server_info = told
    said = problem(await service.client.get(ROUTE), 404, "no_profile")
    assert "run `winnow calibrate profile --model MODEL`" in said
    assert "WINNOW_PROFILE=MODEL-profile.json" in said


async def test_a_profile_that_is_none_is_the_runtimes_failure_and_ends_nothing_else(service: Deployment) -> None:
    short = {"model": "needle", "lengths": [1024], "policies": [], "kl": 0.02}
    service.runtime.server_info = {"winnow": SERVED | {"profile": short}}
    assert "its profile is not as expected" in problem(await service.client.get(ROUTE), 502, "runtime_unusable")
    assert (await service.client.post("/v1/completions", json={"attention": "auto"})).status_code == 200


async def test_a_runtime_that_is_away_is_503(deployment: Deployment) -> None:
    problem(await deployment.client.get(ROUTE), 503, "runtime_unavailable")


async def test_it_needs_the_scope_read(tmp_path: Path) -> None:
    async with (
        runtime() as (fake, address),
        replica(f"sqlite:///{tmp_path}/control.db", address, admin_key=ADMIN_KEY) as client,
    ):
        fake.server_info = {"winnow": SERVED | {"profile": PROFILE}}
        problem(await client.get(ROUTE), 401, "missing_key")
        for scope, status in (("infer", 403), ("read", 200)):
            key = await make_key(client, scopes=[scope])
            assert (await client.get(ROUTE, headers=bearer(key["key"]))).status_code == status
