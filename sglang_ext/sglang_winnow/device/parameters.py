"""From a request's policy to the numbers that its rows have on the device."""

from __future__ import annotations

from sglang_winnow.request_policy import dense_until
from sglang_winnow.request_state import RequestState
from winnow_kernels.contract.fields import Sparse
from winnow_kernels.decode.gpu_rows import Parameter, float_bits
from winnow_kernels.policies.declarations import LAYOUT, declaration_of


def parameters_of(state: RequestState, page_size: int) -> dict[int, int]:
    """Return what the table of parameters says of a request before its first decode step, by column."""
    declared = declaration_of(state.decode)
    own = declared.own_parameters(state.decode, state.prompt_length, page_size)
    parameters = LAYOUT.columns_of(declared.kind, own)
    parameters[Parameter.SPARSE_FROM] = dense_until(state, page_size)
    if isinstance(state.decode, Sparse):
        parameters[Parameter.SINKS] = state.decode.sinks
    if (stop := state.policy.early_termination) is not None:
        parameters[Parameter.BY_SCORE] = 1
        parameters[Parameter.SCALE] = float_bits(stop.scale)
        parameters[Parameter.DIRECTION] = float_bits(stop.direction)
        parameters[Parameter.PATIENCE] = float_bits(stop.patience)
    return parameters
