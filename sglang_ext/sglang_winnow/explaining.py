"""Explanations of a request's decode steps: which rows of a batch are explained, and what the answer says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor
from torch.nn.functional import pad

from sglang_winnow.request_state import RequestState
from winnow_kernels.decode.explanation import ExplainedRow, Explanation

_DIGITS: Final = 6


def explained_rows(states: Sequence[RequestState | None], lengths: Sequence[int]) -> list[ExplainedRow]:
    """Return the rows of a decode batch that are explained.

    Args:
        states: of the requests.
        lengths: of their contexts, in tokens.
    """
    return [
        ExplainedRow(row, asked.layers, asked.heads, state.explanation.found[step])
        for row, (state, length) in enumerate(zip(states, lengths, strict=True))
        if state is not None
        and state.explanation is not None
        and (step := length - state.prompt_length) in (asked := state.explanation.asked).steps
    ]


def note_dense_steps(states: Sequence[RequestState | None], lengths: Sequence[int]) -> None:
    """Note that the present steps of these requests read everything; arguments as of ``explained_rows``."""
    for state, length in zip(states, lengths, strict=True):
        if state is not None and state.explanation is not None:
            state.explanation.dense.add(length - state.prompt_length)


def explained(explanation: Explanation, output_ids: Sequence[int]) -> dict[str, Any]:
    """Return what the answer says of an explanation.

    Args:
        explanation: of the request.
        output_ids: the tokens of its answer.
    """
    asked, decode_steps = explanation.asked, len(output_ids) - 1
    # Overlap scheduling runs a step beyond the end.
    found = {step: explanation.found[step] for step in asked.steps if step <= decode_steps and explanation.found[step]}
    return {
        "decode_steps": decode_steps,
        "missing_steps": [step for step in asked.steps if step not in found],
        "output_ids": list(output_ids),
        "entries": [
            {
                "step": step,
                "layer": layer,
                "head": head,
                "dense": step in explanation.dense,
                "attended": _ranges(attended),
                "attended_tokens": int(attended.sum()),
                "share": round(float(weights.double()[attended].sum()), _DIGITS),
                "weights": weights.double().round(decimals=_DIGITS).tolist(),
            }
            for step, by_layer in found.items()
            for layer, own in sorted(by_layer.items())
            for head, weights, attended in zip(asked.heads, own.weights, own.attended, strict=True)
        ],
    }


def _ranges(attended: Tensor) -> list[list[int]]:
    """Return the runs of true elements of a vector: the first position of each, and the one after the last."""
    runs: list[list[int]] = pad(attended.int(), (1, 1)).diff().nonzero().view(-1, 2).tolist()
    return runs
