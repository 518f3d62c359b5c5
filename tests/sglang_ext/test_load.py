"""How many requests a scheduler has, and from how many on a request is chosen for by the lower quality."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_winnow.admission import attach_policy
from sglang_winnow.crossover import ENVIRONMENT, of_all_policies
from sglang_winnow.profile_settings import LOAD, UNDER_LOAD, default_kl, load_requests, under_load_kl
from sglang_winnow.quality_choice import Choice
from sglang_winnow.server_information import ServedModel
from sglang_winnow.sglang_versions.requests import requests_of
from tests import profiles
from tests.models import ModelShape, write_model, write_weights
from tests.sglang_ext.conftest import CURVES, PROFILE_LENGTHS, QUEST, QUEST_UNDER_LOAD
from winnow_kernels.policies.attention_policy import parse_policy

SETTINGS = (default_kl, load_requests, under_load_kl, of_all_policies)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in ((LOAD, "4"), (UNDER_LOAD, "0.05"), (ENVIRONMENT, "0")):
        monkeypatch.setenv(name, value)
    for read in SETTINGS:
        read.cache_clear()
    yield
    for read in SETTINGS:
        read.cache_clear()


def request(rid: str, *, finished: bool = False) -> Any:
    return SimpleNamespace(rid=rid, finished=lambda: finished)


def batch(*requests: Any) -> Any:
    return SimpleNamespace(reqs=list(requests))


def test_each_request_that_runs_or_waits_counts_once() -> None:
    first, second, third = (request(rid) for rid in "abc")
    scheduler: Any = SimpleNamespace(running_batch=batch(), last_batch=None, waiting_queue=[])
    assert requests_of(scheduler) == 0
    scheduler.waiting_queue = [first]
    assert requests_of(scheduler) == 1
    # The last batch decoded what is running, or prefilled what runs next.
    scheduler = SimpleNamespace(running_batch=batch(first, second), last_batch=batch(first), waiting_queue=[third])
    assert requests_of(scheduler) == 3
    scheduler = SimpleNamespace(
        running_batch=batch(first, request("d", finished=True)), last_batch=batch(second), waiting_queue=[third]
    )
    assert requests_of(scheduler) == 3


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    folder = write_model(tmp_path / "model", ModelShape())
    write_weights(folder)
    return ServedModel(2, 8192, profile=profiles.profile(folder, PROFILE_LENGTHS, CURVES))


def chosen(model: ServedModel, requests: int, quality: dict[str, Any]) -> Choice:
    within = {"within": {"prefill": ["dense"]}}
    custom = {"attention": json.dumps({"quality": quality | within})}
    own: Any = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom),
        custom_logit_processor=None,
        origin_input_ids=[1] * 300,
        extra_key=None,
        rid="own",
    )
    attach_policy(own, model, None, lambda: requests)
    choice: Choice = own.winnow_state.choice
    assert own.winnow_state.policy.decode == choice.policy.decode
    return choice


@pytest.mark.parametrize(
    ("requests", "quality", "policy"),
    [
        (3, {}, QUEST),
        (4, {}, QUEST_UNDER_LOAD),
        (9, {}, QUEST_UNDER_LOAD),
        (9, {"kl": 0.02}, QUEST),
        (9, {"kl": 0.02, "under_load": {"kl": 0.03}}, QUEST_UNDER_LOAD),
        (3, {"kl": 0.02, "under_load": {"kl": 0.03}}, QUEST),
        (9, {"kl": 0.02, "under_load": {"kl": 0.029}}, QUEST),
    ],
)
def test_a_request_that_finds_the_server_under_load_gets_the_cheaper_policy(
    model: ServedModel, requests: int, quality: dict[str, Any], policy: dict[str, Any]
) -> None:
    choice = chosen(model, requests, quality)
    assert choice.policy == parse_policy(policy)
    assert (choice.under_load is None) == (policy == QUEST)
    assert choice.under_load is None or choice.under_load.requests == requests


def test_without_the_setting_the_server_is_never_under_load(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (LOAD, UNDER_LOAD):
        monkeypatch.delenv(name)
    asked = {"kl": 0.02, "under_load": {"kl": 0.03}}
    assert [chosen(model, 1000, quality).under_load for quality in ({}, asked)] == [None, None]
