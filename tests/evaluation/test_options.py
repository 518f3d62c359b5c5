from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow_evaluation.options import (
    MAX_LENGTH,
    MIN_LENGTH,
    OptionError,
    check_output,
    parse_lengths,
    parse_policy,
    parse_tasks,
    task_groups,
)

NAMES = ("niah_single_1", "niah_single_2", "niah_multivalue", "vt", "cwe")


@given(st.lists(st.integers(MIN_LENGTH, MAX_LENGTH), min_size=1, max_size=8))
def test_lengths_come_back_ascending_and_once(lengths: list[int]) -> None:
    assert parse_lengths(" , ".join(map(str, lengths))) == tuple(sorted(set(lengths)))


def test_k_is_1024() -> None:
    assert parse_lengths("16k,4096,4K") == (4096, 16384)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4096,x", "'x' is not a number of tokens"),
        ("-1", "'-1' is not a number of tokens"),
        ("63", "63 is not between 64 and 16777216 tokens"),
        ("17000k", "17000k is not between 64 and 16777216 tokens"),
        ("4096,,8192", "single commas"),
        ("", "single commas"),
    ],
)
def test_a_bad_length_is_named_with_its_bound(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)) as caught:
        parse_lengths(text)
    assert caught.value.option == "--lengths"


def test_groups_are_shared_leading_parts() -> None:
    assert task_groups(NAMES) == {
        "all": NAMES,
        "niah": ("niah_single_1", "niah_single_2", "niah_multivalue"),
        "niah_single": ("niah_single_1", "niah_single_2"),
    }


def test_tasks_come_back_in_their_own_order_and_once() -> None:
    assert parse_tasks("vt, niah_single_2, niah_single, vt", NAMES) == ("niah_single_1", "niah_single_2", "vt")
    assert parse_tasks("all", NAMES) == NAMES


def test_an_unknown_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"'qa' is none of niah_single_1, .*, cwe, all, niah, niah_single") as caught:
        parse_tasks("vt,qa", NAMES)
    assert caught.value.option == "--tasks"


def test_a_policy_is_json_or_a_name() -> None:
    assert parse_policy("balanced-v1.2") == "balanced-v1.2"
    assert parse_policy(' {"decode": {"policy": "quest", "budget": 1024}} ') == {
        "decode": {"policy": "quest", "budget": 1024}
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"decode": ', "neither JSON"), ("two words", "neither JSON"), ("[1]", "must be a JSON object or a name")],
)
def test_a_policy_that_is_neither_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_policy(text)
    assert caught.value.option == "--policy"


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_output(tmp_path / "results.json")
    with pytest.raises(OptionError, match="does not exist"):
        check_output(tmp_path / "missing" / "results.json")
