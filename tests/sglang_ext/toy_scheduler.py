"""A toy model and a scheduler around the worker that verifies: who gets which token in which step.

The model's next token depends on every token before, as the KV cache has them. Drafts are often wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_winnow.next_tokens import NextTokens
from sglang_winnow.request_policy import drafts
from sglang_winnow.request_state import RequestState
from sglang_winnow.round_times import Clock, RoundTimes
from sglang_winnow.rows_with_tokens import process_rows_with_tokens, processes_first
from sglang_winnow.verification_worker import WIDTH, VerificationWorker
from winnow_kernels.policies.attention_policy import parse_policy

VOCABULARY: Final = 30
SLOTS: Final = 12
POSITIONS: Final = 160
CPU: Final = torch.device("cpu")


def dense_token(tokens: Sequence[int]) -> int:
    return hash((*tokens, 7)) % VOCABULARY


def sparse_token(tokens: Sequence[int]) -> int:
    """Return another token than ``dense_token`` in a third of all cases."""
    exact = dense_token(tokens)
    return (exact + 1) % VOCABULARY if hash((*tokens, 11)) % 3 == 0 else exact


def chain(prompt: Sequence[int], count: int, policy: dict[str, Any]) -> list[int]:
    """Return the answer of a request alone."""
    tokens = [*prompt, dense_token(prompt)]
    while len(tokens) < len(prompt) + count:
        is_sparse = policy["decode"]["policy"] != "dense" and "verify" not in policy
        tokens.append((sparse_token if is_sparse else dense_token)(tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Request:
    prompt: list[int]
    asked: dict[str, Any]
    wanted: int
    output_ids: list[int] = field(default_factory=list)
    slot: int = -1
    committed: int = 0
    ended: bool = False
    is_retracted: bool = False
    grammar: None = None
    return_logprob: bool = False

    def __post_init__(self) -> None:
        self.origin_input_ids = self.prompt
        self.winnow_state = RequestState(parse_policy(self.asked), len(self.prompt))
        self.sampling_params = SimpleNamespace(
            max_new_tokens=self.wanted,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            min_new_tokens=0,
        )

    @property
    def is_verified(self) -> bool:
        return self.winnow_state.policy.verify is not None


@dataclass(eq=False)
class Sampling:
    """Of SGLang's ``SamplingBatchInfo`` what is read."""

    temperatures: Tensor
    top_ps = top_ks = min_ps = sampling_seed = logit_bias = None
    vocab_size: int = VOCABULARY
    has_custom_logit_processor: bool = False

    def apply_logits_bias(self, logits: Tensor) -> None:
        assert logits.shape[1] == VOCABULARY


class Model:
    """The target worker: the tokens of the KV cache, and which of them were written densely."""

    def __init__(self) -> None:
        self.table = torch.arange(SLOTS * POSITIONS).view(SLOTS, POSITIONS)
        self.tokens = [-1] * (SLOTS * POSITIONS)
        self.is_dense = [False] * (SLOTS * POSITIONS)
        # By request and place; the last one if some was made in vain.
        self.drafted: dict[int, dict[int, int]] = {}
        self.widths: list[int] = []
        backend = SimpleNamespace(accept=lambda _accepted: None, can_decode_ahead=lambda _states, _bounds: True)
        self.model_runner = SimpleNamespace(
            page_size=1,
            attn_backend=backend,
            sampler=lambda output, *_: output.next_token_logits.argmax(-1),
            model_config=SimpleNamespace(context_len=POSITIONS),
        )

    def forward_batch_generation(self, part: Any, *, is_verify: bool = False) -> GenerationBatchResult:
        lengths = part.seq_lens.tolist()
        assert part.seq_lens_cpu.tolist() == lengths
        width = len(part.input_ids) // len(lengths) if part.forward_mode.is_target_verify() else 1
        found = []
        for row, (req, length) in enumerate(zip(part.reqs, lengths, strict=True)):
            own = slice(row * width, (row + 1) * width)
            inputs, slots = part.input_ids[own].tolist(), part.out_cache_loc[own].tolist()
            assert slots == self.table[req.slot, length - width : length].tolist()
            found += self._row(part, req, length - width, inputs)
        logits = torch.zeros(len(found), VOCABULARY)
        logits[torch.arange(len(found)), torch.tensor(found)] = 1.0
        result = GenerationBatchResult(logits_output=LogitsProcessorOutput(next_token_logits=logits))
        if not is_verify:
            result.next_token_ids = torch.tensor(found)
        return result

    def _row(self, part: Any, req: Request, begin: int, inputs: list[int]) -> list[int]:
        checks = part.forward_mode.is_target_verify()
        is_draft = not checks and drafts(req.winnow_state, begin + 1, 1)
        is_sparse = is_draft or (not checks and not req.is_verified and req.asked["decode"]["policy"] != "dense")
        if checks:
            self.widths.append(len(inputs) - 1)
        found = []
        for place, token in enumerate(inputs, begin):
            self.write(req.slot, place, token, is_dense=not is_sparse)
            before = self.written(req.slot, place + 1)
            found.append((sparse_token if is_sparse else dense_token)(before))
        if is_draft:
            self.drafted.setdefault(id(req), {})[begin] = found[0]
        return found

    def write(self, slot: int, place: int, token: int, *, is_dense: bool) -> None:
        self.tokens[slot * POSITIONS + place] = token
        self.is_dense[slot * POSITIONS + place] = is_dense

    def written(self, slot: int, count: int) -> list[int]:
        return self.tokens[slot * POSITIONS : slot * POSITIONS + count]


