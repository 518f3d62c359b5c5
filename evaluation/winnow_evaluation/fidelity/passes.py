"""How the tokens of one pass attend: by a policy's steps, or by exact attention as an oracle reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from sglang_winnow.request_policy import effective_budget
from sglang_winnow.request_state import RequestState
from winnow_evaluation.fidelity.exact import Following, Scores
from winnow_evaluation.fidelity.oracles import Oracle
from winnow_evaluation.fidelity.prefilled import PAGE_SIZE
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.audit import AuditedMeter
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.declarations import declaration_of

_COPIES_OF_CONTEXT: Final = 3
"""Copies of a context's keys, in float32, that a step may hold: an index, or keys and values of a full layer."""
_COPIES_OF_SELECTION: Final = 8
"""The same of what it selects: keys and values, as cached and in float32, and their places."""


class Pass(ABC):
    """One pass of the model over what follows the prompts. Its tokens are rows, prompt by prompt.

    Attributes:
        following: the tokens.
        true_share: float32 [layers, rows, query heads]; the exact attention mass of what was read.
        reported_share: the same for each layer so far, [rows], as the policy reports it, a mean over query heads.
    """

    def __init__(self, following: Following) -> None:
        self.following = following
        model = following.batch.model
        self.rows = len(following.prompts) * following.tokens
        self.true_share = torch.ones(model.layers, self.rows, model.query_heads, device=model.device)
        self.reported_share: list[Tensor] = []

    @abstractmethod
    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attend from ``queries``, [prompts, tokens, query heads, head dim]; return outputs like them."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, Tensor]:
        """What was read so far, by the names of ``Meter``: int64 [rows] each."""


