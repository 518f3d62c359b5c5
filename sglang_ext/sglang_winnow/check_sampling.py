"""How drafts are chosen and checked tokens drawn: as dense decoding would, each behind the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_winnow.check_logprobs import CheckedLogprobs, join_logprobs
from sglang_winnow.grammar_walk import GrammarWalk, allow, begin_walk
from sglang_winnow.sglang_versions.sampling import OF_ROWS, ask_for_tokens_alone
from sglang_winnow.token_penalties import TokenPenalties, is_penalized
from winnow_kernels.host_tensors import to_device

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class CheckSampling:
    """The sampling of one round, or of a step of one: of its verified rows alone, but for log-probabilities.

    The host waits for drafts of rows with a grammar, and for tokens of rows with penalties.
    """

    def __init__(
        self,
        batch: ScheduleBatch,
        limits: Sequence[int],
        lengths: Sequence[int],
        made: Sequence[int],
        drafted: Tensor,
    ) -> None:
        """Put the penalties and grammars of verified rows right, for the first pass.

        Args:
            batch: before its first pass.
            limits: how many tokens each row drafts until it is checked.
            lengths: of the rows, tokens whose keys are written.
            made: how many drafts each row has already.
            drafted: int64 [rows, n], these drafts.
        """
        self._batch = batch
        self._info = batch.sampling_info
        self._limits = limits
        self._newest: Tensor = batch.spec_info.bonus_tokens
        self._checks: list[CheckedLogprobs] = []
        rows = [row for row, req in enumerate(batch.reqs) if _is_penalized(req)]
        self._penalties: TokenPenalties | None = None
        if rows:
            inputs = torch.cat((self._newest[:, None], drafted), 1)
            self._penalties = _penalize_pass(batch, rows, lengths, made, inputs)
        self._walks: dict[int, GrammarWalk] = {}
        for row, limit in enumerate(limits):
            if limit and (walk := begin_walk(batch.reqs[row].grammar, self._info.vocab_size, limit)) is not None:
                self._walks[row] = walk
                if made[row]:
                    # SGLang allows what the grammar does where it stands now.
                    walk.masks(drafted[row, : made[row]].tolist())

    def adjust(self, logits: Tensor, rows: list[int], drafted: Tensor, step: int) -> None:
        """Apply to the logits behind some drafts what dense decoding would, in place: others than these would fall.

        Args:
            logits: float32 [rows, vocabulary].
            rows: of the batch.
            drafted: int64 [rows of the batch, n].
            step: how many drafts each has.
        """
        if self._info.logit_bias is None and self._penalties is None and not self._walks:
            return
        index = to_device(torch.tensor(rows), drafted.device)
        inputs = torch.cat((self._newest[index, None], drafted[index, :step]), 1)
        self._parameters(rows, step, inputs).apply_logits_bias(logits)

    def draw(
        self, sampler: Sampler, checked: LogitsProcessorOutput, rows: list[int], inputs: Tensor, positions: Tensor
    ) -> Tensor:
        """Return the token that dense decoding draws behind each that was checked, int64 [rows, n].

        Args:
            sampler: the model runner's.
            checked: what the pass came to; gets log-probabilities.
            rows: of the batch.
            inputs: int64 [rows, n], the newest token of each and its drafts.
            positions: int64 [rows * n], in the context.
        """
        count = inputs.shape[1]
        parameters = self._parameters(rows, 0, inputs)
        for row in rows:
            if (walk := self._walks.get(row)) is not None:
                walk.go_back()
        parameters.apply_logits_bias(checked.next_token_logits)
        top, named = [], []
        if asks := self._asks_logprobs(rows):
            top = [self._batch.top_logprobs_nums[row] for row in rows for _ in range(count)]
            named = [self._batch.token_ids_logprobs[row] for row in rows for _ in range(count)]
        drawn = sampler(checked, parameters, asks, top, named, positions)
        return drawn.to(torch.int64).view(-1, count)

    def leave(self) -> None:
        """Leave grammars as they were found, where rows have drafted and are checked in a later step."""
        for walk in self._walks.values():
            walk.go_back()

    def note(self, checked: LogitsProcessorOutput, rows: list[int], drawn: Tensor, accepted: list[int]) -> None:
        """Note how many of the tokens drawn behind ``rows`` their answers have, the newest included."""
        if self._asks_logprobs(rows):
            self._checks.append(CheckedLogprobs(rows, drawn.shape[1], accepted, checked))
        if self._penalties is None or not any(row in self._penalties for row in rows):
            return
        for row, tokens, count in zip(rows, drawn.tolist(), accepted, strict=True):
            self._batch.reqs[row].winnow_state.stood = tokens[: count - 1]

    def finish(self, output: LogitsProcessorOutput) -> None:
        """Give the output of the first pass the log-probabilities of the round."""
        if self._batch.return_logprob:
            join_logprobs(output, self._checks)

    def _asks_logprobs(self, rows: list[int]) -> bool:
        return any(self._batch.reqs[row].return_logprob for row in rows)

    def _parameters(self, rows: list[int], first: int, inputs: Tensor) -> SamplingBatchInfo:
        """Return the sampling parameters of the tokens behind ``inputs``, from the one numbered ``first`` on."""
        count = inputs.shape[1] - first
        parameters = _of_tokens(self._info, rows, count)
        if self._penalties is not None:
            self._penalize(parameters, self._penalties, rows, first, inputs)
        if walked := [place for place, row in enumerate(rows) if row in self._walks]:
            masks = self._masks(rows, walked, inputs)
            grammar = self._batch.reqs[rows[walked[0]]].grammar
            allow(parameters, grammar, {place: own[first:] for place, own in masks.items()}, count)
        return parameters

    def _masks(self, rows: list[int], walked: list[int], inputs: Tensor) -> dict[int, Tensor]:
        drafts = inputs[to_device(torch.tensor(walked), inputs.device), 1:].tolist()
        masks = {}
        for place, own in zip(walked, drafts, strict=True):
            row = rows[place]
            masks[place] = self._walks[row].masks(own[: self._limits[row]])
        return masks

    def _penalize(
        self, parameters: SamplingBatchInfo, penalties: TokenPenalties, rows: list[int], first: int, inputs: Tensor
    ) -> None:
        places = [place for place, row in enumerate(rows) if row in penalties]
        if not places:
            return
        index = to_device(torch.tensor(places), inputs.device)
        count = inputs.shape[1] - first
        additive, scaling = penalties.at([rows[place] for place in places], first, inputs[index])
        shape = (len(rows), count, self._info.vocab_size)
        added = torch.zeros(shape, device=inputs.device)
        added[index] = additive
        parameters.acc_additive_penalties = added.flatten(0, 1)
        if scaling is not None:
            scales = torch.ones(shape, device=inputs.device)
            scales[index] = scaling
            parameters.acc_scaling_penalties = scales.flatten(0, 1)


def penalize_retracted(batch: ScheduleBatch) -> None:
    """Put the penalties of verified rows right before a prefill of answers, too: SGLang's begin anew there."""
    lengths = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in batch.reqs]
    if rows := [row for row, req in enumerate(batch.reqs) if req.output_ids and _is_penalized(req)]:
        nothing = torch.zeros(len(batch.reqs), 1, dtype=torch.int64, device=batch.seq_lens.device)
        _penalize_pass(batch, rows, lengths, [0] * len(batch.reqs), nothing)


