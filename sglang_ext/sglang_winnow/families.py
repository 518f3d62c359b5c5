"""From policies to decode steps: one function for each family, and when a step of it runs dense."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from sglang_winnow.crossover import crossover_tokens
from sglang_winnow.indexes import Indexes
from sglang_winnow.request_state import RequestState
from sglang_winnow.statistics import Field, Statistics
from winnow_kernels.attend.early_termination import EarlyTermination, Termination
from winnow_kernels.cache import Context
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.indexes.clusters import clustered_until
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.delta.reference import DeltaParameters, DeltaStep
from winnow_kernels.policies.dense.parameters import Dense
from winnow_kernels.policies.dense.reference import DenseStep
from winnow_kernels.policies.pyramidkv.parameters import PyramidKV
from winnow_kernels.policies.pyramidkv.reference import PyramidKVParameters
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.quest.reference import QuestParameters, QuestStep
from winnow_kernels.policies.quoka.parameters import QuokaDecode
from winnow_kernels.policies.quoka.reference import QuokaDecodeParameters, QuokaStep
from winnow_kernels.policies.snapkv.observation import ObservationBuffer
from winnow_kernels.policies.snapkv.parameters import SnapKV
from winnow_kernels.policies.snapkv.reference import SnapKVParameters, SnapKVState, SnapKVStep
from winnow_kernels.policies.streaming_llm.parameters import StreamingLLM
from winnow_kernels.policies.streaming_llm.reference import StreamingLLMParameters, StreamingLLMStep
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.policies.tactic.reference import TacticParameters, TacticStep
from winnow_kernels.selection.pages import pages_kept

_Policy = TypeVar("_Policy", StreamingLLM, Quest, Delta, Tactic, QuokaDecode)


# What ``dense_until`` says of requests of which no step reads less.
ALWAYS: Final = sys.maxsize


@dataclass(frozen=True)
class Rows:
    """The requests of a batch that share a family.

    Attributes:
        context: where their tokens lie.
        lengths: the contexts' lengths, on the host.
        states: one for each.
        scale: what scores are multiplied by.
        termination: thresholds of those that have any.
        table_rows: int64 [rows], their rows in the statistics.
        statistics: of the server.
    """

    context: Context
    lengths: Sequence[int]
    states: Sequence[RequestState]
    scale: float
    termination: Termination | None
    table_rows: Tensor
    statistics: Statistics

    def policies(self, kind: type[_Policy]) -> list[_Policy]:
        """Return the requests' decode policies, all of which are of one kind."""
        return [policy for state in self.states if isinstance(policy := state.policy.decode, kind)]

    def count_built(self, tokens: Sequence[int]) -> None:
        """Count for each request the tokens of which it was the first to need an index."""
        amounts = torch.tensor(tokens, dtype=torch.float64, device=self.table_rows.device)
        self.statistics.add(self.table_rows, Field.INDEX_BUILT_TOKENS, amounts)


def reads_everything(state: RequestState, length: int, page_size: int) -> bool:
    """Return whether a step at a context of ``length`` tokens reads everything, whatever its policy is called."""
    if isinstance(state.policy.decode, Dense):
        return state.policy.early_termination is None
    return length <= dense_until(state, page_size)


def dense_until(state: RequestState, page_size: int) -> int:
    """Return the longest context, in tokens, at which a step of a request reads everything, whatever its policy.

    It does where the budget covers the context, and below the length from which on the policy has been seen to be no
    slower than dense. Tactic's ``max_tokens`` is no budget: below that cap, too, a step reads what holds the share.
    """
    policy = state.policy.decode
    if isinstance(policy, Dense):
        return 0
    crossover = crossover_tokens(policy.policy)
    if isinstance(policy, SnapKV | PyramidKV):
        covers = _of_prompt(policy, state.prompt_length) >= state.prompt_length
        return ALWAYS if covers else crossover
    if isinstance(policy, QuokaDecode) and policy.budget_ratio is not None:
        return ALWAYS if policy.budget_ratio == 1 else crossover
    if isinstance(policy, Tactic):
        return crossover
    return max(crossover, effective_budget(state, state.prompt_length, page_size) or 0)


def effective_budget(state: RequestState, length: int, page_size: int) -> int | None:
    """Return the tokens that a KV head may read at a context of ``length`` tokens; None if there is no such bound.

    That is the budget, or what is always kept where this is more: the pages of sinks and recent tokens, if these are
    large, or the observation window and the sinks, if the budget is a small share of the prompt.
    """
    budget: int | None = None
    match policy := state.policy.decode:
        case StreamingLLM():
            budget = policy.sinks + policy.window
        case Quest():
            budget = pages_kept(policy.budget, 1, policy.sinks, page_size) * page_size
        case Delta():
            budget = pages_kept(policy.budget, policy.recency, policy.sinks, page_size) * page_size
        case SnapKV() | PyramidKV():
            budget = _of_prompt(policy, state.prompt_length)
        case QuokaDecode():
            budget = _quoka_parameters(policy).tokens(length - 1)
        case Tactic():
            budget = policy.max_tokens
    return budget


