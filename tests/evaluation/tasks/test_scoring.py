from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow_evaluation.over_http.attention_ratios import attention_ratios
from winnow_evaluation.tasks.scoring import found_fraction, mean_score, paired_difference

references = st.lists(st.text("abcdefgh0123456789-", min_size=1, max_size=12), min_size=1, max_size=8)


@given(references, st.randoms())
def test_all_references_in_any_order_and_case_score_one(wanted: list[str], rng: object) -> None:
    shuffled = list(wanted)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert found_fraction("The answers: " + " and ".join(shuffled).upper(), wanted) == 1.0


@given(references, st.text("xyz ,.\n", max_size=50))
def test_an_output_without_their_characters_scores_zero(wanted: list[str], output: str) -> None:
    assert found_fraction(output, wanted) == 0.0


@given(references, st.text(max_size=60), st.text(max_size=60))
def test_more_output_never_scores_less(wanted: list[str], output: str, more: str) -> None:
    assert 0.0 <= found_fraction(output, wanted) <= found_fraction(output + more, wanted) <= 1.0


def test_the_score_is_the_fraction_found() -> None:
    assert found_fraction("It is 111 or 333.", ["111", "222", "333", "444"]) == 0.5


def test_scoring_without_references_is_refused() -> None:
    with pytest.raises(ValueError, match="references: at least one"):
        found_fraction("anything", [])


scores = st.lists(st.floats(0, 1), min_size=1, max_size=200)


@given(scores)
def test_the_interval_holds_the_mean_and_stays_within_bounds(values: list[float]) -> None:
    score = mean_score(values)
    assert 0.0 <= score.low <= score.mean <= score.high <= 1.0
    assert score.mean == pytest.approx(sum(values) / len(values))


@given(scores.filter(lambda values: len(values) < 50))
def test_the_interval_narrows_with_more_of_the_same(values: list[float]) -> None:
    few, many = mean_score(values), mean_score(values * 4)
    assert many.high - many.low < few.high - few.low


def test_the_interval_is_wilsons() -> None:
    # Newcombe (1998), table I: 81 of 263, and 0 of 20.
    score = mean_score([1.0] * 81 + [0.0] * 182)
    assert [score.low, score.high] == pytest.approx([0.2553, 0.3662], abs=1e-4)
    score = mean_score([0.0] * 20)
    assert [score.low, score.high] == pytest.approx([0.0, 0.1611], abs=1e-4)


@pytest.mark.parametrize(("values", "message"), [([], "at least one"), ([1.2], "between 0 and 1")])
def test_a_mean_of_no_scores_or_of_others_is_refused(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean_score(values)


def _attention(steps: int, context: int, attended: float, kv_read: float) -> dict[str, object]:
    return {
        "decode": {"steps": steps, "context_tokens": context, "attended_ratio": attended, "kv_read_ratio": kv_read},
        "prefill": {
            "tokens": context - steps,
            "cached_tokens": 0,
            "attended_ratio": attended,
            "kv_read_ratio": kv_read,
        },
    }


def test_ratios_are_of_sums_not_means_of_ratios() -> None:
    ratios = attention_ratios([_attention(2, 101, 1.0, 1.0), _attention(4, 1003, 0.1, 0.2)])
    assert ratios is not None
    short, long = 100 + 101, 1000 + 1001 + 1002 + 1003
    assert ratios.decode_attended_ratio == pytest.approx((1.0 * short + 0.1 * long) / (short + long))
    assert ratios.decode_kv_read_ratio == pytest.approx((1.0 * short + 0.2 * long) / (short + long))
    short, long = sum(range(1, 100)), sum(range(1, 1000))
    assert ratios.prefill_attended_ratio == pytest.approx((1.0 * short + 0.1 * long) / (short + long))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(100, 10_000), st.floats(0, 1)), min_size=1, max_size=20))
def test_ratios_lie_between_the_least_and_the_greatest(requests: list[tuple[int, int, float]]) -> None:
    ratios = attention_ratios([_attention(steps, context, ratio, ratio) for steps, context, ratio in requests])
    assert ratios is not None
    each = [ratio for _, _, ratio in requests]
    for ratio in (
        ratios.decode_attended_ratio,
        ratios.decode_kv_read_ratio,
        ratios.prefill_attended_ratio,
        ratios.prefill_kv_read_ratio,
    ):
        assert ratio is not None
        assert min(each) - 1e-9 <= ratio <= max(each) + 1e-9


