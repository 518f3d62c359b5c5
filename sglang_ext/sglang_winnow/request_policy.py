"""What a request's policy comes to: when a step runs dense, what it may read, what is kept of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_winnow.crossover import crossover_tokens
from sglang_winnow.request_state import RequestState
from winnow_kernels.decode.request import PromptSelection
from winnow_kernels.policies.declarations import declaration_of
from winnow_kernels.policies.dense.parameters import Dense


def reads_everything(state: RequestState, length: int, page_size: int) -> bool:
    """Return whether a step at a context of ``length`` tokens reads everything, whatever its policy is called."""
    if isinstance(state.decode, Dense):
        return state.policy.early_termination is None
    return state.rests or length <= dense_until(state, page_size)


def dense_until(state: RequestState, page_size: int) -> int:
    """Return the longest context, in tokens, at which a step of a request reads everything, whatever its policy.

    It does where the budget covers the context, and below the length from which on the policy has been seen to be no
    slower than dense.
    """
    if isinstance(state.decode, Dense):
        return 0
    covered = declaration_of(state.decode).covered_until(state.decode, state.prompt_length, page_size)
    return max(crossover_tokens(state.policy), covered)


def drafts(state: RequestState, length: int, page_size: int) -> bool:
    """Return whether the token of a step at a context of ``length`` tokens is a draft, that a dense pass checks."""
    return state.policy.verify is not None and not reads_everything(state, length, page_size)


def effective_budget(state: RequestState, length: int, page_size: int) -> int | None:
    """Return the tokens that a KV head may read at a context of ``length`` tokens; None if there is no such bound.

    That is the budget, or what is always kept where this is more: the pages of sinks and recent tokens, if these are
    large, or the observation window and the sinks, if the budget is a small share of the prompt.
    """
    return declaration_of(state.decode).budget(state.decode, state.prompt_length, length, page_size)


def kept_by(state: RequestState, layers: Sequence[int]) -> PromptSelection | None:
    """Return what a request that is about to be prefilled will keep of its prompt; None if its policy keeps all.

    Args:
        state: of the request.
        layers: the numbers of those on which policies act.
    """
    return declaration_of(state.decode).prompt_selection(state.decode, state.prompt_length, layers)
