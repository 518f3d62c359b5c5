"""One decode pass: which rows go together, and how each group attends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sglang_winnow.auditing import audited_rows, keep_time
from sglang_winnow.explaining import explained_rows, note_dense_steps
from sglang_winnow.request_policy import drafts, effective_budget, reads_everything
from sglang_winnow.request_state import RequestState
from winnow_kernels.attend.dense import attend_all
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.audit import Audit, AuditedMeter, AuditedRow
from winnow_kernels.decode.explanation import ExplainedMeter, StepExplanation
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.declarations import declaration_of
from winnow_kernels.policies.dense.reference import DenseStep

# Rows that attend to everything, whatever their policy, and do not stop early.
_DENSE: Final = "dense step"


@dataclass(frozen=True)
class _Group:
    """Requests that share a policy.

    Attributes:
        rows: int64 [n], their rows in the batch; None if that is all of them.
        table_rows: int64 [n], their rows in the statistics.
        drafts: bool [n], whose tokens are drafts.
        audit: of those of its rows whose step is audited; None if there are none.
        explanation: likewise of those whose step is explained.
        compared: of the audited ones the rows in the batch whose next token is to be compared with dense attention's.
    """

    rows: Tensor | None
    table_rows: Tensor
    step: DecodeStep
    meter: Meter
    drafts: Tensor
    audit: Audit | None
    explanation: StepExplanation | None
    compared: Sequence[int]

    def attend(self, layer: int, queries: Tensor, cache: LayerCache) -> Tensor:
        """Attend in a layer, and audit and explain it."""
        self.meter.count_context(self.step.context, cache)
        output = self.step.attend(layer, queries, cache, self.meter)
        if self.audit is not None:
            self.audit.add(queries, output, cache, self.step.scale)
        if self.explanation is not None:
            self.explanation.add(layer, queries, cache, self.step.scale)
        return output

    def forget_contexts_of_drafts(self) -> None:
        """Leave them to the check, which knows how many of the drafts dense decoding would have come to."""
        self.meter.context.masked_fill_(self.drafts, 0)
        self.meter.context_bytes.masked_fill_(self.drafts, 0)


class DecodePlan:
    """The groups of a batch's requests. Call ``attend`` for each layer, then ``finish``.

    Attributes:
        compared: the rows whose next token is to be compared with dense attention's after the pass.
    """

    def __init__(
        self,
        context: Context,
        lengths: Sequence[int],
        table_rows: Tensor,
        states: Sequence[RequestState | None],
        scale: float,
        indexes: Indexes,
        statistics: Statistics,
    ) -> None:
        self._context = context
        self._statistics = statistics
        self._layers = 0
        drafting = torch.tensor(
            [
                state is not None and drafts(state, length, indexes.page_size)
                for state, length in zip(states, lengths, strict=True)
            ],
            device=context.device,
        )
        keep_time(states, lengths)
        members: defaultdict[str, list[int]] = defaultdict(list)
        for i, (state, length) in enumerate(zip(states, lengths, strict=True)):
            if state is None or reads_everything(state, length, indexes.page_size):
                members[_DENSE].append(i)
            else:
                members[state.policy.decode.policy].append(i)
        self._groups = [
            _group(name, rows, context, lengths, table_rows, states, drafting, scale, indexes, statistics)
            for name, rows in members.items()
        ]
        self.compared = sorted(row for group in self._groups for row in group.compared)
        _note_step(states, lengths, table_rows, members[_DENSE], drafting, indexes, statistics)

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        """Return the attention output of a layer: [requests, query heads, head dim], as ``queries``.

        Args:
            layer: its number.
            queries: one row for each request.
            cache: the layer's KV cache, with the new tokens in it.
            scale: what scores are multiplied by before the softmax.
            window: the layer's sliding window in tokens; such a layer is dense for every request and not counted.
        """
        if window is not None:
            unread = Meter(self._context.requests, queries.device)
            return attend_all(queries, self._context, cache, scale, unread, window)
        self._layers += 1
        output = torch.empty_like(queries)
        for group in self._groups:
            if group.rows is None:
                return group.attend(layer, queries, cache)
            output[group.rows] = group.attend(layer, queries[group.rows], cache)
        return output

    def finish(self) -> None:
        """Add what was read to the statistics; call after the last layer."""
        for group in self._groups:
            group.forget_contexts_of_drafts()
            self._statistics.add_decode(group.table_rows, group.meter)
            group.step.count(self._statistics, group.table_rows, self._layers)
            if group.audit is not None:
                group.audit.count(self._statistics, group.table_rows)


def _group(
    name: str,
    rows: list[int],
    context: Context,
    lengths: Sequence[int],
    table_rows: Tensor,
    states: Sequence[RequestState | None],
    drafting: Tensor,
    scale: float,
    indexes: Indexes,
    statistics: Statistics,
) -> _Group:
    everything = len(rows) == context.requests
    own = context if everything else context.rows(rows)
    index = torch.tensor(rows, device=context.device)
    own_table_rows = table_rows[index]
    own_lengths = [lengths[i] for i in rows]
    explained = explained_rows([states[i] for i in rows], own_lengths)
    audited: list[AuditedRow] = []
    compared: list[int] = []
    if name == _DENSE:
        step: DecodeStep = DenseStep(own, scale, None)
        note_dense_steps([states[i] for i in rows], own_lengths)
    else:
        own_states = [state for i in rows if (state := states[i]) is not None]
        audited = audited_rows(own_states, own_lengths, indexes.page_size)
        compared = [rows[of_group.row] for of_group in audited if own_states[of_group.row].policy.audits_next_token]
        termination = Termination.of([state.policy.early_termination for state in own_states], context.device)
        batch = PolicyBatch(own, own_lengths, own_states, scale, termination, indexes, own_table_rows, statistics)
        step = declaration_of(own_states[0].decode).step(batch)
    meter = Meter(len(rows), context.device)
    audit = explanation = None
    if explained:
        meter = ExplainedMeter(len(rows), context.device)
        explanation = StepExplanation(explained, own, meter)
    elif audited:
        meter = AuditedMeter(len(rows), context.device)
    if audited and isinstance(meter, AuditedMeter):
        audit = Audit(audited, own, meter)
    in_batch = None if everything else index
    return _Group(in_batch, own_table_rows, step, meter, drafting[index], audit, explanation, compared)


def _note_step(
    states: Sequence[RequestState | None],
    lengths: Sequence[int],
    table_rows: Tensor,
    dense: Sequence[int],
    drafting: Tensor,
    indexes: Indexes,
    statistics: Statistics,
) -> None:
    budgets = [
        float((state and effective_budget(state, length, indexes.page_size)) or 0)
        for state, length in zip(states, lengths, strict=True)
    ]
    device = table_rows.device
    statistics.add(table_rows, Field.STEPS, (~drafting).double())
    statistics.add(table_rows, Field.DRAFTED, drafting.double())
    statistics.set(table_rows, Field.CONTEXT, torch.tensor(lengths, dtype=torch.float64, device=device))
    statistics.set(table_rows, Field.BUDGET, torch.tensor(budgets, dtype=torch.float64, device=device))
    if sparse := [i for i in dense if (state := states[i]) is not None and state.policy.decode.policy != "dense"]:
        statistics.add(table_rows[torch.tensor(sparse, device=device)], Field.DENSE_STEPS, 1.0)