def test_prefill_behind_a_cached_prefix_weighs_the_prefix_too() -> None:
    sections = [{"tokens": 10, "cached_tokens": 90, "attended_ratio": 0.5}, {"tokens": 100, "attended_ratio": 1.0}]
    ratios = attention_ratios([{"prefill": section} for section in sections])
    behind, whole = sum(range(91, 101)), sum(range(1, 101))
    assert ratios is not None
    assert ratios.prefill_attended_ratio == pytest.approx((0.5 * behind + whole) / (behind + whole))
    assert ratios.prefill_kv_read_ratio is None
    assert ratios.decode_attended_ratio is None


@pytest.mark.parametrize(
    "partial", [{}, {"decode": None}, {"decode": {"steps": 0, "context_tokens": 5, "attended_ratio": 0.5}}]
)
def test_what_an_object_does_not_tell_is_not_counted(partial: dict[str, object]) -> None:
    assert attention_ratios([]) is None
    alone = attention_ratios([partial])
    assert alone is not None
    assert alone.decode_attended_ratio is None
    both = attention_ratios([partial, _attention(2, 100, 0.25, 0.5)])
    assert both is not None
    assert both.decode_attended_ratio == 0.25


def test_termination_and_estimates_are_weighted_by_context() -> None:
    def decode(steps: int, context: int, **told: object) -> dict[str, object]:
        return {"decode": {"steps": steps, "context_tokens": context, **told}, "prefill": {"cached_tokens": context}}

    early = {"terminated_ratio": 1.0, "skipped_ratio": 0.5}
    late = {"terminated_ratio": 0.5, "skipped_ratio": 0.0}
    ratios = attention_ratios(
        [
            decode(1, 100, estimated_share=0.9, early_termination=early),
            decode(1, 300, estimated_share=0.8, early_termination=late),
            decode(1, 1000, estimated_share=None, early_termination=None),
        ]
    )
    assert ratios is not None
    assert ratios.estimated_share == pytest.approx((0.9 * 100 + 0.8 * 300) / 400)
    assert ratios.terminated_ratio == pytest.approx((1.0 * 100 + 0.5 * 300) / 400)
    assert ratios.skipped_ratio == pytest.approx(0.5 * 100 / 400)
    assert ratios.cached_tokens == pytest.approx(1400 / 3)


pairs = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=200)


@given(pairs)
def test_the_paired_interval_holds_the_difference_and_turns_with_its_sign(values: list[tuple[float, float]]) -> None:
    scores, base = [score for score, _ in values], [other for _, other in values]
    difference, turned = paired_difference(scores, base), paired_difference(base, scores)
    assert -1.0 <= difference.low <= difference.mean <= difference.high <= 1.0
    assert difference.low < difference.high
    assert difference.mean == pytest.approx(sum(scores) / len(scores) - sum(base) / len(base), abs=1e-9)
    assert (turned.mean, turned.low, turned.high) == pytest.approx(
        (-difference.mean, -difference.high, -difference.low), abs=1e-12
    )


def test_the_paired_interval_is_wilsons_where_nothing_is_lost() -> None:
    difference = paired_difference([1.0] * 81 + [0.0] * 182, [0.0] * 263)
    # No loss was seen: its upper bound, 0 of 263, widens the interval below.
    assert difference.high == pytest.approx(0.3662, abs=1e-4)
    assert difference.low == pytest.approx(
        81 / 263 - math.hypot(81 / 263 - 0.2553, mean_score([0.0] * 263).high), abs=1e-4
    )
    equal = paired_difference([1.0] * 400, [1.0] * 400)
    assert (equal.mean, equal.low, equal.high) == pytest.approx((0.0, -0.0095, 0.0095), abs=1e-4)


@pytest.mark.parametrize(("gained", "lost"), [(0.0, 0.0), (0.01, 0.01), (0.02, 0.05), (0.3, 0.3)])
def test_the_paired_interval_covers_what_it_says(gained: float, lost: float) -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(400):
        drawn = [rng.random() for _ in range(200)]
        scores = [0.0 if gained <= each < gained + lost else 1.0 for each in drawn]
        base = [0.0 if each < gained else 1.0 for each in drawn]
        difference = paired_difference(scores, base)
        covered += difference.low <= gained - lost <= difference.high
    # Three standard deviations of a share of 95 % in 400 trials are 3.3 points.
    assert covered / 400 > 0.917


@pytest.mark.parametrize(
    ("scores", "base", "message"),
    [([1.0], [1.0, 0.0], "1 cannot be paired with 2"), ([], [], "at least one"), ([1.2], [1.0], "between 0 and 1")],
)
def test_scores_that_do_not_pair_are_refused(scores: list[float], base: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_difference(scores, base)
