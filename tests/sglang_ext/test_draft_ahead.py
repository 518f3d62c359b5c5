"""Whose first drafts could be made before the host knows what a check has come to, and whose they still are then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow.draft_ahead import DraftsAhead, can_draft_ahead
from winnow_kernels.contract.verification import MAX_DRAFT_TOKENS

CONTEXT_LENGTH = 1000


def request(wanted: int = 100, *, grammar: object = None, return_logprob: bool = False, penalty: float = 0.0) -> Any:
    sampling = SimpleNamespace(
        max_new_tokens=wanted,
        min_new_tokens=0,
        frequency_penalty=penalty,
        presence_penalty=0.0,
        repetition_penalty=1.0,
    )
    return SimpleNamespace(sampling_params=sampling, output_ids=[], grammar=grammar, return_logprob=return_logprob)


def batch(*reqs: Any, hidden: bool = False, processor: bool = False, bias: object = None) -> Any:
    info = SimpleNamespace(has_custom_logit_processor=processor, logit_bias=bias)
    return SimpleNamespace(reqs=list(reqs), return_hidden_states=hidden, sampling_info=info)


@given(st.data(), st.integers(1, 6))
def test_first_drafts_are_those_of_the_rows_that_are_left(data: st.DataObject, number: int) -> None:
    reqs = [request() for _ in range(number)]
    ahead = DraftsAhead(reqs, torch.arange(number) + 10, None)
    left = data.draw(st.lists(st.sampled_from(range(number)), unique=True, min_size=1))
    drafts = ahead.of([reqs[place] for place in left], [4] * len(left))
    assert drafts is not None
    assert drafts.tolist() == [place + 10 for place in left]
    # Another request has joined, or one drafts nothing.
    assert ahead.of([*(reqs[place] for place in left), request()], [4] * (len(left) + 1)) is None
    assert ahead.of([reqs[place] for place in left], [4] * (len(left) - 1) + [0]) is None


def test_all_rows_draft() -> None:
    assert can_draft_ahead(batch(request(), request()), [4, 2], [500, 90], CONTEXT_LENGTH)
    assert not can_draft_ahead(batch(request(), request()), [4, 0], [500, 90], CONTEXT_LENGTH)


def test_there_is_room() -> None:
    last = CONTEXT_LENGTH - 6
    assert can_draft_ahead(batch(request()), [4], [last], CONTEXT_LENGTH)
    assert not can_draft_ahead(batch(request()), [4], [last + 1], CONTEXT_LENGTH)
    assert can_draft_ahead(batch(request()), [MAX_DRAFT_TOKENS - 1], [500], CONTEXT_LENGTH)
    assert not can_draft_ahead(batch(request()), [MAX_DRAFT_TOKENS], [500], CONTEXT_LENGTH)


def test_somebody_goes_on() -> None:
    assert can_draft_ahead(batch(request(5), request(6)), [4, 4], [500, 500], CONTEXT_LENGTH)
    assert not can_draft_ahead(batch(request(5), request(5)), [4, 4], [500, 500], CONTEXT_LENGTH)


@pytest.mark.parametrize(
    "asking",
    [
        batch(request(grammar=object())),
        batch(request(return_logprob=True)),
        batch(request(penalty=0.5)),
        batch(request(), hidden=True),
        batch(request(), processor=True),
        batch(request(), bias=object()),
    ],
)
def test_tokens_depend_on_nothing_that_the_host_keeps(asking: Any) -> None:
    assert not can_draft_ahead(asking, [4], [500], CONTEXT_LENGTH)
