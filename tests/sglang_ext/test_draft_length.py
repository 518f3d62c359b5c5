from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow.draft_length import MAX_RESTS, RESTS, DraftLength
from sglang_winnow.round_times import RoundCosts
from winnow_kernels.contract.verification import AUTO, DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS

FAR = 1000


@given(st.integers(1, MAX_DRAFT_TOKENS) | st.just(AUTO), st.lists(st.integers(0, MAX_DRAFT_TOKENS)), st.integers(0, 40))
def test_a_check_comes_to_no_more_than_is_wanted(asked: int | str, stood: list[int], wanted: int) -> None:
    length = DraftLength(asked)
    for number in stood:
        drafted = length.next(FAR)
        assert drafted == asked or (asked == AUTO and 0 <= drafted <= MAX_DRAFT_TOKENS)
        if drafted:
            length.note(drafted, min(number, drafted))
    assert length.next(wanted) + 1 <= max(wanted, 0) or wanted == 0


def test_who_names_a_number_gets_it_whatever_stands() -> None:
    length = DraftLength(6)
    for _ in range(20):
        length.note(6, 0)
        assert length.next(FAR) == 6


def test_where_all_stand_more_are_drafted() -> None:
    length = DraftLength(AUTO)
    drafted = [length.next(FAR)]
    while len(drafted) < 30:
        length.note(drafted[-1], drafted[-1])
        drafted.append(length.next(FAR))
    assert drafted[0] == DEFAULT_DRAFT_TOKENS
    assert drafted == sorted(drafted)
    assert drafted[-1] == MAX_DRAFT_TOKENS


def test_where_none_stands_steps_are_dense_but_for_a_trial_now_and_then() -> None:
    length = DraftLength(AUTO)
    while drafted := length.next(FAR):
        length.note(drafted, 0)
    rests = RESTS
    # The first of them has been looked at.
    steps = [0, *(length.next(FAR) for _ in range(RESTS))]
    while rests < MAX_RESTS:
        assert steps == [0] * rests + [1]
        length.note(1, 0)
        rests *= 2
        steps = [length.next(FAR) for _ in range(rests + 1)]
    assert steps == [0] * MAX_RESTS + [1]
    length.note(1, 0)
    assert [length.next(FAR) for _ in range(MAX_RESTS + 1)] == [0] * MAX_RESTS + [1]


def test_where_one_stands_few_are_drafted() -> None:
    length = DraftLength(AUTO)
    for _ in range(60):
        length.note(length.next(FAR), 1)
    assert 1 <= length.next(FAR) <= 3


def test_what_rounds_were_measured_to_cost_decides() -> None:
    """Where a draft takes as long as a dense step nothing pays; where it takes little, many do."""
    for costs, expected in [
        (RoundCosts(draft=1.0, check=1.2), range(1)),
        (RoundCosts(draft=0.01, check=1.0), range(12, MAX_DRAFT_TOKENS + 1)),
        (RoundCosts(draft=0.3, check=1.3), range(3, 9)),
    ]:
        length = DraftLength(AUTO)
        for _ in range(60):
            if drafted := length.next(FAR):
                length.note(drafted, min(drafted, 7), costs)
        assert length.next(FAR) in expected, costs


def test_trials_cost_less_than_three_percent() -> None:
    """A trial with one draft takes at most a draft and a check more than the dense step in its place."""
    costs = RoundCosts(draft=1.0, check=1.2)
    length, seconds, steps = DraftLength(AUTO), 0.0, 0
    for _ in range(4000):
        drafted = length.next(FAR)
        seconds += costs.draft * drafted + costs.check if drafted else 1
        steps += 1
        if drafted:
            length.note(drafted, 0, costs)
    assert seconds / steps < 1.03
