"""Teacher forcing: decode given answers under a policy, from one dense prefill that all policies share.

Every step runs its policy, with the steps of ``sglang_winnow.families``: the lengths below which a server runs a policy
dense do not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from benchmarks.offline_model import OfflineModel
from sglang_winnow.families import FAMILIES, Rows, kept_by, thresholds_of
from sglang_winnow.indexes import Indexes
from sglang_winnow.policy import AttentionPolicy
from sglang_winnow.request_state import RequestState
from sglang_winnow.statistics import Statistics
from winnow_kernels.attend import attend
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode_step import DecodeStep
from winnow_kernels.dense import prefill
from winnow_kernels.dense_step import DenseStep
from winnow_kernels.early_termination import Termination
from winnow_kernels.gather import Meter
from winnow_kernels.indexes.clusters import SPAN, ClusterIndex

PAGE_SIZE: Final = 16
DENSE: Final = AttentionPolicy()


class PrefilledBatch:
    """Prompts whose keys and values are in a KV cache, with room for answers behind each.

    Attributes:
        model: that read them.
        lengths: tokens of each prompt.
        caches: of each layer.
        slots: int64 [prompts, capacity]; where each prompt's tokens, and then those of its answer, lie.
        first: float32 [prompts, vocabulary]; log-probabilities of the answers' first tokens.
        scale: of attention scores.
        indexes: over the caches.
    """

    def __init__(
        self, model: OfflineModel, prompts: Sequence[Sequence[int]], room: int, window: int = 0, span: int = SPAN
    ) -> None:
        """Prefill the prompts densely, one after another.

        Args:
            model: what reads them.
            prompts: tokens of each.
            room: most tokens of an answer.
            window: how many of each prompt's last queries are kept: the longest observation window of the policies.
            span: of Tactic's clusters.
        """
        self.model = model
        self.lengths = [len(prompt) for prompt in prompts]
        capacity = -(-(max(self.lengths) + room) // PAGE_SIZE) * PAGE_SIZE
        self.slots = torch.arange(len(prompts) * capacity, device=model.device).view(len(prompts), capacity)
        self.caches = [self._empty_cache() for _ in range(model.layers)]
        self.indexes = _Indexes(self.caches, PAGE_SIZE, model.device, span)
        self.scale = 0.0
        self._last_queries: list[list[Tensor]] = [[] for _ in prompts]
        self.first = torch.stack([self._prefill(row, prompt, window) for row, prompt in enumerate(prompts)])

    def _empty_cache(self) -> LayerCache:
        shape = (self.slots.numel(), self.model.kv_heads, self.model.head_dim)
        keys, values = (torch.zeros(shape, dtype=self.model.dtype, device=self.model.device) for _ in range(2))
        return LayerCache(keys, values)

    def _prefill(self, row: int, prompt: Sequence[int], window: int) -> Tensor:
        slots = self.slots[row, : len(prompt)]

        def attend_causally(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            cache = self.caches[layer]
            cache.keys[slots], cache.values[slots] = keys[0], values[0]
            self._last_queries[row].append(queries[0, max(0, len(prompt) - window) :].clone())
            self.scale = scale
            return prefill(queries[0], slots, cache, scale)[None]

        tokens = torch.tensor([prompt], device=self.model.device)
        positions = torch.arange(len(prompt), device=self.model.device)[None]
        hidden = self.model.hidden(tokens, positions, attend_causally)
        return self.model.log_probabilities(hidden[0, -1])

    def context(self, rows: Sequence[int], decoded: int) -> Context:
        """Return the contexts of some prompts with ``decoded`` tokens of their answers."""
        lengths = torch.tensor([self.lengths[row] + decoded for row in rows], device=self.model.device)
        slots = self.slots[list(rows), : int(lengths.max())]
        return Context.of(slots, lengths, self.slots.numel())

    def forget_answers(self) -> None:
        """Void what indexes hold of pages that an answer was written to: the next answer overwrites them."""
        starts = [
            slots[length // PAGE_SIZE * PAGE_SIZE :: PAGE_SIZE]
            for slots, length in zip(self.slots, self.lengths, strict=True)
        ]
        self.indexes.generations.written(torch.cat(starts))

    def state(self, row: int, policy: AttentionPolicy) -> RequestState:
        """Return the state of a request of one prompt that has been prefilled."""
        state = RequestState(policy, self.lengths[row])
        state.kept = kept_by(state, self.model.layers)
        if state.kept is not None:
            for layer, queries in enumerate(self._last_queries[row]):
                state.kept.observation.record(layer, queries, state.prompt_length - len(queries))
        return state


class _Indexes(Indexes):
    """Indexes whose clusters have spans of another length."""

    def __init__(self, caches: Sequence[LayerCache], page_size: int, device: torch.device, span: int) -> None:
        super().__init__(caches, page_size, device)
        self._span = span

    @cached_property
    def clusters(self) -> ClusterIndex:
        return ClusterIndex(self.caches, self.generations, self._span)


class Decoding:
    """A batch's answers being decoded under one policy. Only one at a time may be under way in a batch.

    Attributes:
        meters: of each layer, with a row for each prompt; what was read so far.
        recall: float64 [layers, prompts]; the share of exact attention that the attended tokens hold, a mean over query
            heads, summed over steps. Zeros if it is not measured.
    """

    def __init__(self, batch: PrefilledBatch, policy: AttentionPolicy, *, measure_recall: bool = False) -> None:
        """
        Args:
            batch: the prompts.
            policy: as the model runs it (``sglang_winnow.policy.check_against_model``); its prefill is not looked at.
            measure_recall: whether to compute the exact attention too. It costs more than a dense step.
        """
        batch.forget_answers()
        rows, device = len(batch.lengths), batch.model.device
        self._batch = batch
        self._policy = policy
        self._measure_recall = measure_recall
        self._states = [batch.state(row, policy) for row in range(rows)]
        self._statistics = Statistics(rows, device)
        self._decoded = 0
        self.meters = [Meter(rows, device) for _ in batch.caches]
        self.recall = torch.zeros(len(batch.caches), rows, dtype=torch.float64, device=device)

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Decode one token of the answers of some prompts, which all of the earlier steps had among theirs.

        Returns:
            float32 [rows, vocabulary]; log-probabilities of the tokens after these.
        """
        batch, members = self._batch, list(rows)
        self._decoded += 1
        context = batch.context(rows, self._decoded)
        newest = context.slots_at(context.lengths[:, None] - 1)[:, 0]
        batch.indexes.generations.written(newest)
        step = self._make_step(context, rows)

        def attend_by_policy(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            del scale
            cache = batch.caches[layer]
            cache.keys[newest], cache.values[newest] = keys[:, 0], values[:, 0]
            meter = Meter(len(members), queries.device)
            meter.count_context(context, cache)
            output = step.attend(layer, queries[:, 0], cache, meter)
            for name, counts in vars(meter).items():
                getattr(self.meters[layer], name)[members] += counts
            if self._measure_recall:
                self.recall[layer, members] += recall(step, layer, queries[:, 0], cache, meter)
            return output[:, None]

        fed = torch.tensor(tokens, device=context.device)[:, None]
        hidden = batch.model.hidden(fed, context.lengths[:, None] - 1, attend_by_policy)
        return batch.model.log_probabilities(hidden[:, 0])

    def _make_step(self, context: Context, rows: Sequence[int]) -> DecodeStep:
        thresholds = thresholds_of(self._policy)
        of_family = Rows(
            context=context,
            lengths=context.lengths.tolist(),
            states=[self._states[row] for row in rows],
            scale=self._batch.scale,
            termination=Termination.of([thresholds] * len(rows), context.device),
            table_rows=torch.tensor(rows, device=context.device),
            statistics=self._statistics,
        )
        return FAMILIES[self._policy.decode.policy](of_family, self._batch.indexes)


def recall(step: DecodeStep, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
    """Return the share of exact attention that the tokens attended in a layer hold: p(I) in the Tactic paper, 4.1.

    Args:
        step: that has attended in the layer.
        layer: the layer's number.
        queries: [requests, query heads, head dim].
        cache: the layer's KV cache.
        meter: what was read in this layer alone.

    Returns:
        float64 [requests]; means over query heads.
    """
    attended_all = meter.attended == meter.context
    if bool(attended_all.all()):
        return torch.ones(len(queries), dtype=torch.float64, device=queries.device)
    unread = Meter(len(queries), queries.device)
    selected = step.select(layer, queries, cache, unread)
    of_selected = attend(queries, cache, selected, step.scale, unread, step.termination).log_sum_exp
    everything = DenseStep(step.context, step.scale, None).select(layer, queries, cache, unread)
    of_all = attend(queries, cache, everything, step.scale, unread).log_sum_exp
    # A layer in which a request attends to everything may have no selection.
    return (of_selected - of_all).double().exp().mean(-1).where(~attended_all, 1.0)


@dataclass(frozen=True)
class PromptScore:
    """One answer under one policy, beside the same answer under dense attention; means over its decode steps.

    Attributes:
        tokens: decode steps, 0 for an answer of a single token; the means are 0 then.
        kl: KL(dense ‖ policy) of the next token, in nats.
        agreement: share of steps in which policy and dense attention rank the same token first.
        forced_first: share of steps in which the policy ranks the answer's next token first.
    """

    tokens: int
    kl: float
    agreement: float
    forced_first: float


@dataclass(frozen=True)
class Forced:
    """A batch's answers under one policy.

    Attributes:
        scores: of each prompt.
        meters: of each layer.
        recall: of each layer, summed over prompts and steps; None if not measured.
    """

    scores: list[PromptScore]
    meters: list[Meter]
    recall: list[float] | None


def greedy_answers(batch: PrefilledBatch, most: int) -> list[list[int]]:
    """Return the answers of dense attention, with the token that ends them, of at most ``most`` tokens."""
    decoding = Decoding(batch, DENSE)
    ends = set(batch.model.end_tokens)
    answers = [[int(token)] for token in batch.first.argmax(-1)]
    while rows := [row for row, answer in enumerate(answers) if answer[-1] not in ends and len(answer) < most]:
        found = decoding.step(rows, [answers[row][-1] for row in rows])
        for row, token in zip(rows, found.argmax(-1).tolist(), strict=True):
            answers[row].append(token)
    return answers


class Forcing:
    """Answers of a batch, and what dense attention says of them.

    The first token of an answer follows the prefill, which is dense under every policy; it is fed, not scored.
    """

    def __init__(self, batch: PrefilledBatch, answers: Sequence[Sequence[int]]) -> None:
        self._batch = batch
        self._answers = answers
        self._reference: list[Tensor] = []
        self.dense = self._run(DENSE, measure_recall=True)

    def run(self, policy: AttentionPolicy, *, measure_recall: bool = False) -> Forced:
        """Decode the answers under a policy."""
        return self.dense if policy == DENSE else self._run(policy, measure_recall=measure_recall)

    def _run(self, policy: AttentionPolicy, *, measure_recall: bool) -> Forced:
        decoding = Decoding(self._batch, policy, measure_recall=measure_recall)
        steps = [max(0, len(answer) - 1) for answer in self._answers]
        # KL, agreement, forced token ranked first.
        sums = torch.zeros(3, len(steps), dtype=torch.float64, device=self._batch.model.device)
        for number in range(max(steps)):
            rows = [row for row, of_row in enumerate(steps) if number < of_row]
            found = decoding.step(rows, [self._answers[row][number] for row in rows])
            if len(self._reference) == number:
                self._reference.append(found)
            dense = self._reference[number]
            following = torch.tensor([self._answers[row][number + 1] for row in rows], device=found.device)
            first = found.argmax(-1)
            sums[0, rows] += (dense.exp() * (dense - found)).sum(-1, dtype=torch.float64)
            sums[1, rows] += (first == dense.argmax(-1)).double()
            sums[2, rows] += (first == following).double()
        means = (sums / torch.tensor(steps, device=sums.device).clamp_min(1)).T.tolist()
        scores = [PromptScore(count, *of_prompt) for count, of_prompt in zip(steps, means, strict=True)]
        return Forced(scores, decoding.meters, decoding.recall.sum(1).tolist() if measure_recall else None)
