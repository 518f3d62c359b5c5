"""Whose passes are steps of their own, and who drafts in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow.open_drafts import DraftPool, OpenDrafts, drafts_in_steps, limits_in_steps
from sglang_winnow.request_state import RequestState
from winnow_kernels.contract.verification import MAX_DRAFT_TOKENS
from winnow_kernels.policies.attention_policy import parse_policy


def request(*, is_verified: bool, opened: OpenDrafts | None = None) -> Any:
    policy = {"decode": {"policy": "quest"}} | ({"verify": {"draft_tokens": 4}} if is_verified else {})
    state = RequestState(parse_policy(policy), 100)
    state.open_drafts = opened
    return SimpleNamespace(winnow_state=state)


@pytest.mark.parametrize(("verified", "in_steps"), [("v", False), ("vv", False), ("d", False), ("vd", True)])
def test_passes_are_steps_where_only_some_rows_are_verified(verified: str, in_steps: bool) -> None:
    reqs = [request(is_verified=kind == "v") for kind in verified]
    assert drafts_in_steps(reqs) == in_steps


def test_open_drafts_are_gone_on_with_in_steps() -> None:
    assert drafts_in_steps([request(is_verified=True, opened=OpenDrafts(1, 2)), request(is_verified=True)])


@given(st.lists(st.integers(0, MAX_DRAFT_TOKENS), min_size=1, max_size=6))
def test_a_round_begins_with_those_who_draft_most(limits: list[int]) -> None:
    most = max(limits)
    assert limits_in_steps(limits, [None] * len(limits)) == [limit if limit == most else 0 for limit in limits]


def test_who_drafts_fewer_begins_later() -> None:
    opened = [OpenDrafts(3, 2), None, None, None]
    assert limits_in_steps([9, 2, 1, 8], opened) == [5, 2, 0, 2]


def test_drafts_stay_in_their_slots() -> None:
    pool = DraftPool(5, torch.device("cpu"))
    drafts = torch.arange(2 * MAX_DRAFT_TOKENS).view(2, -1)
    pool.write(torch.tensor([4, 1]), drafts)
    pool.write(torch.tensor([2]), drafts[:1] + 100)
    assert torch.equal(pool.read(torch.tensor([1, 4])), drafts.flip(0))