def _is_penalized(req: Req) -> bool:
    return req.winnow_state.policy.verify is not None and is_penalized(req)


def _penalize_pass(
    batch: ScheduleBatch, rows: list[int], lengths: Sequence[int], made: Sequence[int], inputs: Tensor
) -> TokenPenalties:
    """Put the penalties of some rows right for a pass that draws one token of each; return those of all that follow.

    Args:
        batch: before the pass.
        rows: that have penalties.
        lengths: of all rows, tokens whose keys are written.
        made: how many drafts each row has.
        inputs: int64 [rows of the batch, n], the newest token of each and its drafts.
    """
    penalties = TokenPenalties(batch, rows, lengths)
    for count in {made[row] for row in rows}:
        own = [row for row in rows if made[row] == count]
        index = to_device(torch.tensor(own), batch.seq_lens.device)
        additive, scaling = penalties.at(own, count, inputs[index, : count + 1])
        batch.sampling_info.acc_additive_penalties[index] = additive[:, 0]
        if scaling is not None:
            batch.sampling_info.acc_scaling_penalties[index] = scaling[:, 0]
    return penalties


def _of_tokens(info: SamplingBatchInfo, rows: list[int], count: int) -> SamplingBatchInfo:
    """Return the sampling parameters of ``rows`` of a batch, each once for all ``count`` of its tokens."""
    part = copy(info)
    index = to_device(torch.tensor(rows).repeat_interleave(count), info.temperatures.device)
    for name in OF_ROWS:
        if (values := getattr(info, name)) is not None:
            setattr(part, name, values[index])
    ask_for_tokens_alone(part)
    return part
