"""Leaving policies whose audits break their promise: soon where they do, and never by chance or by a few answers."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow import left_policies
from sglang_winnow.left_policies import MIN_ANSWERS, TOLERANCE, Left, LeftPolicies
from sglang_winnow.metrics import METRICS
from sglang_winnow.quality_choice import Choice, Expected, QualityBound
from sglang_winnow.reporting import _note_audit
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

PROMISED = 0.9
POLICY = parse_policy({"decode": {"policy": "lowbit_top_k", "budget": 512}})


def first_left(shares: Iterable[float], promised: float = PROMISED) -> int | None:
    """Return the number of the answer with which the policy was left, from 1 on."""
    left = LeftPolicies()
    for number, share in enumerate(shares, 1):
        left.note(POLICY, share, promised)
        if left.find(POLICY) is not None:
            return number
    return None


def around(mean: float, spread: float, answers: int, seed: int = 0) -> list[float]:
    """Return shares that are ``mean`` on average: two values, as far from it as they can be within ``spread``."""
    chance = random.Random(seed)
    high = min(1.0, mean + spread)
    low = max(0.0, mean - spread)
    of_high = (mean - low) / (high - low)
    return [high if chance.random() < of_high else low for _ in range(answers)]


@pytest.mark.parametrize(("share", "answers"), [(0.0, 20), (0.3, 20), (0.7, 45), (0.8, 100)])
def test_a_broken_promise_is_left_soon(share: float, answers: int) -> None:
    left = first_left(around(share, 0.1, 1000))
    assert left is not None
    assert MIN_ANSWERS <= left <= answers


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_a_long_good_time_before_does_not_delay_it(share: float) -> None:
    good = around(PROMISED, 0.1, 1000)
    alone, behind = (first_left(before + around(share, 0.1, 1000)) for before in ([], good))
    assert alone is not None
    assert behind is not None
    assert behind - len(good) <= alone + 5


@given(st.lists(st.floats(0, 1), max_size=MIN_ANSWERS - 1), st.floats(0, 1))
def test_a_few_answers_decide_nothing(shares: list[float], promised: float) -> None:
    assert first_left(shares, promised) is None


@given(st.floats(0, 1), st.data())
def test_who_holds_the_promise_is_never_left(promised: float, data: st.DataObject) -> None:
    floor = max(0.0, promised - TOLERANCE)
    shares = data.draw(st.lists(st.floats(floor, 1), min_size=1, max_size=60))
    assert first_left(shares * 10, promised) is None


@given(st.lists(st.floats(0, 1), min_size=MIN_ANSWERS, max_size=80), st.integers(0, 79), st.floats(0, 1))
def test_less_attention_never_leaves_later(shares: list[float], where: int, less: float) -> None:
    worse = list(shares)
    worse[where % len(shares)] *= less
    before, after = first_left(shares), first_left(worse)
    # The evidence may begin earlier, with what is not as bad: it has more to say, not less.
    assert before is None or (after is not None and after <= before)


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.85])
@pytest.mark.parametrize("mean", [PROMISED, PROMISED - TOLERANCE / 2])
def test_chance_leaves_nothing(spread: float, mean: float) -> None:
    assert first_left(around(mean, spread, 5_000)) is None


@pytest.mark.parametrize("spread", [0.05, 0.85])
def test_what_holds_just_the_least_that_is_tolerated_is_left_as_rarely_as_is_said(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_policies, "RISK", 1e-2)
    monkeypatch.setattr(left_policies, "MIN_ANSWERS", 1)
    runs = [first_left(around(PROMISED - TOLERANCE, spread, 1000, seed)) or 1000 for seed in range(40)]
    assert sum(runs) / len(runs) > 1 / left_policies.RISK


def test_it_is_said_once_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    left = LeftPolicies()
    before = METRICS.totals()["left_policies_total"]
    with caplog.at_level(logging.WARNING, left_policies.__name__):
        for _ in range(200):
            left.note(POLICY, 0.25, PROMISED)
    [record] = caplog.records
    assert '"policy":"lowbit_top_k"' in record.getMessage()
    assert "20 audited answers held 0.250 of the attention on average, and 0.900 was promised" in record.getMessage()
    assert METRICS.totals()["left_policies_total"] == before + 1
    found = left.find(POLICY)
    assert found is not None
    decode = {"policy": "lowbit_top_k", "sinks": 16, "budget": 512}
    assert found.told() == {"decode": decode, "answers": 20, "true_share": 0.25, "promised": 0.9}


def test_it_is_left_after_every_prefill_and_nothing_else_is() -> None:
    left = LeftPolicies()
    for _ in range(50):
        left.note(POLICY, 0.25, PROMISED)
    quoka = parse_policy({"prefill": {"policy": "quoka"}}).prefill
    assert left.find(POLICY.model_copy(update={"prefill": quoka, "audit": 0.5})) is not None
    others: list[dict[str, Any]] = [
        {},
        {"decode": {"policy": "lowbit_top_k", "budget": 513}},
        {"decode": {"policy": "lowbit_top_k", "budget": 512}, "early_termination": {}},
        {"prefill": {"policy": "quoka"}},
    ]
    assert [left.find(parse_policy(other)) for other in others] == [None] * len(others)


def chosen(policy: dict[str, Any], true_share: float | None) -> Choice:
    expected = Expected(0.01, 0.99, 0.1, 1.0, true_share)
    return Choice(parse_policy(policy), QualityBound(0.02, None), 1000, (1000,), expected)


@pytest.mark.parametrize(
    ("decode", "more", "true_share", "promised"),
    [
        ({"policy": "lowbit_top_k"}, {}, 0.8, 0.8),
        ({"policy": "lowbit_top_k"}, {}, None, None),
        ({"policy": "lowbit_top_p", "p": 0.9}, {}, 0.8, 0.9),
        ({"policy": "lowbit_top_p", "p": 0.9}, {}, 0.95, 0.95),
        ({"policy": "lowbit_top_p", "p": 0.9}, {}, None, 0.9),
        ({"policy": "lowbit_top_p", "p": 0.9, "max_tokens": 512}, {}, 0.8, 0.8),
        ({"policy": "lowbit_top_p", "p": 0.9}, {"early_termination": {}}, 0.8, 0.8),
        ({"policy": "dense"}, {}, None, None),
    ],
)
def test_a_choice_promises_what_the_profile_measured_or_its_own_p(
    decode: dict[str, Any], more: dict[str, Any], true_share: float | None, promised: float | None
) -> None:
    assert chosen({"decode": decode} | more, true_share).promised_share == promised


def test_only_audited_answers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[AttentionPolicy, float, float]] = []

    class Noting(LeftPolicies):
        def note(self, policy: AttentionPolicy, share: float, promised: float) -> None:
            noted.append((policy, share, promised))

    monkeypatch.setattr(left_policies, "LEFT", Noting())
    choice = chosen({"decode": {"policy": "lowbit_top_k"}}, 0.8)
    row = torch.zeros(len(Field), dtype=torch.float64)
    _note_audit(row, choice)
    assert noted == []
    row[Field.AUDITED_HEADS], row[Field.AUDITED_SHARE] = 40, 30
    _note_audit(row, chosen({"decode": {"policy": "lowbit_top_k"}}, None))
    assert noted == []
    _note_audit(row, choice)
    assert noted == [(choice.policy, 0.75, 0.8)]


def test_what_is_left_is_told_with_its_reason() -> None:
    left = Left(POLICY, 23, 0.5, 0.9)
    choice = Choice(AttentionPolicy(), QualityBound(0.02, None), 1000, (1000,), Expected(0, 1, 1, 1), left=(left,))
    assert choice.told()["left"] == [left.told()]
