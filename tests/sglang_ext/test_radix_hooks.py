"""None of the hooks on the radix cache can be left out: without any one of them, prefixes are shared that differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from sglang_winnow.hooks import Hook
from sglang_winnow.sglang_versions.releases import LINEAR_ATTENTION_ON_CUDA
from tests.sglang_ext import test_radix as rules
from tests.sglang_ext.prefix_engine import CORE_SETTING, HOOKS, hooked, tree_cores

SCENARIOS: list[Callable[[], None]] = [
    rules.test_sparse_prefill_shares_with_its_own_policy_and_key_only,
    rules.test_a_match_that_ends_inside_a_block_is_cut,
    partial(rules.test_tokens_generated_after_sparse_attention_are_not_kept, rules.QUEST),
    rules.test_a_retracted_request_shares_its_prompt_only,
    partial(rules.test_the_observation_window_is_computed_again, 200, 40),
    *(partial(rules.test_chunks_end_between_blocks, rules.QUOKA, disable) for disable in (False, True)),
]
if LINEAR_ATTENTION_ON_CUDA:
    from tests.sglang_ext import test_states_in_radix as states

    SCENARIOS += [
        partial(states.test_states_after_sparse_attention_are_not_kept, rules.QUEST, 192),
        partial(states.test_a_fork_goes_on_from_a_state_behind_what_it_shares, rules.QUOKA),
        partial(states.test_a_state_lies_between_blocks_wherever_a_prompt_ends, states.QUOKA_OF_128, 250),
        states.test_a_request_that_gives_back_its_prompt_leaves_no_state,
    ]
REFUSING = "create_tree_cache"


@pytest.fixture(autouse=True, params=tree_cores())
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORE_SETTING, request.param)


def violated() -> list[Callable[[], None]]:
    """Return the scenarios in which SGLang, or the scenario itself, finds something wrong."""
    found = []
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:  # noqa: BLE001
            found.append(scenario)
    return found


def test_with_all_hooks_nothing_is_violated() -> None:
    with hooked():
        assert violated() == []


@pytest.mark.parametrize(
    "hook",
    [hook for hook in HOOKS if not hook.target.endswith(REFUSING)],
    ids=lambda hook: ".".join(hook.target.rsplit(".", 2)[1:]),
)
def test_without_a_hook_something_is(hook: Hook) -> None:
    with hooked(tuple(other for other in HOOKS if other is not hook)):
        assert violated()
