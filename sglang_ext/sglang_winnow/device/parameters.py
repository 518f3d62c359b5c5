"""From a request's policy to the numbers that its rows have on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_winnow.families import dense_until
from sglang_winnow.request_state import RequestState
from winnow_kernels.decode.gpu_rows import Family, Parameter, double_bits, float_bits
from winnow_kernels.policies.delta.gpu import FULL, REFRESH, REUSE
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.dense.parameters import Dense
from winnow_kernels.policies.pyramidkv.parameters import PyramidKV
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.quoka.parameters import QuokaDecode
from winnow_kernels.policies.snapkv.parameters import SnapKV
from winnow_kernels.policies.streaming_llm.parameters import StreamingLLM
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.selection.pages import pages_kept, pages_of

FAMILIES = {
    "dense": Family.DENSE,
    "streaming_llm": Family.STREAMING_LLM,
    "quest": Family.QUEST,
    "snapkv": Family.STORED,
    "pyramidkv": Family.STORED,
    "delta": Family.DELTA,
    "tactic": Family.TACTIC,
    "quoka": Family.QUOKA,
}


def parameters_of(state: RequestState, page_size: int) -> dict[Parameter, int]:
    """Return what the table of parameters says of a request before its first decode step."""
    policy = state.policy
    parameters = {
        Parameter.FAMILY: int(FAMILIES[policy.decode.policy]),
        Parameter.SPARSE_FROM: dense_until(state, page_size),
    }
    if not isinstance(policy.decode, Dense):
        parameters[Parameter.SINKS] = policy.decode.sinks
    if (stop := policy.early_termination) is not None:
        parameters[Parameter.BY_SCORE] = 1
        parameters[Parameter.SCALE] = float_bits(stop.scale)
        parameters[Parameter.DIRECTION] = float_bits(stop.direction)
        parameters[Parameter.PATIENCE] = float_bits(stop.patience)
    return parameters | _of_family(state, page_size)


def roles_of(policy: Delta, layers: int) -> list[int]:
    """Return what each layer is to a request of DELTA."""
    refreshing: Sequence[int] = policy.delta_layers or ()
    first = min(refreshing)
    return [REFRESH if i in refreshing else FULL if i < first else REUSE for i in range(layers)]


def kept_positions(kept: Sequence[Tensor]) -> Tensor:
    """Return what a request keeps in each layer, [KV heads, kept], one layer after another: int32 [numbers]."""
    return torch.cat([of_layer.flatten() for of_layer in kept]).int()


def _of_family(state: RequestState, page_size: int) -> dict[Parameter, int]:
    parameters: dict[Parameter, int] = {}
    match policy := state.policy.decode:
        case StreamingLLM():
            parameters = {Parameter.WINDOW: policy.window}
        case Quest():
            parameters = {
                Parameter.QUEST_PAGES: pages_kept(policy.budget, 1, policy.sinks, page_size),
                Parameter.QUEST_FULL_LAYERS: policy.full_layers,
            }
        case SnapKV() | PyramidKV():
            parameters = {Parameter.PROMPT_LENGTH: state.prompt_length}
        case Delta():
            parameters = {
                Parameter.DELTA_PAGES: pages_kept(policy.budget, policy.recency, policy.sinks, page_size),
                Parameter.DELTA_RECENT: pages_of(policy.recency, page_size),
            }
        case Tactic():
            parameters = {
                Parameter.TACTIC_P: double_bits(policy.p),
                Parameter.TACTIC_CAP: policy.max_tokens or 0,
                Parameter.TACTIC_FULL_LAYERS: policy.full_layers,
            }
        case QuokaDecode(budget=int(budget)):
            parameters = {Parameter.QUOKA_BUDGET: budget}
        case QuokaDecode(budget_ratio=float(ratio)):
            parameters = {Parameter.QUOKA_RATIO: double_bits(ratio)}
    return parameters
