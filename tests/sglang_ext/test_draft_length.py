from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow.draft_length import RESTS, DraftLength
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
    steps = [length.next(FAR) for _ in range(RESTS)]
    assert steps == [0] * (RESTS - 1) + [1]
    length.note(1, 0)
    assert length.next(FAR) == 0


def test_where_one_stands_few_are_drafted() -> None:
    length = DraftLength(AUTO)
    for _ in range(60):
        length.note(length.next(FAR), 1)
    assert 1 <= length.next(FAR) <= 3
