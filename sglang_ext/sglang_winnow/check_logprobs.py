"""Log-probabilities of a round: as many of a row as its tokens, where SGLang looks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from winnow_kernels.host_tensors import to_device

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

# By token; tensors, which SGLang turns into lists.
_VALUES: Final = ("next_token_top_logprobs_val", "next_token_top_logprobs_idx", "next_token_token_ids_logprobs_val")
_NAMED: Final = "next_token_token_ids_logprobs_idx"


@dataclass(frozen=True)
class CheckedLogprobs:
    """What a check found.

    Attributes:
        rows: of the batch.
        width: tokens of each that were checked.
        accepted: how many of these the answer has, of each row.
        output: holds the log-probabilities, row by row.
    """

    rows: Sequence[int]
    width: int
    accepted: Sequence[int]
    output: LogitsProcessorOutput


def join_logprobs(output: LogitsProcessorOutput, checks: Sequence[CheckedLogprobs]) -> None:
    """Replace what a round's first pass found, a token a row, where rows were checked.

    Args:
        output: of the first pass, with log-probabilities; they are of [rows, most tokens of a row] then.
        checks: of rows among which any asked for log-probabilities.
    """
    first = output.next_token_logprobs
    rows, width = len(first), max((max(check.accepted) for check in checks), default=1)
    joined = torch.zeros(rows, width, dtype=first.dtype, device=first.device)
    joined[:, 0] = first
    for check in checks:
        index = to_device(torch.tensor(check.rows), first.device)
        shared = min(width, check.width)
        joined[index, :shared] = check.output.next_token_logprobs.view(-1, check.width)[:, :shared]
    output.next_token_logprobs = joined
    nothing = torch.empty(0)
    for name in _VALUES:
        _join(output, checks, name, width, nothing)
    _join(output, checks, _NAMED, width, [])


def _join(
    output: LogitsProcessorOutput, checks: Sequence[CheckedLogprobs], name: str, width: int, nothing: Any
) -> None:
    if (first := getattr(output, name)) is None:
        return
    joined = [nothing] * (len(first) * width)
    joined[::width] = first
    for check in checks:
        if (values := getattr(check.output, name)) is None:
            continue
        for place, (row, accepted) in enumerate(zip(check.rows, check.accepted, strict=True)):
            for token in range(accepted):
                joined[row * width + token] = values[place * check.width + token]
    setattr(output, name, joined)
