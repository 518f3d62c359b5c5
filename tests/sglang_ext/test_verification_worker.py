"""Which drafts of a check stand, graphs of how many tokens it takes, and who drafts in a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.environ import envs

from sglang_winnow.device.check_graphs import CheckGraphs
from sglang_winnow.draft_length import RESTS, agree
from sglang_winnow.request_state import RequestState
from sglang_winnow.round_times import ASSUMED, BatchSize
from sglang_winnow.simulated_acceptance import simulated_acceptance
from sglang_winnow.verification_worker import WIDTH, VerificationWorker, standing_drafts
from winnow_kernels.contract.verification import AUTO, CHECKED_WIDTHS, DEFAULT_DRAFT_TOKENS, MAX_CHECKED_TOKENS
from winnow_kernels.policies.attention_policy import parse_policy

TOKENS = st.integers(0, 2)


@given(st.data(), st.integers(1, 8), st.integers(1, 5))
def test_drafts_stand_up_to_the_first_that_was_not_drawn(data: st.DataObject, longest: int, rows: int) -> None:
    drafted = [data.draw(st.lists(TOKENS, min_size=longest, max_size=longest)) for _ in range(rows)]
    drawn = [data.draw(st.lists(TOKENS, min_size=longest + 1, max_size=longest + 1)) for _ in range(rows)]
    limits = data.draw(st.lists(st.integers(1, longest), min_size=rows, max_size=rows))
    expected = []
    for own, correct, limit in zip(drafted, drawn, limits, strict=True):
        standing = 0
        while standing < limit and own[standing] == correct[standing]:
            standing += 1
        expected.append(standing)
    found = standing_drafts(torch.tensor(drafted), torch.tensor(drawn), torch.tensor(limits))
    assert found.tolist() == expected


def test_acceptance_is_simulated_if_asked_for() -> None:
    limits = torch.tensor([4, 2] * 500)
    assert simulated_acceptance(limits) is None
    with envs.SGLANG_SIMULATE_ACC_LEN.override(4.25):
        standing = simulated_acceptance(limits)
    assert standing is not None
    assert set(standing[::2].tolist()) == {3, 4}
    assert standing[::2].double().mean() == pytest.approx(3.25, abs=0.1)
    # No more than were drafted.
    assert set(standing[1::2].tolist()) == {2}


def test_rows_are_filled_up_to_the_next_graph() -> None:
    graphs: Any = object.__new__(CheckGraphs)
    graphs._graphs = {}
    assert [graphs.width(tokens) for tokens in (2, 4, 17)] == [2, 4, 17]
    assert graphs.rows(4) == MAX_CHECKED_TOKENS // 4
    graphs._graphs = {width: object() for width in CHECKED_WIDTHS}
    assert [graphs.width(tokens) for tokens in (2, 3, 4, 5, 6, 10, 17)] == [2, 3, 5, 5, 9, 17, 17]
    assert CHECKED_WIDTHS[-1] == WIDTH


def test_who_rests_tries_again() -> None:
    """A request that rests is dense for as many rounds, and then drafts a single token."""
    policy = parse_policy({"decode": {"policy": "quest"}, "verify": {"draft_tokens": AUTO}})
    state = RequestState(policy, 200_000)
    req = SimpleNamespace(winnow_state=state, sampling_params=SimpleNamespace(max_new_tokens=5000), output_ids=[])
    worker: Any = object.__new__(VerificationWorker)
    worker._target_worker = SimpleNamespace(model_runner=SimpleNamespace(page_size=16))
    worker._measures = False
    batch: Any = SimpleNamespace(reqs=[req])
    lengths = [200_001]

    def limit() -> int:
        [own] = worker._limits(batch, lengths, BatchSize.of(lengths))
        assert state.rests == (own == 0)
        return int(own)

    assert limit() == DEFAULT_DRAFT_TOKENS
    assert state.draft_length is not None
    for _ in range(100):
        state.draft_length.note(4, 0)
    agree([state.draft_length], ASSUMED)
    assert [limit() for _ in range(RESTS)] == [0] * (RESTS - 1) + [1]
