"""The worker of SGLang's speculative algorithm ``WINNOW``: decode passes that draft, and passes that check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from sglang_winnow.check_sampling import CheckSampling, penalize_retracted
from sglang_winnow.decode_round import Round
from sglang_winnow.draft_ahead import DraftsAhead, can_draft_ahead
from sglang_winnow.draft_length import DraftLength, agree, begin_round
from sglang_winnow.next_tokens import CheckedTokens, NextTokens
from sglang_winnow.open_drafts import DraftPool, drafts_in_steps, limits_in_steps
from sglang_winnow.ranks import attention_ranks
from sglang_winnow.reporting import note_rows
from sglang_winnow.request_policy import drafts, reads_everything
from sglang_winnow.round_times import ASSUMED, BatchSize, Clock, RoundTimes
from sglang_winnow.simulated_acceptance import simulated_acceptance
from sglang_winnow.verification_plan import Accepted
from winnow_kernels.contract.verification import MAX_DRAFT_TOKENS
from winnow_kernels.decode.ranks import ALONE
from winnow_kernels.host_tensors import OnHost, to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_winnow.device.check_graphs import CheckGraphs

WIDTH: Final = MAX_DRAFT_TOKENS + 1
"""Tokens that a round yields for a row, at most: all drafts, and the one that follows them."""


class _Check(NamedTuple):
    """A pass that has checked.

    Attributes:
        rows: of the batch.
        result: of the pass.
        drawn: int64 [rows, width], behind the newest accepted token and each draft.
    """

    rows: list[int]
    result: GenerationBatchResult
    drawn: Tensor


class VerificationWorker(BaseSpecWorker):
    """Drafts and checks with the one model that there is."""

    def __init__(self, *, target_worker: TpModelWorker, **_: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._graphs: CheckGraphs | None = None
        self._context_length: int = target_worker.model_runner.model_config.context_len
        self._ahead: DraftsAhead | None = None
        self._open_drafts: DraftPool | None = None
        self._end: Any = None
        # What is learned from the last round as soon as the host needs it: until then it does not wait for the device.
        self._learn_last: Callable[[], None] | None = None
        self._times = RoundTimes(Clock(torch.device(target_worker.model_runner.device)))
        # Several ranks must draft alike, and would measure different times.
        self._measures = attention_ranks() is ALONE

    @property
    def draft_worker(self) -> None:
        return None

    def init_cuda_graphs(self) -> None:
        """Capture the passes that check, after decode steps."""
        runner = self.target_worker.model_runner
        if getattr(runner.attn_backend, "check", None) is not None:
            from sglang_winnow.device.check_graphs import CheckGraphs  # noqa: PLC0415  # It needs Triton.

            self._graphs = CheckGraphs(runner)

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Callable[[Tensor], None] | None = None, **_: object
    ) -> GenerationBatchResult:
        # Some releases also pass what stages of a pipeline hand on, of which there is one.
        self._finish_last()
        if batch.forward_mode.is_decode():
            result = self._round(batch, on_publish)
        else:
            # Who was retracted is prefilled, and has other slots; and what this takes belongs to no round.
            self._ahead = self._end = None
            for req in batch.reqs:
                req.winnow_state.open_drafts = None
            penalize_retracted(batch)
            result = self.target_worker.forward_batch_generation(batch)
            result.new_seq_lens = batch.seq_lens.clone()
            result.accept_lens = torch.ones_like(batch.seq_lens, dtype=torch.int32)
            result.next_draft_input = NextTokens(result.next_token_ids.to(torch.int64))
            if on_publish is not None:
                on_publish(result.new_seq_lens)
        result.speculative_num_draft_tokens = WIDTH
        return result

    def _round(self, batch: ScheduleBatch, on_publish: Callable[[Tensor], None] | None) -> GenerationBatchResult:
        """Run a round, or a step of one: passes that draft, what checks, or both."""
        # Rows come and go before the next round learns from this one.
        batch = copy(batch)
        batch.reqs = list(batch.reqs)
        lengths = batch.seq_lens
        on_host = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else lengths.cpu()
        known = on_host.tolist()
        size = BatchSize.of(known, in_steps=drafts_in_steps(batch.reqs))
        own = Round(batch, on_host, known, size, self._limits(batch, known, size), self._context_length)
        drafting = self._times.clock.mark()
        begin, self._end = drafting if self._end is None else self._end, None
        accepted = own.accepted()
        if on_publish is not None and not own.checks:
            # Known before the pass: the next one can be prepared while it runs.
            on_publish(lengths + accepted)
        tokens = self._earlier_drafts(own)
        sampling = CheckSampling(batch, own.limits, known, own.made, tokens)
        result, drafts_ahead = (None, 0) if own.only_checks else self._first_pass(own, tokens)
        checks: list[_Check] = []
        if own.checks:
            if not size.in_steps:
                self._draft(own, tokens, sampling)
            was_drafted = self._times.clock.mark()
            checks = [
                self._verify(own, rows, tokens, accepted, sampling) for rows in self._parts(own.checked, own.limits)
            ]
            drafts, earlier = max(own.limits), max(own.made)
            self._times.note_round(
                size, begin, drafting, was_drafted, drafts, drafts_ahead=drafts_ahead, earlier=earlier
            )
        else:
            sampling.leave()
            self._note_pass(own, begin)
        self._end = self._times.clock.mark()
        if result is None:
            result = checks[0].result
        result.accept_lens = accepted
        newest = self._hand_on(own, tokens, result)
        if on_publish is not None and own.checks:
            on_publish(result.new_seq_lens)
        note_rows(result, self.target_worker, batch)
        if checks:
            self._learn_last = partial(self._learn, own, checks, OnHost(accepted), sampling)
            self._draft_ahead(own, newest, result)
            result.winnow_is_awaited = size.in_steps
            if batch.return_logprob:
                self._finish_last()
        sampling.finish(result.logits_output)
        return result

    def _finish_last(self) -> None:
        """Learn from the last round; the host waits for the device."""
        learn, self._learn_last = self._learn_last, None
        if learn is not None:
            learn()

    def _earlier_drafts(self, own: Round) -> Tensor:
        """Return room for the tokens of a round, int64 [rows, ``WIDTH``], with the drafts of its earlier steps."""
        slots = own.batch.req_pool_indices
        tokens = torch.zeros(len(slots), WIDTH, dtype=torch.int64, device=slots.device)
        if any(own.made):
            tokens[:, :MAX_DRAFT_TOKENS] = self._pool(own.batch).read(slots)
        return tokens

    def _note_pass(self, own: Round, begin: Any) -> None:
        """Note what a pass took behind which nothing is checked."""
        if own.verified:
            self._times.note_draft(own.size, begin)
        elif own.size.in_steps or self._is_dense(own.batch, own.lengths):
            self._times.note_dense(own.size, begin)

    def _hand_on(self, own: Round, tokens: Tensor, result: GenerationBatchResult) -> Tensor:
        """Put into the result what SGLang takes from it, and keep open drafts; return the newest tokens, int64 [rows].

        Args:
            own: the round.
            tokens: int64 [rows, ``WIDTH``], what the rows have drafted or come to.
            result: of the first pass, with how many tokens were accepted.
        """
        batch, accepted = own.batch, result.accept_lens
        result.next_token_ids = tokens.flatten()
        result.new_seq_lens = batch.seq_lens + accepted
        newest = tokens.gather(1, (accepted.long() - 1).clamp_min(0)[:, None])[:, 0]
        if own.verified and not own.checks:
            newest = torch.where(accepted > 0, newest, batch.spec_info.bonus_tokens)
            self._pool(batch).write(batch.req_pool_indices, tokens[:, :MAX_DRAFT_TOKENS])
            result.winnow_drafting = frozenset(own.verified)
        own.note_drafts()
        result.next_draft_input = NextTokens(newest)
        if batch.return_hidden_states and (states := result.logits_output.hidden_states) is not None:
            result.logits_output.hidden_states = states.repeat_interleave(WIDTH, 0)
        return newest

    def _pool(self, batch: ScheduleBatch) -> DraftPool:
        if self._open_drafts is None:
            table = batch.req_to_token_pool.req_to_token
            self._open_drafts = DraftPool(len(table), table.device)
        return self._open_drafts

    def _first_pass(self, own: Round, tokens: Tensor) -> tuple[GenerationBatchResult, int]:
        """Return the first pass of a round or step, and how many drafts were made ahead; fill in what rows have of it.

        ``tokens``, int64 [rows, ``WIDTH``], holds the drafts of earlier steps.
        """
        ahead, self._ahead = self._ahead, None
        batch, on_host = own.batch, own.on_host
        if ahead is not None and (drafts_ahead := ahead.of(batch.reqs, own.limits)) is not None:
            tokens[:, 0] = drafts_ahead
            return ahead.result, 1
        newest, cached = batch.spec_info.bonus_tokens, batch.seq_lens
        place = torch.zeros_like(newest)
        if any(own.made):
            made = torch.tensor(own.made)
            place = to_device(made, newest.device)
            last = tokens.gather(1, (place - 1).clamp_min(0)[:, None])[:, 0]
            newest, cached, on_host = torch.where(place > 0, last, newest), cached + place, on_host + made
        result = self._decode(_part(batch, None), newest, cached, on_host)
        drawn = result.next_token_ids.to(torch.int64)
        if own.verified:
            index = to_device(torch.tensor(own.verified), drawn.device)
            drawn = drawn.index_copy(0, index, result.logits_output.next_token_logits[index].argmax(-1))
        tokens.scatter_(1, place[:, None], drawn[:, None])
        return result, 0

    def _limits(self, batch: ScheduleBatch, lengths: Sequence[int], size: BatchSize) -> list[int]:
        """Return how many tokens each row drafts until its check; note who rests."""
        page_size = self.target_worker.model_runner.page_size
        drafting: dict[int, DraftLength] = {}
        for row, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            # Of the last round: who rested would be taken to attend to everything.
            req.winnow_state.rests = False
            if drafts(req.winnow_state, length + 1, page_size):
                drafting[row] = req.winnow_state.draft_length
        opened = [req.winnow_state.open_drafts for req in batch.reqs]
        begins = not any(opened)
        if begins:
            begin_round(list(drafting.values()))
        # Before anybody drafts as many as pay, a pass without drafts tells what that is to be measured by.
        measures = (
            begins
            and self._measures
            and self._times.costs(size) is None
            and all(each.follows for each in drafting.values())
        )
        limits = [0] * len(batch.reqs)
        for row, draft_length in drafting.items():
            req = batch.reqs[row]
            wanted = req.sampling_params.max_new_tokens - len(req.output_ids)
            limits[row] = 0 if measures else draft_length.next(wanted)
        if size.in_steps:
            limits = limits_in_steps(limits, opened)
        for req, limit in zip(batch.reqs, limits, strict=True):
            # In all passes of the round: some may lie behind the length from which on its policy leaves something out.
            req.winnow_state.rests = req.winnow_state.policy.verify is not None and limit == 0
        return limits

    def _learn(self, own: Round, checks: Sequence[_Check], counts: OnHost, sampling: CheckSampling) -> None:
        """Note what checks have come to; let those who draft as many as pay learn from it.

        Args:
            own: the round.
            checks: of the round.
            counts: how many tokens of each row stand, one more included.
            sampling: of the round.
        """
        accepted = counts.tolist()
        drafting: list[DraftLength] = []
        for check in checks:
            sampling.note(check.result.logits_output, check.rows, check.drawn, [accepted[row] for row in check.rows])
            for row in check.rows:
                if own.limits[row]:
                    drafting.append(own.batch.reqs[row].winnow_state.draft_length)
                    drafting[-1].note(own.limits[row], accepted[row] - 1)
        agree(drafting, (self._times.costs(own.size) if self._measures else None) or ASSUMED)

    def _is_dense(self, batch: ScheduleBatch, lengths: Sequence[int]) -> bool:
        """Return whether a pass in which nobody drafts was dense for everybody."""
        page_size = self.target_worker.model_runner.page_size
        rows = zip(batch.reqs, lengths, strict=True)
        return all(reads_everything(req.winnow_state, length + 1, page_size) for req, length in rows)

    def _draft_ahead(self, own: Round, newest: Tensor, result: GenerationBatchResult) -> None:
        """Launch the pass that drafts first in the next round, behind the ``newest`` tokens, if there can be one."""
        batch, accepted = own.batch, result.accept_lens
        if not can_draft_ahead(batch, own.limits, own.lengths, self._context_length):
            return
        # Found before the host knows who has ended, and gives their slots to others.
        slots = _slots_at(batch, result.new_seq_lens)
        most = torch.tensor(own.limits) + 1 if accepted.is_cuda else accepted
        bounds = own.on_host + most
        states = [req.winnow_state for req in batch.reqs]
        if not self.target_worker.model_runner.attn_backend.can_decode_ahead(states, (bounds + 1).tolist()):
            return
        part = _part(batch, None)
        output = self._decode(part, newest, result.new_seq_lens, bounds, sample=False, slots=slots)
        self._ahead = DraftsAhead(list(batch.reqs), output.logits_output.next_token_logits.argmax(-1), output)

    def _decode(
        self,
        part: ScheduleBatch,
        tokens: Tensor,
        cached: Tensor,
        on_host: Tensor,
        *,
        sample: bool = True,
        slots: Tensor | None = None,
    ) -> GenerationBatchResult:
        part.forward_mode = ForwardMode.DECODE
        part.input_ids = tokens
        part.out_cache_loc = _slots_at(part, cached) if slots is None else slots
        part.seq_lens = cached + 1
        part.seq_lens_cpu = on_host + 1
        part.seq_lens_sum = None
        part.spec_info = None
        return self.target_worker.forward_batch_generation(part, is_verify=not sample)

    def _draft(self, own: Round, tokens: Tensor, sampling: CheckSampling) -> None:
        """Fill in what follows the first of ``tokens``: drafts, the most probable each, and what other rows draw."""
        sampler, lengths = self.target_worker.model_runner.sampler, own.batch.seq_lens
        for step in range(1, max(own.limits)):
            drafting = [row for row, limit in enumerate(own.limits) if limit > step]
            others = [row for row, count in enumerate(own.decoded) if count > step]
            index = to_device(torch.tensor(drafting + others), lengths.device)
            newest, cached, known = (
                tokens[index, step - 1],
                lengths[index] + step,
                own.on_host[drafting + others] + step,
            )
            part, count = _part(own.batch, drafting + others), len(drafting)
            output = self._decode(part, newest, cached, known, sample=False).logits_output
            logits, output.next_token_logits = output.next_token_logits.tensor_split([count])
            sampling.adjust(logits, drafting, tokens, step)
            tokens[index[:count], step] = logits.argmax(-1)
            if others:
                drawn = sampling.draw(sampler, output, others, newest[count:, None], cached[count:])
                tokens[index[count:], step] = drawn[:, 0]

    def _parts(self, rows: list[int], limits: list[int]) -> Iterator[list[int]]:
        """Yield ``rows`` in parts, each for a pass that checks as many tokens of every row."""
        if self._graphs is None:
            # A CPU's time goes by tokens: none are filled up.
            for limit in sorted({limits[row] for row in rows}):
                yield [row for row in rows if limits[row] == limit]
            return
        at_once = self._graphs.rows(max(limits[row] for row in rows) + 1)
        for first in range(0, len(rows), at_once):
            yield rows[first : first + at_once]

    def _verify(self, own: Round, rows: list[int], tokens: Tensor, accepted: Tensor, sampling: CheckSampling) -> _Check:
        """Check the drafts that ``rows`` have as ``tokens``; fill in what is drawn, and how many are ``accepted``.

        Where a row has drafted fewer than others, or none, nothing is asked of the tokens that fill it up.
        """
        batch, on_host, bonus = own.batch, own.on_host, own.batch.spec_info.bonus_tokens
        width = max(own.limits[row] for row in rows) + 1
        if self._graphs is not None:
            width = self._graphs.width(width)
        runner, part = self.target_worker.model_runner, _part(batch, rows)
        index = to_device(torch.tensor(rows), bonus.device)
        cached = batch.seq_lens[index]
        positions = cached[:, None] + torch.arange(width, device=cached.device)
        slots = part.req_to_token_pool.req_to_token[part.req_pool_indices[:, None], positions]
        part.forward_mode = ForwardMode.TARGET_VERIFY
        drafted = tokens[index, : width - 1]
        part.input_ids = torch.cat((bonus[index, None], drafted), 1).flatten()
        part.out_cache_loc = slots.flatten().to(torch.int64)
        part.prefix_lens, part.extend_lens = on_host[rows].tolist(), [width] * len(rows)
        part.seq_lens, part.seq_lens_cpu, part.seq_lens_sum = cached + width, on_host[rows] + width, None
        states = [batch.reqs[row].winnow_state for row in rows]
        kinds = torch.tensor([[own.limits[row] for row in rows], [int(state.rests) for state in states]])
        limit, rests = to_device(kinds, bonus.device)
        # What lies beyond the longest context is of rows that have drafted less: it is not looked at.
        last = self._context_length - 1
        part.spec_info = CheckedTokens(positions.clamp_max(last).flatten(), (limit + 1).int(), width)
        with nullcontext() if self._graphs is None else self._graphs.checking(width):
            checked = self.target_worker.forward_batch_generation(part, is_verify=True)
        inputs = part.input_ids.view(len(rows), width)
        drawn = sampling.draw(runner.sampler, checked.logits_output, rows, inputs, part.spec_info.positions)
        standing = simulated_acceptance(limit)
        if standing is None:
            standing = standing_drafts(drafted, drawn, limit)
        accepted[index] = (1 + standing).to(accepted.dtype)
        tokens[index, :width] = drawn
        (runner.attn_backend if self._graphs is None else self._graphs).accept(Accepted(1 + standing, limit, rests))
        for state, first in zip(states, on_host[rows].tolist(), strict=True):
            state.written_anew(first)
        return _Check(rows, checked, drawn)


def standing_drafts(drafted: Tensor, drawn: Tensor, limits: Tensor) -> Tensor:
    """Return how many of each row's drafts are the tokens that were drawn, int64 [rows].

    From the first on that is not, others were drawn behind other tokens than the answer has.

    Args:
        drafted: int64 [rows, n].
        drawn: int64 [rows, n + 1], behind the newest accepted token and each draft.
        limits: int64 [rows]; how many each row has drafted.
    """
    is_draft = torch.arange(drafted.shape[1], device=drafted.device) < limits[:, None]
    return ((drafted == drawn[:, :-1]) & is_draft).long().cumprod(1).sum(1)


def _slots_at(batch: ScheduleBatch, positions: Tensor) -> Tensor:
    """Return the KV slots, int64 [rows], that a batch's rows have at their ``positions``, int64 [rows]."""
    return batch.req_to_token_pool.req_to_token[batch.req_pool_indices, positions].to(torch.int64)


def _part(batch: ScheduleBatch, rows: list[int] | None) -> ScheduleBatch:
    """Return some rows of a batch, all if None, to be planned and run by themselves; if not None, for their logits."""
    part = copy(batch)
    if rows is None:
        return part
    part.return_logprob = False
    if rows == list(range(len(batch.reqs))):
        return part
    index = to_device(torch.tensor(rows), batch.seq_lens.device)
    part.reqs = [batch.reqs[row] for row in rows]
    for name in ("req_pool_indices", "seq_lens", "orig_seq_lens"):
        setattr(part, name, getattr(batch, name)[index])
    for name in ("req_pool_indices_cpu", "seq_lens_cpu"):
        if (values := getattr(batch, name)) is not None:
            setattr(part, name, values[torch.tensor(rows)])
    part.sampling_info = copy(batch.sampling_info)
    return part
