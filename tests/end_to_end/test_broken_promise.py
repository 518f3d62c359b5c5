"""A selector that is broken, under audited load: the alert fires within a minute, and ``auto`` leaves its policy."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from sglang_winnow import audit_share, crossover
from sglang_winnow.left_policies import MIN_ANSWERS
from sglang_winnow.profile_settings import PROFILE
from tests.deployment.prometheus import prometheus
from tests.models import ModelShape, write_model, write_weights
from tests.profiles import curve, profile
from tests.runtime import runtime_server
from tests.service.control import replica
from tests.service.waiting import eventually

MODEL = "tiny"
LENGTHS = (150, 2000)
ALERT_SECONDS = 60
# The first is cheaper, and broken.
BROKEN = {"decode": {"policy": "lowbit_top_p", "p": 0.9}}
SOUND = {"decode": {"policy": "lowbit_top_k", "budget": 256}}
QUOKA = {"prefill": {"policy": "quoka", "budget": 64, "block": 64}}
CURVES = [
    curve(QUOKA, dict.fromkeys(LENGTHS, (0.005, 0.99, 0.5))),
    *(curve(BROKEN | prefill, dict.fromkeys(LENGTHS, (0.01, 0.98, 0.3)), true_share=0.9) for prefill in ({}, QUOKA)),
    *(curve(SOUND | prefill, dict.fromkeys(LENGTHS, (0.01, 0.98, 0.5)), true_share=0.6) for prefill in ({}, QUOKA)),
]
PLUGIN = """
from winnow_kernels.policies.lowbit_top_p.reference import LowBitTopPStep

chosen = LowBitTopPStep.chosen

def register():
    # What it should leave is what it takes.
    LowBitTopPStep.chosen = lambda step, requests, predicted: ~chosen(step, requests, predicted)
"""


def write_plugin(folder: Path) -> None:
    """Write a distribution that SGLang finds as it finds Winnow."""
    distribution = folder / "broken_selector-1.dist-info"
    distribution.mkdir(parents=True)
    (folder / "broken_selector.py").write_text(PLUGIN)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-selector\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text("[sglang.srt.plugins]\nbroken = broken_selector:register\n")


def prompt(seed: int, length: int = 400) -> list[int]:
    return random.Random(seed).choices(range(2, ModelShape().vocab_size), k=length)


async def ask(client: httpx.AsyncClient, input_ids: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": input_ids, "sampling_params": sampling, "attention": "auto"}
    answer = await client.post("/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def firing(monitoring: httpx.AsyncClient) -> set[tuple[str, str, str | None]]:
    """Return the name, the policy and the promise of each alert on a policy that fires."""
    alerts = (await monitoring.get("/api/v1/alerts")).json()["data"]["alerts"]
    return {
        (alert["labels"]["alertname"], alert["labels"]["policy"], alert["labels"].get("promise"))
        for alert in alerts
        if alert["state"] == "firing" and "policy" in alert["labels"]
    }


@pytest.mark.full
async def test_a_broken_selector_fires_the_alert_and_is_left(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", ModelShape())
    write_weights(model)
    profile(model, LENGTHS, CURVES).write(tmp_path / "profile.json")
    write_plugin(tmp_path / "plugin")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        PROFILE: str(tmp_path / "profile.json"),
        audit_share.ENVIRONMENT: "0.5",
        crossover.ENVIRONMENT: "0",
    }
    arguments = ["--served-model-name", MODEL, "--max-total-tokens", "16384", "--attention-backend", "winnow"]
    with runtime_server(model, *arguments, log=tmp_path / "log", **environment) as runtime:
        store = f"sqlite:///{tmp_path}/control.db"
        async with replica(store, runtime.url, metrics_public=True) as client:
            targets = {"winnow-service": urlsplit(str(client.base_url)).netloc}
            async with prometheus(tmp_path, targets) as monitoring:
                await under_load(client, monitoring)
        assert runtime.log.read_text().count("Winnow chooses") == 1
        async with httpx.AsyncClient(base_url=runtime.url) as direct:
            state = (await direct.get("/server_info")).json()["internal_states"][0]
        assert state["winnow"]["left_policies_total"] == 1


async def under_load(client: httpx.AsyncClient, monitoring: httpx.AsyncClient) -> None:
    async def is_ready() -> bool | None:
        return (await client.get("/readyz")).status_code == 200 or None

    await eventually(is_ready)
    turn = prompt(0)
    conversation = [await ask(client, turn)]
    answers: list[dict[str, Any]] = []

    async def load() -> None:
        # So few that the cache holds them all, and the conversation.
        for seed in itertools.cycle(range(1, 21)):
            answer = await ask(client, prompt(seed))
            answers.append(answer["attention"])

    expected = {
        ("WinnowPromiseBroken", "lowbit_top_p", "p"),
        ("WinnowPromiseBroken", "lowbit_top_p", "quality"),
        ("WinnowPolicyLeft", "lowbit_top_p", None),
    }

    async def all_fire() -> bool | None:
        await asyncio.sleep(0.5)
        return await firing(monitoring) >= expected or None

    loading = asyncio.create_task(load())
    try:
        await eventually(all_fire, timeout_seconds=ALERT_SECONDS)
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    # Nothing is said of the policy that is sound.
    assert await firing(monitoring) == expected
    chosen = [(told["decode"]["policy"], told["prefill"]["policy"]) for told in answers]
    left_with = chosen.index(("lowbit_top_k", "quoka"))
    assert MIN_ANSWERS - 2 <= left_with <= 3 * MIN_ANSWERS
    assert set(chosen[:left_with]) == {("lowbit_top_p", "quoka")}
    assert set(chosen[left_with:]) == {("lowbit_top_k", "quoka")}
    assert [told["quality"]["left"] for told in answers[:left_with]] == [[]] * left_with
    [left] = answers[-1]["quality"]["left"]
    assert left["decode"] == {"policy": "lowbit_top_p", "sinks": 16, "p": 0.9, "min_tokens": 0}
    assert left["promised"] == 0.9
    assert left["true_share"] < 0.6
    assert answers[-1]["audit"]["true_share"] > 0.6
    # A conversation that began with it goes on where it was.
    conversation.append(await ask(client, [*turn, *conversation[0]["output_ids"], *prompt(1, 20)]))
    kinds = [one["attention"]["decode"]["policy"] for one in conversation]
    assert kinds == ["lowbit_top_p", "lowbit_top_k"]
    assert [one["meta_info"]["cached_tokens"] for one in conversation] == [0, len(turn) // 64 * 64]
