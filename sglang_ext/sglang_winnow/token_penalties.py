"""Penalties of rows that are verified: each token has those of the answer up to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_winnow.sglang_versions.releases import ENDS_OF_MODEL, runs
from winnow_kernels.host_tensors import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def is_penalized(req: Req) -> bool:
    """Return whether a token's distribution depends on which tokens the answer has, or on how many."""
    own = req.sampling_params
    return bool(own.frequency_penalty or own.presence_penalty or own.min_new_tokens or own.repetition_penalty != 1)


class TokenPenalties:
    """Penalties of some rows of a batch, behind their newest tokens and behind drafts.

    Answers are looked at whole: what SGLang adds up, a token a step, is short of tokens where a check comes to several.

    Attributes:
        scales: whether any row has a repetition penalty.
    """

    def __init__(self, batch: ScheduleBatch, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """
        Args:
            batch: before its step.
            rows: that have penalties.
            lengths: of all rows, tokens whose keys are written: all but the newest.
        """
        reqs = [batch.reqs[row] for row in rows]
        parameters = [req.sampling_params for req in reqs]
        answered = [lengths[row] + 1 - req.winnow_state.prompt_length for row, req in zip(rows, reqs, strict=True)]
        self.scales = any(own.repetition_penalty != 1 for own in parameters)
        self._place = {row: place for place, row in enumerate(rows)}
        self._device = batch.seq_lens.device
        self._vocab_size = batch.sampling_info.vocab_size
        # Steps that overlap are prepared before the last one's token is known: SGLang's penalties come a token late,
        # and begin with the prompt's last.
        self._late = batch.enable_overlap
        self._seen = self._counted(
            [penalized_tokens(req, count, late=self._late) for req, count in zip(reqs, answered, strict=True)]
        )
        self._frequency = self._column([own.frequency_penalty for own in parameters])
        self._presence = self._column([own.presence_penalty for own in parameters])
        self._repetition = self._column([own.repetition_penalty for own in parameters])
        self._missing = self._column(
            [own.min_new_tokens - count for own, count in zip(parameters, answered, strict=True)]
        )
        self._stops: Tensor | None = None
        if any(own.min_new_tokens for own in parameters):
            stops = [stop_tokens(req) if req.sampling_params.min_new_tokens else [] for req in reqs]
            self._stops = self._counted(stops) > 0

    def __contains__(self, row: int) -> bool:
        return row in self._place

    def at(self, rows: Sequence[int], first: int, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what is added to logits and what then scales them, float32 [rows, positions, vocabulary] each.

        Where no row has a repetition penalty nothing scales.

        Args:
            rows: of the batch; all of them have penalties.
            first: the first position; 0 is behind the newest token, whichever that is, 1 behind the first draft.
            inputs: int64 [rows, last position + 1], the newest token and the drafts.
        """
        places = to_device(torch.tensor([self._place[row] for row in rows]), self._device)
        seen = self._seen_at(places, first, inputs)
        has = seen > 0
        additive = seen.mul_(-self._frequency[places]).sub_(self._presence[places] * has)
        if self._stops is not None:
            position = torch.arange(first, inputs.shape[1], device=self._device)[:, None]
            is_early = position < self._missing[places]
            additive.masked_fill_(is_early & self._stops[places, None], float("-inf"))
        return additive, torch.where(has, self._repetition[places], 1.0) if self.scales else None

    def _seen_at(self, places: Tensor, first: int, inputs: Tensor) -> Tensor:
        """Return how often each token counts at each position, float32 [rows, positions, vocabulary]."""
        entering = inputs[:, :-1] if self._late else inputs[:, 1:]
        rows, last = entering.shape
        count = last + 1 - first
        seen = torch.zeros(rows, count, self._vocab_size, device=self._device)
        seen[:, 0] = self._seen[places]
        at = (torch.arange(1, last + 1, device=self._device) - first).clamp_min(0)
        index = (torch.arange(rows, device=self._device)[:, None] * count + at) * self._vocab_size + entering
        seen.view(-1).scatter_add_(0, index.flatten(), torch.ones(index.numel(), device=self._device))
        return seen.cumsum_(1)

    def _counted(self, tokens: list[list[int]]) -> Tensor:
        """Return how often each row has each token, float32 [rows, vocabulary]."""
        size = self._vocab_size
        flat = [place * size + token for place, own in enumerate(tokens) for token in own]
        index = to_device(torch.tensor(flat, dtype=torch.int64), self._device)
        counts = torch.zeros(len(tokens) * size, device=self._device)
        return counts.scatter_add_(0, index, torch.ones_like(index, dtype=torch.float32)).view(-1, size)

    def _column(self, values: Sequence[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32), self._device)[:, None, None]


def penalized_tokens(req: Req, answered: int, *, late: bool) -> list[int]:
    """Return the tokens that the penalties behind the newest token count.

    Args:
        req: SGLang may not have taken over yet what its last check came to.
        answered: tokens of its answer, with the newest.
        late: count not the newest, but the prompt's last.
    """
    stood = req.winnow_state.stood[: max(0, answered - 1 - len(req.output_ids))]
    tokens = [*req.output_ids, *stood]
    return [req.origin_input_ids[-1], *tokens[: answered - 1]] if late else tokens[:answered]


def stop_tokens(req: Req) -> list[int]:
    """Return the tokens that may not be drawn before ``min_new_tokens``: SGLang's choice."""
    tokens = (req.sampling_params.stop_token_ids or set()) | (req.tokenizer.additional_stop_token_ids or set())
    ends = {req.tokenizer.eos_token_id} | ((req.eos_token_ids or set()) if runs(ENDS_OF_MODEL) else set())
    return sorted(token for token in tokens | ends if token is not None)
