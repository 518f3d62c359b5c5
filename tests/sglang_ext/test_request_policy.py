"""What policies come to in tokens: budgets with what is always kept, and the lengths at which a step runs dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_winnow import request_policy
from sglang_winnow.request_policy import dense_until, effective_budget, kept_by
from sglang_winnow.request_state import RequestState
from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.selected_tokens import positions_of
from tests.policy_rows import VOTED
from winnow_kernels.attend.gather import Meter
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.decode.declaration import ALWAYS
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.attention_policy import parse_policy
from winnow_kernels.policies.declarations import DECLARATIONS

SLOTS, KV_HEADS, DIM, LAYERS = 2048, 2, 32, 2
SCALE = DIM**-0.5
CPU = torch.device("cpu")
CACHE = random_cache(SLOTS, KV_HEADS, DIM)

sinks = st.sampled_from([0, 4, 16, 40])
budgets = st.integers(16, 300)
shares = st.floats(0.01, 1)
policies = st.one_of(
    st.fixed_dictionaries({"policy": st.just("streaming_llm"), "sinks": sinks, "window": budgets}),
    st.fixed_dictionaries(
        {"policy": st.just("quest"), "sinks": sinks, "budget": budgets, "full_layers": st.just(0)},
    ),
    st.fixed_dictionaries(
        {
            "policy": st.sampled_from(VOTED),
            "sinks": sinks,
            "observation_window": st.integers(1, 100),
        },
        optional={"budget": budgets, "budget_ratio": shares},
    ),
    st.fixed_dictionaries(
        {
            "policy": st.just("delta"),
            "sinks": sinks,
            "budget": budgets,
            "recency": st.integers(16, 128),
            "full_layers": st.just(0),
            "delta_layers": st.just([0]),
        }
    ),
    st.fixed_dictionaries(
        {"policy": st.sampled_from(["quoka", "lowbit_top_k"]), "sinks": sinks},
        optional={"budget": budgets, "budget_ratio": shares},
    ),
)


@pytest.fixture
def _every_length_is_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_policy, "crossover_tokens", lambda _policy: 0)


def _state(prompt_length: int = 4000, **decode: Any) -> RequestState:
    return RequestState(parse_policy({"decode": decode}), prompt_length)


@given(
    decode=policies,
    prompt=st.integers(1, 500),
    generated=st.integers(1, 100),
    page_size=st.sampled_from([16, 64]),
)
@settings(max_examples=60)
def test_every_selection_holds_the_sinks_once_and_is_within_the_budget(
    decode: dict[str, Any], prompt: int, generated: int, page_size: int
) -> None:
    try:
        state = _state(prompt, **decode)
    except PolicyError:
        return
    length = prompt + generated
    state.kept = kept_by(state, range(LAYERS))
    if state.kept is not None:
        for layer in range(LAYERS):
            state.kept.record(layer, random_queries(prompt, 2 * KV_HEADS, DIM, layer), 0)
    context = scattered_context([length], SLOTS, page_size)
    indexes = Indexes([CACHE] * LAYERS, page_size, CPU)
    batch = PolicyBatch(context, [length], [state], SCALE, None, indexes, torch.tensor([1]), Statistics(2, CPU))
    step = DECLARATIONS[decode["policy"]].step(batch)
    queries = random_queries(1, 2 * KV_HEADS, DIM)
    step.attend(0, queries, CACHE, Meter(1, CPU))
    selection = step.select(1, queries, CACHE, Meter(1, CPU))
    budget = effective_budget(state, length, page_size)
    assert budget is not None
    if decode["policy"] in VOTED and decode["policy"] != "snapkv":
        # The budget is the mean over layers, or over KV heads.
        budget = prompt
    most = budget + (generated if state.kept is not None else 0)
    if decode["policy"] == "quoka":
        # The newest page is kept even if it is larger.
        most = max(most, page_size + decode["sinks"])
    for head in range(KV_HEADS):
        positions = positions_of(selection, context, 0, head)
        assert set(range(min(decode["sinks"], length))) <= set(positions)
        assert len(positions) <= most


@pytest.mark.parametrize(
    ("decode", "page_size", "tokens"),
    [
        ({"policy": "streaming_llm", "sinks": 4, "window": 100}, 16, 104),
        ({"policy": "quest", "budget": 40}, 16, 48),
        ({"policy": "quest", "budget": 40}, 64, 128),
        ({"policy": "quest", "budget": 40, "sinks": 0}, 64, 64),
        ({"policy": "delta", "budget": 160}, 16, 160),
        ({"policy": "delta", "budget": 160}, 64, 192),
        ({"policy": "snapkv", "budget": 100}, 16, 100),
        ({"policy": "snapkv", "budget_ratio": 0.25}, 16, 1000),
        ({"policy": "snapkv", "budget_ratio": 0.001}, 16, 48),
        ({"policy": "pyramidkv", "budget_ratio": 0.001, "sinks": 0}, 16, 32),
        ({"policy": "quoka", "budget": 100}, 16, 100),
        ({"policy": "quoka", "budget_ratio": 0.25}, 16, 1001),
        ({"policy": "quoka", "budget_ratio": 0.001}, 16, 17),
        ({"policy": "lowbit_top_k", "budget": 100}, 16, 100),
        ({"policy": "lowbit_top_k", "budget": 3001}, 16, 4001),
        ({"policy": "lowbit_top_k", "budget_ratio": 0.001}, 16, 81),
        ({"policy": "lowbit_top_k", "budget": 80}, 64, 113),
        ({"policy": "lowbit_top_p", "max_tokens": 512}, 16, 512),
        ({"policy": "lowbit_top_p", "max_tokens": 40}, 16, 81),
        ({"policy": "lowbit_top_p"}, 16, None),
        ({"policy": "tactic", "max_tokens": 512}, 16, 512),
        ({"policy": "tactic"}, 16, None),
    ],
)
def test_a_budget_holds_what_is_always_kept(decode: dict[str, Any], page_size: int, tokens: int | None) -> None:
    assert effective_budget(_state(**decode), 4001, page_size) == tokens


@pytest.mark.usefixtures("_every_length_is_sparse")
@pytest.mark.parametrize(
    ("decode", "tokens"),
    [
        ({"policy": "quest", "budget": 40}, 48),
        ({"policy": "snapkv", "budget": 100}, 0),
        ({"policy": "snapkv", "budget": 4000}, ALWAYS),
        ({"policy": "quoka", "budget_ratio": 0.999}, 0),
        ({"policy": "quoka", "budget_ratio": 1.0}, ALWAYS),
        # What would read three quarters of the context reads all of it.
        ({"policy": "lowbit_top_k", "budget": 300}, 399),
        ({"policy": "lowbit_top_k", "budget_ratio": 0.74}, 0),
        ({"policy": "lowbit_top_k", "budget_ratio": 0.75}, ALWAYS),
        ({"policy": "lowbit_top_p", "p": 1.0}, ALWAYS),
        ({"policy": "lowbit_top_p", "p": 1.0, "max_tokens": 2048}, 0),
        ({"policy": "lowbit_top_p", "p": 0.999}, 0),
        # A cap is no budget.
        ({"policy": "tactic", "max_tokens": 2048}, 0),
        ({"policy": "tactic"}, 0),
    ],
)
def test_a_step_runs_dense_where_the_budget_covers_the_context(decode: dict[str, Any], tokens: int) -> None:
    assert dense_until(_state(**decode), 16) == tokens