def thresholds_of(policy: AttentionPolicy) -> EarlyTermination | None:
    """Return when a policy stops reading; None if it does not."""
    stop = policy.early_termination
    return None if stop is None else EarlyTermination(stop.scale, stop.direction, stop.patience)


def kept_by(state: RequestState, layers: int) -> SnapKVState | None:
    """Return what a request that is about to be prefilled will keep of its prompt; None if its policy keeps all.

    Args:
        state: of the request.
        layers: how many the model has.
    """
    policy = state.policy.decode
    if not isinstance(policy, SnapKV | PyramidKV):
        return None
    budget = _of_prompt(policy, state.prompt_length)
    observation = ObservationBuffer(policy.observation_window, state.prompt_length)
    if isinstance(policy, PyramidKV):
        parameters: SnapKVParameters = PyramidKVParameters(budget, policy.kernel_size, layers, sinks=policy.sinks)
    else:
        parameters = SnapKVParameters(budget, policy.kernel_size, sinks=policy.sinks)
    return SnapKVState(parameters, observation)


def _of_prompt(policy: SnapKV | PyramidKV, prompt_length: int) -> int:
    """Return the budget in tokens: at least what is kept whatever the votes."""
    budget = policy.budget or math.ceil((policy.budget_ratio or 0) * prompt_length)
    return max(budget, policy.observation_window + policy.sinks)


def _quoka_parameters(policy: QuokaDecode) -> QuokaDecodeParameters:
    return QuokaDecodeParameters(budget=policy.budget, budget_ratio=policy.budget_ratio, sinks=policy.sinks)


def _streaming_llm(rows: Rows, indexes: Indexes) -> DecodeStep:
    del indexes
    parameters = [StreamingLLMParameters(p.sinks, p.window) for p in rows.policies(StreamingLLM)]
    return StreamingLLMStep(rows.context, rows.scale, rows.termination, parameters)


def _quest(rows: Rows, indexes: Indexes) -> DecodeStep:
    parameters = [QuestParameters(p.budget, p.full_layers, p.sinks) for p in rows.policies(Quest)]
    step = QuestStep(rows.context, rows.scale, rows.termination, parameters, indexes.page_bounds)
    rows.count_built(step.index_built_tokens)
    return step


def _snapkv(rows: Rows, indexes: Indexes) -> DecodeStep:
    del indexes
    states = [kept for state in rows.states if (kept := state.kept) is not None]
    return SnapKVStep(rows.context, rows.scale, rows.termination, states)


def _delta(rows: Rows, indexes: Indexes) -> DecodeStep:
    parameters = [
        DeltaParameters(p.budget, p.recency, p.full_layers, p.delta_layers or (), p.sinks) for p in rows.policies(Delta)
    ]
    return DeltaStep(rows.context, rows.scale, rows.termination, parameters, indexes.page_size)


def _tactic(rows: Rows, indexes: Indexes) -> DecodeStep:
    clusters = indexes.clusters
    ends = [
        clustered_until(state.prompt_length, length, clusters.span)
        for state, length in zip(rows.states, rows.lengths, strict=True)
    ]
    parameters = [TacticParameters(p.p, p.max_tokens, p.full_layers, p.sinks) for p in rows.policies(Tactic)]
    rows.count_built(
        [
            clusters.ensure(rows.context, row, end, of_row.sinks)
            for row, (end, of_row) in enumerate(zip(ends, parameters, strict=True))
        ]
    )
    clustered = torch.tensor(ends, device=rows.context.device)
    return TacticStep(rows.context, rows.scale, rows.termination, clusters, parameters, clustered)


def _quoka(rows: Rows, indexes: Indexes) -> DecodeStep:
    parameters = [_quoka_parameters(policy) for policy in rows.policies(QuokaDecode)]
    step = QuokaStep(rows.context, rows.scale, rows.termination, parameters, indexes.key_norms)
    rows.count_built(step.index_built_tokens)
    return step


def _dense(rows: Rows, indexes: Indexes) -> DecodeStep:
    del indexes
    return DenseStep(rows.context, rows.scale, rows.termination)


FAMILIES: Final[dict[str, Callable[[Rows, Indexes], DecodeStep]]] = {
    "dense": _dense,
    "streaming_llm": _streaming_llm,
    "quest": _quest,
    "snapkv": _snapkv,
    # The two differ in what their requests keep, not in the step.
    "pyramidkv": _snapkv,
    "delta": _delta,
    "tactic": _tactic,
    "quoka": _quoka,
}
