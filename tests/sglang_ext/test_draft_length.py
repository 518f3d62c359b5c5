from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow.draft_length import MAX_RESTS, RESTS, DraftLength, agree, begin_round
from sglang_winnow.round_times import ASSUMED, RoundCosts
from winnow_kernels.contract.verification import AUTO, DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS

FAR = 1000


def next_of(*lengths: DraftLength, wanted: int = FAR) -> list[int]:
    begin_round(lengths)
    return [length.next(wanted) for length in lengths]


def check(length: DraftLength, drafted: int, stood: int, costs: RoundCosts = ASSUMED) -> None:
    length.note(drafted, stood)
    agree([length], costs)


@given(st.integers(1, MAX_DRAFT_TOKENS) | st.just(AUTO), st.lists(st.integers(0, MAX_DRAFT_TOKENS)), st.integers(0, 40))
def test_a_check_comes_to_no_more_than_is_wanted(asked: int | str, stood: list[int], wanted: int) -> None:
    length = DraftLength(asked)
    for number in stood:
        [drafted] = next_of(length)
        assert drafted == asked or (asked == AUTO and 0 <= drafted <= MAX_DRAFT_TOKENS)
        if drafted:
            check(length, drafted, min(number, drafted))
    assert next_of(length, wanted=wanted)[0] + 1 <= max(wanted, 1)


def test_who_names_a_number_gets_it_whatever_stands() -> None:
    length = DraftLength(6)
    for _ in range(20):
        check(length, 6, 0)
        assert next_of(length) == [6]


def test_where_all_stand_more_are_drafted() -> None:
    length = DraftLength(AUTO)
    drafted = next_of(length)
    while len(drafted) < 30:
        check(length, drafted[-1], drafted[-1])
        drafted += next_of(length)
    assert drafted[0] == DEFAULT_DRAFT_TOKENS
    assert drafted == sorted(drafted)
    assert drafted[-1] == MAX_DRAFT_TOKENS


def test_where_none_stands_steps_are_dense_but_for_a_trial_now_and_then() -> None:
    length = DraftLength(AUTO)
    while drafted := next_of(length)[0]:
        check(length, drafted, 0)
    rests = RESTS
    # The first of them has been looked at.
    steps = [0, *(next_of(length)[0] for _ in range(RESTS - 1))]
    while rests < MAX_RESTS:
        assert steps == [0] * (rests - 1) + [1]
        check(length, 1, 0)
        rests *= 2
        steps = [next_of(length)[0] for _ in range(rests)]
    assert steps == [0] * (MAX_RESTS - 1) + [1]
    check(length, 1, 0)
    assert [next_of(length)[0] for _ in range(MAX_RESTS)] == [0] * (MAX_RESTS - 1) + [1]


def test_where_one_stands_few_are_drafted() -> None:
    length = DraftLength(AUTO)
    for _ in range(60):
        check(length, next_of(length)[0], 1)
    assert 1 <= next_of(length)[0] <= 3


def test_what_rounds_were_measured_to_cost_decides() -> None:
    """Where a draft takes as long as a dense step nothing pays; where it takes little, many do."""
    for costs, expected in [
        (RoundCosts(draft=1.0, checks={2: 1.2}), range(1)),
        (RoundCosts(draft=0.01, checks={2: 1.0}), range(12, MAX_DRAFT_TOKENS + 1)),
        (RoundCosts(draft=0.3, checks={2: 1.3}), range(3, 9)),
    ]:
        length = DraftLength(AUTO)
        for _ in range(60):
            if drafted := next_of(length)[0]:
                check(length, drafted, min(drafted, 7), costs)
        assert next_of(length)[0] in expected, costs


def test_trials_cost_less_than_three_percent() -> None:
    """A trial with one draft takes at most a draft and a check more than the dense step in its place."""
    costs = RoundCosts(draft=1.0, checks={2: 1.2})
    length, seconds, steps = DraftLength(AUTO), 0.0, 0
    for _ in range(4000):
        [drafted] = next_of(length)
        seconds += costs.draft * drafted + costs.check(drafted) if drafted else 1
        steps += 1
        if drafted:
            check(length, drafted, 0, costs)
    assert seconds / steps < 1.03


def test_requests_of_a_batch_draft_alike() -> None:
    """As many as pay for all of them together, and nobody else's number changes."""
    costs = RoundCosts(draft=0.2, checks={2: 1.1})
    standing = {DraftLength(AUTO): 6, DraftLength(AUTO): 1, DraftLength(3): 2}
    for _ in range(60):
        lengths = list(standing)
        drafted = next_of(*lengths)
        for length, number in zip(lengths, drafted, strict=True):
            length.note(number, min(number, standing[length]))
        agree(lengths, costs)
    first, second, named = next_of(*standing)
    assert named == 3
    assert first == second
    alone = DraftLength(AUTO)
    for _ in range(60):
        check(alone, next_of(alone)[0], 1, costs)
    assert next_of(alone)[0] < first < MAX_DRAFT_TOKENS


def test_where_one_tries_all_who_rest_do() -> None:
    costs = RoundCosts(draft=1.0, checks={2: 1.2})
    resting, newcomer = DraftLength(AUTO), DraftLength(AUTO)
    while drafted := next_of(resting)[0]:
        check(resting, drafted, 0, costs)
    assert next_of(resting) == [0]
    assert next_of(resting, newcomer) == [1, DEFAULT_DRAFT_TOKENS]
    assert next_of(resting, DraftLength(4)) == [1, 4]


def test_a_wide_check_that_takes_longer_pays_less() -> None:
    """In batches of many rows it takes several passes."""
    for wide, expected in [(1.0, MAX_DRAFT_TOKENS), (8.0, 8)]:
        length = DraftLength(AUTO)
        for _ in range(60):
            [drafted] = next_of(length)
            check(length, drafted, drafted, RoundCosts(draft=0.1, checks={2: 1.0, 9: 1.0, 17: wide}))
        assert next_of(length) == [expected]
