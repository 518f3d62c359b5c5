"""Choosing policies: never below the quality, never dearer than dense, never dearer for less quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow.left_policies import Left
from sglang_winnow.quality_choice import AS_DENSE, Choice, QualityBound, choose, expected_of, measured_around
from sglang_winnow.quality_profile import Curve
from tests.profiles import curve
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_kernels.policies.quality import Quality

LENGTHS = (1000, 2000, 4000)
QUOKA = {"prefill": {"policy": "quoka", "budget": 256}}
DECODES: tuple[dict[str, Any], ...] = tuple(
    {"decode": {"policy": "lowbit_top_k", "budget": budget}} for budget in (128, 256, 512)
)
POLICIES = [*DECODES, QUOKA, *(decode | QUOKA for decode in DECODES)]
QUEST = {"decode": {"policy": "quest", "budget": 256}}


def chosen(quality: Mapping[str, Any], length: int, curves: Sequence[Curve], **more: Any) -> Choice:
    defaults: dict[str, Any] = {"default_kl": 0.02, "cached": lambda _: 0, "dense_until": lambda _: 0}
    return choose(Quality(**quality), length, curves, LENGTHS, **(defaults | more))


figures = st.tuples(st.floats(0, 0.1), st.floats(0.5, 1), st.floats(0.01, 1.2))


@st.composite
def profiles(draw: st.DrawFn) -> list[Curve]:
    """The prefill alone first, without which nothing can be said of what it costs."""
    found = []
    for policy in POLICIES:
        lengths = draw(st.sets(st.sampled_from(LENGTHS), min_size=1))
        found.append(curve(policy, {length: draw(figures) for length in sorted(lengths)}))
    return found


qualities = st.fixed_dictionaries({}, optional={"kl": st.floats(1e-4, 0.2), "top1": st.floats(0.5, 1)})


@given(profiles(), qualities, st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_the_choice_keeps_the_quality_and_costs_no_more_than_dense(
    curves: list[Curve], quality: dict[str, float], length: int, dense: int, sparse: int
) -> None:
    def cached(policy: AttentionPolicy) -> int:
        return dense if policy.has_dense_prefill else sparse

    choice = chosen(quality, length, curves, cached=cached)
    kl = 0.02 if not quality else quality.get("kl")
    assert kl is None or choice.expected.kl <= kl
    assert choice.expected.top1 >= quality.get("top1", 0)
    found = cached(choice.policy)
    assert choice.expected.cost(length, found) <= AS_DENSE.cost(length, dense)
    assert choice.policy.is_dense or LENGTHS[0] <= length <= LENGTHS[-1]
    # What a curve has at each measured length around is no worse than what is expected.
    for own in curves:
        for around in choice.lengths if own.attention == choice.policy else ():
            point = own.at(around)
            assert point is not None
            assert point.kl_high <= choice.expected.kl
            assert point.top1_low >= choice.expected.top1


@given(profiles(), st.floats(1e-4, 0.1), st.floats(1e-4, 0.1), st.integers(1000, 4000), st.integers(0, 4000))
def test_less_quality_never_costs_more(curves: list[Curve], one: float, other: float, length: int, dense: int) -> None:
    def cached(policy: AttentionPolicy) -> int:
        return dense if policy.has_dense_prefill else 0

    strict, loose = (chosen({"kl": kl}, length, curves, cached=cached) for kl in sorted((one, other)))
    costs = [each.expected.cost(length, cached(each.policy)) for each in (strict, loose)]
    assert costs[1] <= costs[0]


def test_between_two_lengths_both_count() -> None:
    curves = [
        curve(DECODES[0], {1000: (0.001, 0.99, 0.2), 2000: (0.03, 0.9, 0.1), 4000: (0.05, 0.8, 0.05)}),
        curve(DECODES[1], {1000: (0.001, 0.99, 0.4), 2000: (0.01, 0.98, 0.2), 4000: (0.019, 0.95, 0.1)}),
        curve(DECODES[2], {2000: (0.001, 0.99, 0.4), 4000: (0.002, 0.99, 0.2)}),
    ]
    budgets = {
        length: getattr(chosen({}, length, curves).policy.decode, "budget", None) for length in (1000, 1001, 4000)
    }
    assert budgets == {1000: 128, 1001: 256, 4000: 256}
    choice = chosen({"kl": 0.015}, 3000, curves)
    assert (choice.policy.decode, choice.lengths) == (parse_policy(DECODES[2]).decode, (2000, 4000))
    assert (choice.expected.kl, choice.expected.kv_read_ratio) == (0.002, 0.4)
    assert chosen({"top1": 0.97}, 1500, curves).policy == parse_policy(DECODES[1])
    # The last was not measured at 1,000 tokens.
    assert chosen({"kl": 0.005}, 1500, curves).policy.is_dense
    assert chosen({"kl": 0.0005}, 1000, curves).policy.is_dense


@pytest.mark.parametrize(
    ("length", "around"),
    [(999, ()), (1000, (1000,)), (1001, (1000, 2000)), (3999, (2000, 4000)), (4000, (4000,)), (4001, ())],
)
def test_the_lengths_around_a_prompt(length: int, around: tuple[int, ...]) -> None:
    assert measured_around(length, LENGTHS) == around


@pytest.mark.parametrize("length", [10, 4001])
def test_where_nothing_was_measured_it_is_dense_and_says_so(length: int) -> None:
    choice = chosen({}, length, [curve(DECODES[0], {1000: (0.0, 1.0, 0.1), 4000: (0.0, 1.0, 0.1)})])
    assert choice.policy.is_dense
    [warning] = choice.warnings
    assert f"no figures for a prompt of {length} tokens" in warning
    assert choice.told()["measured_lengths"] == []


def test_bounds_come_along() -> None:
    at = dict.fromkeys(LENGTHS, (0.001, 0.99, 0.1))
    dearer = dict.fromkeys(LENGTHS, (0.001, 0.99, 0.3))
    curves = [curve(DECODES[0], at), curve(QUEST, dearer), curve(QUOKA, at), curve(QUEST | QUOKA, dearer)]

    def within(**bounds: Any) -> AttentionPolicy:
        return chosen({"within": bounds}, 1000, curves).policy

    assert within() == parse_policy(QUEST | QUOKA)
    assert within(prefill=["dense"]) == parse_policy(DECODES[0])
    assert within(prefill=["dense"], decode=["quest"]) == parse_policy(QUEST)
    assert within(prefill=["dense"], min_budget=200, decode=["quest", "lowbit_top_k"]) == parse_policy(QUEST)
    assert within(prefill=["dense"], max_budget=100).is_dense
    with pytest.raises(PolicyError, match=r"attention\.quality: no policy within the bounds keeps it at 1000 tokens"):
        within(decode=["quest"], max_budget=100)


def test_policies_that_run_dense_at_this_length_are_not_chosen() -> None:
    curves = [curve(DECODES[0], dict.fromkeys(LENGTHS, (0.001, 0.99, 0.1)))]
    assert chosen({}, 2000, curves, dense_until=lambda _: 2000).policy.is_dense
    assert not chosen({}, 2001, curves, dense_until=lambda _: 2000).policy.is_dense


def test_a_conversation_goes_on_where_most_of_it_is_cached() -> None:
    at = dict.fromkeys(LENGTHS, (0.001, 0.99, 0.2))
    curves = [curve(QUOKA, at)]

    def has_dense_prefill(dense: int, sparse: int) -> bool:
        def cached(policy: AttentionPolicy) -> int:
            return dense if policy.has_dense_prefill else sparse

        return chosen({}, 2000, curves, cached=cached).policy.has_dense_prefill

    assert not has_dense_prefill(0, 0)
    assert not has_dense_prefill(500, 0)
    assert has_dense_prefill(1000, 0)
    assert not has_dense_prefill(1900, 1900)
    assert has_dense_prefill(1900, 500)


def test_a_policy_after_a_sparse_prefill_costs_that_prefill() -> None:
    at, prefill = (dict.fromkeys(LENGTHS, (0.001, 0.99, read)) for read in (0.1, 0.7))
    both, alone = curve(DECODES[0] | QUOKA, at), curve(QUOKA, prefill)
    expected = expected_of(both, [both, alone], (1000,))
    assert expected is not None
    assert (expected.kv_read_ratio, expected.prefill_kv_read_ratio) == (0.1, 0.7)
    assert expected_of(both, [both], (1000,)) is None


def leaving(*decodes: dict[str, Any]) -> Any:
    """Return what says of these decode policies that they were left."""
    parts = {parse_policy(decode): Left(parse_policy(decode), 20, 0.5, 0.9) for decode in decodes}
    return lambda policy: parts.get(policy.model_copy(update={"prefill": AttentionPolicy().prefill}))


left_decodes = st.sets(st.sampled_from(range(len(DECODES)))).map(lambda chosen: [DECODES[index] for index in chosen])


@given(profiles(), qualities, left_decodes, st.integers(1000, 4000), st.integers(0, 5000), st.integers(0, 5000))
def test_what_was_left_is_never_chosen_and_all_else_holds(
    curves: list[Curve], quality: dict[str, float], decodes: list[dict[str, Any]], length: int, dense: int, sparse: int
) -> None:
    def cached(policy: AttentionPolicy) -> int:
        return dense if policy.has_dense_prefill else sparse

    left = leaving(*decodes)
    before = chosen(quality, length, curves, cached=cached)
    choice = chosen(quality, length, curves, cached=cached, left=left)
    assert left(choice.policy) is None
    assert choice.expected.kl <= (0.02 if not quality else quality.get("kl", 1))
    assert choice.expected.top1 >= quality.get("top1", 0)
    # With its index a policy may read more than the dense decoding that takes its place.
    reads = min(1.0, before.expected.kv_read_ratio)
    least = replace(before.expected, kv_read_ratio=reads).cost(length, cached(before.policy))
    assert least <= choice.expected.cost(length, cached(choice.policy)) <= AS_DENSE.cost(length, dense)
    if left(before.policy) is None:
        assert choice.policy == before.policy
    else:
        assert left(before.policy) in choice.left


@given(profiles(), qualities, left_decodes, st.integers(1000, 4000))
def test_a_prefill_is_there_as_long_as_it_was_before_its_decode_policy_was_left(
    curves: list[Curve], quality: dict[str, float], decodes: list[dict[str, Any]], length: int
) -> None:
    """What was chosen after a sparse prefill goes on after it: there all of the prompt is cached."""
    within = {"within": {"prefill": ["quoka"]}}
    try:
        before = chosen(quality | within, length, curves, cached=lambda _: length)
    except PolicyError:
        return
    choice = chosen(quality | within, length, curves, cached=lambda _: length, left=leaving(*decodes))
    assert choice.policy.prefill == before.policy.prefill


def test_the_next_cheapest_is_chosen_and_dense_as_the_last() -> None:
    reads = (0.1, 0.2, 0.3)
    curves = [curve(DECODES[index], dict.fromkeys(LENGTHS, (0.001, 0.99, read))) for index, read in enumerate(reads)]
    found = [chosen({}, 1000, curves, left=leaving(*DECODES[:number])) for number in range(4)]
    assert [choice.policy for choice in found] == [*map(parse_policy, DECODES), AttentionPolicy()]
    assert [[each.policy for each in choice.left] for choice in found] == [
        [parse_policy(each) for each in DECODES[:number]] for number in range(4)
    ]
    with pytest.raises(
        PolicyError, match=r"audits showed that lowbit_top_k breaks its promise, so it was left\); allow"
    ):
        chosen({"within": {"decode": ["lowbit_top_k"]}}, 1000, curves, left=leaving(*DECODES))


def test_a_conversation_goes_on_densely_in_its_part_of_the_cache_when_its_policy_is_left() -> None:
    both = curve(DECODES[0] | QUOKA, dict.fromkeys(LENGTHS, (0.01, 0.99, 0.1)))
    # What it loses by itself is measured on other tokens, and more than is allowed.
    alone = curve(QUOKA, dict.fromkeys(LENGTHS, (0.05, 0.9, 0.7)))
    cached = {True: 0, False: 1900}
    before, after = (
        chosen({}, 2000, [both, alone], cached=lambda policy: cached[policy.has_dense_prefill], left=left)
        for left in (leaving(), leaving(DECODES[0]))
    )
    assert before.policy == parse_policy(DECODES[0] | QUOKA)
    assert after.policy == parse_policy(QUOKA)
    assert (after.expected.kl, after.expected.kv_read_ratio, after.expected.prefill_kv_read_ratio) == (0.01, 1.0, 0.7)
    assert after.promised_share is None
    nowhere = chosen({"within": {"decode": ["lowbit_top_k", "dense"], "prefill": ["dense"]}}, 2000, [both, alone])
    assert nowhere.policy.is_dense


LOADED = [
    curve(DECODES[0], dict.fromkeys(LENGTHS, (0.04, 0.93, 0.1))),
    curve(DECODES[1], dict.fromkeys(LENGTHS, (0.03, 0.95, 0.2))),
    curve(DECODES[2], dict.fromkeys(LENGTHS, (0.01, 0.98, 0.4))),
]


@pytest.mark.parametrize(
    ("quality", "budget", "lowered"),
    [
        ({}, 256, QualityBound(0.03, None)),
        ({"under_load": {"kl": 0.05}}, 128, QualityBound(0.05, None)),
        # Less than the server's own bound without load.
        ({"under_load": {"kl": 0.001}}, 512, None),
        ({"kl": 0.02}, 512, None),
        ({"top1": 0.97}, 512, None),
        ({"kl": 0.02, "under_load": {"kl": 0.035}}, 256, QualityBound(0.035, None)),
        ({"top1": 0.97, "under_load": {"top1": 0.9}}, 128, QualityBound(None, 0.9)),
        ({"kl": 0.02, "top1": 0.97, "under_load": {"top1": 0.9}}, 512, None),
        ({"kl": 0.02, "top1": 0.97, "under_load": {"kl": 0.05, "top1": 0.95}}, 256, QualityBound(0.05, 0.95)),
        # Under load nothing else keeps it.
        ({"kl": 0.02, "under_load": {"kl": 0.02}}, 512, None),
    ],
)
def test_under_load_a_lower_quality_suffices(
    quality: dict[str, Any], budget: int, lowered: QualityBound | None
) -> None:
    without = chosen(quality, 1000, LOADED, under_load_kl=0.03)
    loaded = chosen(quality, 1000, LOADED, under_load_kl=0.03, load=7)
    assert (without.policy, without.under_load) == (parse_policy(DECODES[2]), None)
    assert without.told()["under_load"] is None
    assert getattr(loaded.policy.decode, "budget", None) == budget
    assert loaded.bound == without.bound
    if lowered is None:
        assert loaded == without
    else:
        assert loaded.told()["under_load"] == lowered._asdict() | {"requests": 7}


@given(profiles(), st.floats(1e-3, 0.1), st.floats(1, 10), st.integers(1000, 4000), st.integers(0, 4000), left_decodes)
def test_load_changes_no_prefill_and_costs_no_more(
    curves: list[Curve], kl: float, times: float, length: int, dense: int, decodes: list[dict[str, Any]]
) -> None:
    def cached(policy: AttentionPolicy) -> int:
        return dense if policy.has_dense_prefill else 0

    quality = {"kl": kl, "under_load": {"kl": kl * times}}
    without, loaded = (
        chosen(quality, length, curves, cached=cached, load=load, left=leaving(*decodes)) for load in (None, 1)
    )
    assert loaded.policy.prefill == without.policy.prefill
    costs = [each.expected.cost(length, cached(each.policy)) for each in (without, loaded)]
    assert costs[1] <= costs[0]
    assert loaded.expected.kl <= kl * times
    assert (loaded.under_load is None) == (loaded.policy == without.policy)
    assert loaded.under_load is None or loaded.expected.kl > kl


def test_the_share_that_is_expected_is_the_least_of_the_measured_ones() -> None:
    own = curve(DECODES[0], dict.fromkeys(LENGTHS, (0.001, 0.99, 0.1)))
    points = tuple(
        point.model_copy(update={"true_share": share})
        for point, share in zip(own.points, (0.9, 0.8, None), strict=True)
    )
    own = own.model_copy(update={"points": points})
    for length, share in ((1000, 0.9), (1500, 0.8), (3000, None)):
        assert chosen({}, length, [own]).expected.true_share == share