class PolicyPass(Pass):
    """Attend by a policy's decode steps, those that a CPU server takes."""

    def __init__(
        self,
        following: Following,
        policy: AttentionPolicy,
        states: Sequence[RequestState],
        *,
        notes_shares: bool = True,
    ) -> None:
        """
        Args:
            following: the tokens.
            policy: as the model runs it (``check_against_model``); its prefill is not looked at.
            states: of the requests, one for each of the batch's prompts.
            notes_shares: whether ``true_share`` is computed, which takes as long as dense attention.
        """
        super().__init__(following)
        self._notes_shares = notes_shares
        statistics = Statistics(self.rows, following.batch.model.device)
        self._groups = [self._group(rows, policy, states, statistics) for rows in self._row_ranges(states[0])]

    @property
    def counts(self) -> dict[str, Tensor]:
        names = [name for name, counts in vars(self._groups[0].meter).items() if name not in _KEPT_BESIDE]
        return {name: torch.cat([getattr(group.meter, name) for group in self._groups]) for name in names}

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        flat = queries.flatten(0, 1)
        output = torch.empty_like(flat)
        cache = self.following.batch.caches[layer]
        for group in self._groups:
            output[group.rows] = group.attend(layer, flat[group.rows], cache)
        if all(group.reported is not None for group in self._groups):
            self.reported_share.append(
                torch.cat([group.reported for group in self._groups if group.reported is not None])
            )
        if any(group.mass is not None for group in self._groups):
            self._note_shares(layer, queries)
        return output.view_as(queries)

    def _note_shares(self, layer: int, queries: Tensor) -> None:
        of_all = torch.cat(
            [Scores.of(self.following, layer, queries, part).log_sum_exp() for part in self.following.parts()]
        ).flatten(0, 1)
        for group in self._groups:
            if (mass := group.mass) is not None:
                self.true_share[layer, group.rows] = (mass - of_all[group.rows]).exp().clamp_max(1)

    def _row_ranges(self, state: RequestState) -> list[slice]:
        """Return which rows' steps are computed together: as many at a time as the memory allows."""
        model = self.following.batch.model
        longest = int(self.following.lengths.max())
        selected = min(longest, effective_budget(state, longest, PAGE_SIZE) or longest)
        copied = _COPIES_OF_CONTEXT * longest + _COPIES_OF_SELECTION * selected
        of_row = copied * model.kv_heads * model.head_dim * torch.float32.itemsize
        at_once = max(1, self.following.memory // of_row)
        return [slice(begin, min(begin + at_once, self.rows)) for begin in range(0, self.rows, at_once)]

    def _group(
        self, rows: slice, policy: AttentionPolicy, states: Sequence[RequestState], statistics: Statistics
    ) -> _Group:
        following, device = self.following, self.following.batch.model.device
        numbers = torch.arange(rows.start, rows.stop, device=device)
        prompts = numbers // following.tokens + following.prompts.start
        lengths = following.lengths.flatten()[numbers]
        own_states = [states[prompt] for prompt in prompts.tolist()]
        of_policy = PolicyBatch(
            context=following.batch.context(prompts, lengths),
            lengths=lengths.tolist(),
            requests=own_states,
            scale=following.batch.scale,
            termination=Termination.of([policy.early_termination] * len(own_states), device),
            indexes=following.batch.indexes,
            table_rows=numbers,
            statistics=statistics,
        )
        step = declaration_of(policy.decode).step(of_policy)
        meter = AuditedMeter if self._notes_shares else Meter
        return _Group(rows, step, meter(len(own_states), device))


class ExactPass(Pass):
    """Attend to what an oracle reads, or to everything."""

    def __init__(self, following: Following, oracle: Oracle | None = None) -> None:
        super().__init__(following)
        self._oracle = oracle
        self.meter = Meter(self.rows, following.batch.model.device)

    @property
    def counts(self) -> dict[str, Tensor]:
        return vars(self.meter)

    def parts(self) -> Iterator[slice]:
        """Yield which prompts are computed at a time."""
        return self.following.parts()

    def read(self, layer: int, queries: Tensor, part: slice, scores: Scores) -> Tensor | None:
        """Return what the prompts of a part read; None for everything.

        Args:
            layer: the layer's number.
            queries: as for ``attend``.
            part: which of the prompts.
            scores: theirs.

        Returns:
            bool [prompts, KV heads, tokens, context], or None.
        """
        return None if self._oracle is None else self._oracle.read(scores)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        cache = self.following.batch.caches[layer]
        output = torch.empty_like(queries)
        attended, true_share = [], []
        for part in self.parts():
            scores = Scores.of(self.following, layer, queries, part)
            read = self.read(layer, queries, part, scores)
            output[part] = scores.attend(read).to(queries.dtype)
            visible = scores.visible.expand(-1, cache.kv_heads, -1, -1) if read is None else read
            attended.append(visible.sum((1, 3)))
            if read is not None:
                held = (scores.weights() * read[:, :, :, None]).sum(-1)
                true_share.append(held.transpose(1, 2).flatten(2))
        self.meter.count_attended(torch.cat(attended).flatten(), cache)
        self.count_context(cache)
        if true_share:
            self.true_share[layer] = torch.cat(true_share).flatten(0, 1).clamp_max(1)
        return output

    def count_context(self, cache: LayerCache) -> None:
        """Count a layer's whole contexts."""
        tokens = self.following.lengths.flatten() * cache.kv_heads
        self.meter.context += tokens
        self.meter.context_bytes += tokens * (2 * cache.vector_bytes)


_KEPT_BESIDE: Final = ("mass",)


@runtime_checkable
class _ReportsShare(Protocol):
    """A step that reports the share of attention that it has attended: float64 [requests], summed over its layers."""

    @property
    def estimated_share(self) -> Tensor: ...


@dataclass
class _Group:
    """Rows of a pass whose steps are computed together.

    Attributes:
        rows: which.
        reported: float64 [rows]; the share that the step reported of the last layer; None if it reports none.
    """

    rows: slice
    step: DecodeStep
    meter: Meter
    reported: Tensor | None = None

    @property
    def mass(self) -> Tensor | None:
        """What the tokens that the last layer attended to weigh, as an ``AuditedMeter`` has it."""
        return self.meter.mass if isinstance(self.meter, AuditedMeter) else None

    def attend(self, layer: int, queries: Tensor, cache: LayerCache) -> Tensor:
        step = self.step
        before = step.estimated_share.clone() if isinstance(step, _ReportsShare) else None
        if isinstance(self.meter, AuditedMeter):
            self.meter.mass = None
        self.meter.count_context(step.context, cache)
        output = step.attend(layer, queries, cache, self.meter)
        self.reported = None
        if isinstance(step, _ReportsShare) and before is not None:
            self.reported = step.estimated_share - before
        return output
