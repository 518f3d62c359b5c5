"""Decode on the device: one step for all rows of a batch, whatever their policies."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from sglang_winnow.auditing import audited_rows, keep_time
from sglang_winnow.device.accounting import count_step
from sglang_winnow.device.compile_ahead import compiling_ahead
from sglang_winnow.device.lanes import Lanes, lanes_of
from sglang_winnow.device.parameters import parameters_of
from sglang_winnow.released_prompts import is_due, release
from sglang_winnow.request_policy import dense_until, drafts, effective_budget, reads_everything
from sglang_winnow.request_state import RequestState
from winnow_kernels.attend.gpu import AttendBuffers, attend
from winnow_kernels.batch import NOTHING_ANEW, WHOLE
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.audit import AuditedRow
from winnow_kernels.decode.explanation import ExplainedRow
from winnow_kernels.decode.gpu_audit import StepAudit
from winnow_kernels.decode.gpu_explanation import attended_slots, explain_layer
from winnow_kernels.decode.gpu_page_table import copy_page_table
from winnow_kernels.decode.gpu_rows import Parameter, ParameterTable
from winnow_kernels.decode.gpu_selector import MovingSelector, NoRoomError, Selector
from winnow_kernels.decode.gpu_step import Step, StepBuffers
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.host_tensors import to_device
from winnow_kernels.policies.declarations import DENSE_KIND, LAYOUT, declaration_of, in_order

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variant:
    """What a step launches: a CUDA graph of its own.

    Attributes:
        kinds: of policies whose selectors run; none at all where SGLang's own dense backend serves the batch.
        ordered: whether the order of selections matters: a row may stop early, or has a cap that cuts.
        own_layers: places of layers at which rows may attend by themselves, as DELTA's at Δ-layers.
        audited: whether the step of some row may be audited.
    """

    kinds: frozenset[str]
    ordered: bool = False
    own_layers: frozenset[int] = frozenset()
    audited: bool = False

    @property
    def is_dense(self) -> bool:
        return not self.kinds and not self.ordered

    def covers(self, needed: Variant) -> bool:
        """Return whether all that is ``needed`` is launched."""
        has_all = needed.kinds <= self.kinds and needed.own_layers <= self.own_layers
        return has_all and needed.ordered <= self.ordered and needed.audited <= self.audited


@dataclass(frozen=True, eq=False)
class _Selectors:
    """Those of a variant.

    Attributes:
        in_order: of their launches.
        side_by_side: those that select in every layer, in lists that may run side by side.
        report_shares: whether any has shares reported.
    """

    in_order: Sequence[Selector]
    side_by_side: Sequence[Sequence[Selector]]
    report_shares: bool

    @classmethod
    def of(cls, kinds: Collection[str], selectors: Mapping[str, Selector]) -> Self:
        """Return the selectors of ``kinds``."""
        own = {kind: selectors[kind] for kind in in_order(kinds)}
        side_by_side = [[own[kind] for kind in lane] for lane in lanes_of(own)]
        return cls(list(own.values()), side_by_side, any(selector.reports_shares for selector in own.values()))


class DeviceDecode:
    """The decode steps of a server.

    Before each step ``prepare`` runs on the host. ``begin``, ``attend`` for each layer and ``finish`` are captured.

    Attributes:
        variant: what the step launches.
        buffers: of steps.
        lanes: on which selectors run side by side.
        audited: the rows of the step that is prepared whose step is audited.
        observers: the selectors that observe passes which check drafts.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        scale: float,
        table: Tensor,
        buffers: StepBuffers,
        attend_buffers: AttendBuffers,
        selectors: Mapping[str, Selector],
        statistics: Statistics,
        audit: StepAudit | None = None,
    ) -> None:
        """
        Args:
            caches: the KV cache of every layer with full attention.
            scale: what scores are multiplied by before the softmax.
            table: int32 [request slots, positions]; the KV slot of each token of a request.
            buffers: of steps.
            attend_buffers: of attention.
            selectors: of the kinds of policies that are served.
            statistics: what requests cost.
            audit: of steps; None on a server that does not audit.
        """
        self._caches = caches
        self._scale = scale
        self._table = table
        self.buffers = buffers
        self._attend_buffers = attend_buffers
        self._selectors = selectors
        self.observers = [selector for selector in selectors.values() if selector.observes_checks]
        self.lanes = Lanes(len(selectors), table.device)
        self._statistics = statistics
        self._audit = audit
        self._parameters = ParameterTable(LAYOUT, len(table), table.device)
        self._owners: dict[int, weakref.ref[RequestState]] = {}
        self._resting: set[int] = set()
        self._without_room: set[int] = set()
        self._has_noted = False
        self.variant = Variant(frozenset())
        self.audited: list[AuditedRow] = []
        self._of_kinds: dict[frozenset[str], _Selectors] = {}
        self._step = buffers.largest

    def needed(self, states: Sequence[RequestState | None], lengths: Sequence[int]) -> Variant:
        """Return what a batch needs: the policies that act at the rows' lengths; call before ``prepare``, once a step.

        It also tells requests that begin to decode when they are audited.
        """
        kinds: set[str] = set()
        layers: set[int] = set()
        ordered = False
        for state, length in zip(states, lengths, strict=True):
            if state is None or not self._acts(state, length):
                continue
            declared = declaration_of(state.decode)
            stops = state.policy.early_termination is not None
            ordered |= stops or declared.order_matters(state.decode, length)
            kinds.add(declared.kind)
            layers.update(declared.own_layers(state.decode))
        if self._audit is not None:
            keep_time(states, lengths)
        audited = bool(self._audited_rows(states, lengths))
        return Variant(frozenset(kinds - {DENSE_KIND}), ordered, frozenset(layers), audited)

    def is_prepared(self, states: Sequence[RequestState], length_bounds: Sequence[int]) -> bool:
        """Return whether no request would ``enter`` anew at a context of up to so many tokens."""
        for state, length in zip(states, length_bounds, strict=True):
            kind = declaration_of(state.decode).kind
            if kind != DENSE_KIND and self._selectors[kind].stage(state, length) != state.stage:
                return False
        return True

    def prepare(
        self,
        variant: Variant,
        states: Sequence[RequestState | None],
        slots: Sequence[int],
        lengths: Sequence[int],
        request_slots: Tensor,
        lengths_on_device: Tensor,
    ) -> None:
        """Prepare a step, outside of its CUDA graph.

        Args:
            variant: what the step launches.
            states: of the rows that are requests; behind them come rows of padding.
            slots: their request slots.
            lengths: their lengths.
            request_slots: integers [rows]; of all rows, padding included.
            lengths_on_device: integers [rows].
        """
        self.variant = variant
        self._step = step = self.buffers[len(request_slots)]
        step.request_slots.copy_(request_slots)
        self._note_drafts(states, lengths)
        for state, slot, length in zip(states, slots, lengths, strict=True):
            self._own(state, slot)
            if state is not None and not variant.is_dense and self._acts(state, length):
                self._enter(state, slot, length)
        self.audited = []
        if (audit := self._own_audit) is not None:
            # Only now it is known who has no room, and runs dense.
            rows = self._audited_rows(states, lengths)
            self.audited = [row for row in rows if slots[row.row] not in self._without_room]
            audit.audit(self.audited, step)
        if variant.is_dense:
            step.batch.lengths.copy_(lengths_on_device)
        else:
            copy_page_table(self._table, step.request_slots, lengths_on_device, step.batch)

    def own(self, states: Sequence[RequestState]) -> None:
        """Write the parameters of requests, unless they are there; call outside of a step's CUDA graph."""
        for state in states:
            self._own(state, state.slot)

    def begin(self) -> None:
        """Do what is done once a step."""
        step, variant = self._step, self.variant
        self.gather_parameters(step)
        if variant.is_dense:
            return
        step.counts.fill_(WHOLE)
        own = self._own_selectors
        if own.report_shares:
            # Of who attends to everything in a layer nothing is believed, and a share of 1 is reported.
            step.reported.clear()
        # First what writes the counts of one layer, and copies them to the others.
        for selector in own.in_order:
            selector.begin(step, ordered=variant.ordered)
        if (audit := self._own_audit) is not None:
            audit.begin(step)

    def gather_parameters(self, step: Step) -> None:
        """Write the parameters of a step's rows."""
        self._parameters.gather(step.request_slots, step.batch, step.parameters)

    def attend(self, layer: int, queries: Tensor, output: Tensor) -> None:
        """Attend in the layer at a place; ``queries`` and ``output`` are [rows, query heads, head dim]."""
        step, variant, cache = self._step, self.variant, self._caches[layer]
        own = self._own_selectors

        def select(selectors: Sequence[Selector]) -> None:
            for selector in selectors:
                selector.select(layer, queries, cache, step)

        self.lanes.run([partial(select, selectors) for selectors in own.side_by_side])
        thresholds = step.parameters.thresholds if variant.ordered else None
        audit = self._own_audit
        attend(
            queries,
            cache,
            step.batch,
            step.selection(layer),
            self._scale,
            thresholds,
            self._attend_buffers if audit is None else audit.attend_buffers,
            output,
            step.reported if own.report_shares else None,
        )
        if layer in variant.own_layers:
            for selector in own.in_order:
                selector.attend_at(layer, queries, cache, step, output)
        if audit is not None:
            audit.compare(layer, queries, output, cache, step, self._scale, ordered=variant.ordered)

    def explain(self, layer: int, number: int, queries: Tensor, explained: ExplainedRow, slot: int) -> None:
        """Explain a row in the layer at a place that has just attended, which waits for the device.

        Args:
            layer: its place.
            number: that the model knows it by.
            queries: [rows, query heads, head dim].
            explained: the row.
            slot: its request slot.
        """
        step, cache, row = self._step, self._caches[layer], explained.row
        slots = self._table[slot, : int(step.batch.lengths[row])].long()
        attended: dict[int, Tensor] | None = None
        if not self.variant.is_dense:
            partial, ordered = self._attend_buffers.partial, self.variant.ordered
            attended = {
                head: attended_slots(row, head, slots, step, layer, partial, ordered=ordered)
                for head in explained.heads
            }
        explained.found[number] = explain_layer(explained, slots, attended, queries, cache, self._scale)

    def runs_dense(self, state: RequestState, slot: int, length: int) -> bool:
        """Return whether a request reads everything in the step that is prepared."""
        return slot in self._without_room or reads_everything(state, length, self._step.batch.page_size)

    def finish(self) -> None:
        """Add what was read to the statistics, after the last layer."""
        step = self._step
        count_step(step, self._parameters, self._statistics, self._caches[0] if self.variant.is_dense else None)
        for selector in self._own_selectors.in_order:
            selector.finish(step, self._statistics)
        if (audit := self._own_audit) is not None:
            audit.count(step, self._statistics)

    def compile(self, variants: Collection[Variant], rows: int, query_heads: int, dtype: torch.dtype) -> None:
        """Compile what steps of ``rows`` rows launch, of which no one is under way; ``dtype`` is that of queries."""
        step = self.buffers[rows]
        cache = self._caches[0]
        queries = torch.empty(rows, query_heads, cache.head_dim, dtype=dtype, device=cache.keys.device)
        with compiling_ahead():
            for variant in variants:
                self.prepare(variant, (), (), (), step.request_slots, step.batch.lengths)
                self.begin()
                # Layers differ only in whether rows may attend by themselves.
                for layer in {0, *sorted(variant.own_layers)[:1]} if not variant.is_dense else ():
                    self.attend(layer, queries, torch.empty_like(queries))
                self.finish()

    @property
    def _own_selectors(self) -> _Selectors:
        """The selectors of the variant, which are looked up when its kinds first come."""
        kinds = self.variant.kinds
        if kinds not in self._of_kinds:
            self._of_kinds[kinds] = _Selectors.of(kinds, self._selectors)
        return self._of_kinds[kinds]

    @property
    def _own_audit(self) -> StepAudit | None:
        """The audit, where the variant has one."""
        return self._audit if self.variant.audited else None

    def _audited_rows(self, states: Sequence[RequestState | None], lengths: Sequence[int]) -> list[AuditedRow]:
        return [] if self._audit is None else audited_rows(states, lengths, self._step.batch.page_size)

    def _acts(self, state: RequestState, length: int) -> bool:
        return not state.rests and length > dense_until(state, self._step.batch.page_size)

    def _note_drafts(self, states: Sequence[RequestState | None], lengths: Sequence[int]) -> None:
        """Note whose tokens are drafts, which count as no steps, and which keys a check has written anew."""
        step, page_size = self._step, self._step.batch.page_size
        rows = list(zip(states, lengths, strict=True))
        drafting = [state is not None and drafts(state, length, page_size) for state, length in rows]
        anew_from = [self._anew_from(state, length) for state, length in rows]
        noted = any(drafting) or any(first != NOTHING_ANEW for first in anew_from)
        if noted or self._has_noted:
            self._has_noted = noted
            # Of all rows: a step of fewer shares the first ones with larger steps.
            every, device = self.buffers.largest, step.drafting.device
            every.drafting.zero_()
            every.batch.anew_from.fill_(NOTHING_ANEW)
            step.drafting[: len(rows)] = to_device(torch.tensor(drafting, dtype=torch.int32), device)
            step.batch.anew_from[: len(rows)] = to_device(torch.tensor(anew_from, dtype=torch.int32), device)

    def _anew_from(self, state: RequestState | None, length: int) -> int:
        """Return from where on the step builds anew what the request's selector has of pages; once."""
        if state is None or state.anew_from is None or self.variant.is_dense or not self._acts(state, length):
            return NOTHING_ANEW
        first, state.anew_from = state.anew_from, None
        return first

    def _own(self, state: RequestState | None, slot: int) -> None:
        """Write the parameters of the request in ``slot``, unless they are there."""
        owner = self._owners.get(slot)
        if (owner and owner()) is not state or (owner is None) != (state is None):
            self._resting.discard(slot)
            self._without_room.discard(slot)
            if state is None:
                del self._owners[slot]
                self._parameters.write(slot, {})
                return
            self._owners[slot] = weakref.ref(state)
            state.stage = -1
            page_size = self._step.batch.page_size
            budget = effective_budget(state, state.prompt_length, page_size) or 0
            self._statistics.set_one(slot, Field.BUDGET, float(budget))
        elif state is None or state.rests == (slot in self._resting):
            return
        if slot in self._resting and not state.rests:
            # Dense steps have built nothing.
            state.stage = -1
        (self._resting.add if state.rests else self._resting.discard)(slot)
        self._write(state, slot)

    def _write(self, state: RequestState, slot: int) -> None:
        parameters = parameters_of(state, self._step.batch.page_size)
        is_dense = slot in self._resting or slot in self._without_room
        self._parameters.write(slot, parameters | (_NEVER_SPARSE if is_dense else {}))

    def _enter(self, state: RequestState, slot: int, length: int) -> None:
        """Prepare a request for its first sparse step in ``slot``, or for another stage."""
        kind = declaration_of(state.decode).kind
        if kind == DENSE_KIND:
            return
        selector = self._selectors[kind]
        stage = selector.stage(state, length)
        if stage == state.stage:
            return
        state.stage = stage
        own = self._table[slot, :length].long()[None]
        # Filled on the device: what is copied there waits for the passes before.
        context = Context(own, torch.full((1,), length, device=own.device))
        try:
            entry = selector.enter(state, slot, context)
        except NoRoomError as error:
            logger.warning("A request runs dense: %s.", error)
            self._without_room.add(slot)
            self._write(state, slot)
            return
        # One that came to run dense for want of room is in a slot that stays dense.
        if isinstance(selector, MovingSelector) and slot not in self._without_room and is_due(state, self._caches):
            page_size, move = self._step.batch.page_size, partial(selector.move, state, slot)
            release(state, self._table[slot], selector.room(state), page_size, move)
        index = torch.full((1,), slot, device=own.device)
        self._statistics.add(index, Field.INDEX_BUILT_TOKENS, float(entry.built_tokens))
        self._statistics.add(index, Field.DECODE_READ_BYTES, entry.read_bytes)


_NEVER_SPARSE = {Parameter.SPARSE_FROM: sys.maxsize}