class Scheduler:
    """What SGLang's scheduler does around a worker, with results that are processed a step later, or at once."""

    def __init__(self, worker: Any, model: Model, *, overlaps: bool) -> None:
        self._worker, self._model, self._overlaps = worker, model, overlaps
        self.running: list[Request] = []
        self._queue: list[tuple[Any, GenerationBatchResult]] = []
        self._free = list(range(SLOTS))
        self._lengths = torch.zeros(SLOTS, dtype=torch.int64)
        self._newest = torch.zeros(SLOTS, dtype=torch.int64)
        # Tokens that an unverified request got in a step, beside rows that drafted.
        self.bursts: Counter[int] = Counter()
        self.ended: list[Request] = []

    def admit(self, req: Request) -> None:
        if not self._free:
            return
        req.slot, req.is_retracted = self._free.pop(0), False
        tokens = req.prompt + req.output_ids
        for place, token in enumerate(tokens):
            self._model.write(req.slot, place, token, is_dense=True)
        req.committed = len(tokens)
        batch = self._batch([req], ForwardMode.EXTEND, torch.tensor([len(tokens)]))
        batch.prompts = [tokens]
        self.running.append(req)
        self._run(batch)

    def step(self) -> None:
        if self.running:
            slots = torch.tensor([req.slot for req in self.running])
            self._run(self._batch(list(self.running), ForwardMode.DECODE, self._lengths[slots]))
        elif self._queue:
            self._process()

    def leave(self, req: Request, *, retract: bool) -> None:
        """Abort a request, or retract it to be prefilled anew."""
        self.running.remove(req)
        self._free.append(req.slot)
        if retract:
            req.is_retracted = True
        else:
            req.ended = True

    def _batch(self, reqs: list[Request], mode: ForwardMode, lengths: Tensor) -> Any:
        slots = torch.tensor([req.slot for req in reqs])
        return SimpleNamespace(
            reqs=reqs,
            forward_mode=mode,
            req_pool_indices=slots,
            req_pool_indices_cpu=slots,
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            orig_seq_lens=lengths,
            spec_info=NextTokens(self._newest[slots]),
            req_to_token_pool=SimpleNamespace(req_to_token=self._model.table),
            sampling_info=Sampling(torch.ones(len(reqs), 1)),
            return_logprob=False,
            return_hidden_states=False,
            enable_overlap=self._overlaps,
        )

    def _run(self, batch: Any) -> None:
        published: list[Tensor] = []
        if processes_first(lambda *_: False, SimpleNamespace(result_queue=self._queue)):
            self._process()
        if batch.forward_mode.is_extend():
            batch.input_ids = None
            result = self._prefilled(batch, published.append)
        else:
            result = self._worker.forward_batch_generation(batch, published.append)
        [lengths] = published
        assert lengths.tolist() == result.new_seq_lens.tolist()
        self._lengths[batch.req_pool_indices] = lengths
        self._newest[batch.req_pool_indices] = result.next_draft_input.bonus_tokens
        kept = copy(batch)
        kept.reqs = list(batch.reqs)
        self._queue.append((kept, result))
        # SGLang's batch of running requests is one object, whose rows come and go.
        batch.reqs.clear()
        if not self._overlaps or len(self._queue) > 1:
            self._process()

    def _prefilled(self, batch: Any, on_publish: Callable[[Tensor], None]) -> GenerationBatchResult:
        target = self._worker._target_worker
        tokens = torch.tensor([dense_token(prompt) for prompt in batch.prompts])
        prefill = GenerationBatchResult(next_token_ids=tokens)
        self._worker._target_worker = SimpleNamespace(forward_batch_generation=lambda _batch: prefill)
        try:
            return self._worker.forward_batch_generation(batch, on_publish)
        finally:
            self._worker._target_worker = target

    def _process(self) -> None:
        batch, result = self._queue.pop(0)
        if batch.forward_mode.is_decode():
            process_rows_with_tokens(self._process_rows, None, batch, result)
        else:
            self._append(batch.reqs[0], result.next_token_ids.tolist(), is_prefill=True)

    def _process_rows(self, _processor: None, batch: Any, result: GenerationBatchResult) -> None:
        counts = result.accept_lens.tolist()
        tokens = result.next_token_ids.view(len(counts), WIDTH).tolist()
        assert len(counts) == len(batch.reqs)
        for req, own, count in zip(batch.reqs, tokens, counts, strict=True):
            assert count > 0
            if not req.is_verified:
                self.bursts[count] += 1
            self._append(req, own[:count])

    def _append(self, req: Request, tokens: list[int], *, is_prefill: bool = False) -> None:
        if req.ended or req.is_retracted:
            return
        req.output_ids += tokens
        req.committed += 0 if is_prefill else len(tokens)
        if len(req.output_ids) < req.wanted:
            return
        del req.output_ids[req.wanted :]
        req.ended = True
        self.running.remove(req)
        self._free.append(req.slot)
        self.ended.append(req)
        kept = len(req.prompt) + req.wanted - 1
        assert self._model.written(req.slot, kept) == [*req.prompt, *req.output_ids][:kept]
        if req.is_verified:
            first = req.slot * POSITIONS
            assert all(self._model.is_dense[first : first + kept])


def worker_of(model: Model, *, measures: bool) -> Any:
    worker: Any = object.__new__(VerificationWorker)
    worker._target_worker = model
    worker._graphs = worker._ahead = worker._open_drafts = worker._end = worker._learn_last = None
    worker._context_length = POSITIONS
    worker._times = RoundTimes(Clock(CPU))
    worker._measures = measures
    return worker
