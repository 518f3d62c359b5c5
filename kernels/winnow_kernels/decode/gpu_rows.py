"""The parameters of a batch's rows, out of a table with a row for each request slot: one launch at the start of a step.

A request's parameters are written once, into the table. What its rows get in a step depends on its length then: while
its context is short it runs dense, and all its parameters are 0, which is what selectors leave a row alone for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.host_tensors import to_device
from winnow_kernels.policies.delta.gpu import DeltaRows
from winnow_kernels.policies.quest.gpu import QuestRows
from winnow_kernels.policies.quoka.gpu import QuokaRows
from winnow_kernels.policies.snapkv.gpu import StoredRows
from winnow_kernels.policies.streaming_llm.gpu import StreamingLLMRows


class Family(IntEnum):
    """Decode policies that one selector serves."""

    DENSE = 0
    STREAMING_LLM = 1
    QUEST = 2
    STORED = 3
    DELTA = 4
    TACTIC = 5
    QUOKA = 6


class Parameter(IntEnum):
    """A column of the table. Those before ``SPARSE_FROM`` become rows' parameters."""

    FAMILY = 0
    BY_SCORE = 1  # 1 where the order of a selection matters
    SINKS = 2  # first tokens, always attended to
    WINDOW = 3  # StreamingLLM
    QUEST_PAGES = 4
    QUEST_FULL_LAYERS = 5
    PROMPT_LENGTH = 6  # SnapKV and PyramidKV
    DELTA_PAGES = 7
    DELTA_RECENT = 8
    TACTIC_CAP = 9
    TACTIC_FULL_LAYERS = 10
    QUOKA_BUDGET = 11
    SPARSE_FROM = 12  # tokens; up to and with so many the request runs dense
    QUOKA_RATIO = 13  # bits of a float64; where there is no budget, of the tokens before the newest, beside which it is
    TACTIC_P = 14  # bits of a float64
    SCALE = 15  # of early termination; bits of a float32, as the next two
    DIRECTION = 16
    PATIENCE = 17


OF_ROWS: Final = int(Parameter.SPARSE_FROM)
_FAMILIES: Final = {
    Parameter.WINDOW: Family.STREAMING_LLM,
    Parameter.QUEST_PAGES: Family.QUEST,
    Parameter.QUEST_FULL_LAYERS: Family.QUEST,
    Parameter.PROMPT_LENGTH: Family.STORED,
    Parameter.DELTA_PAGES: Family.DELTA,
    Parameter.DELTA_RECENT: Family.DELTA,
    Parameter.TACTIC_CAP: Family.TACTIC,
    Parameter.TACTIC_FULL_LAYERS: Family.TACTIC,
    Parameter.QUOKA_BUDGET: Family.QUOKA,
}


def float_bits(value: float) -> int:
    """Return the bits of ``value`` as a float32, as the table holds it."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def double_bits(value: float) -> int:
    """Return the bits of ``value`` as a float64."""
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))


class ParameterTable:
    """The parameters of all requests, by request slot. A slot never written, as that of padding rows, is dense.

    Attributes:
        values: int64 [slots, parameters].
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.values = torch.zeros(slots, len(Parameter), dtype=torch.int64, device=device)
        self.values[:, Parameter.PATIENCE] = float_bits(torch.inf)
        self._families = torch.tensor(
            [_FAMILIES.get(Parameter(column), -1) for column in range(OF_ROWS)], dtype=torch.int32, device=device
        )

    def write(self, slot: int, parameters: dict[Parameter, int]) -> None:
        """Write a request's parameters; those that are not named are 0, and patience infinite."""
        row = torch.zeros(len(Parameter), dtype=torch.int64)
        row[Parameter.PATIENCE] = float_bits(torch.inf)
        for parameter, value in parameters.items():
            row[parameter] = value
        self.values[slot] = to_device(row, self.values.device)

    def gather(self, request_slots: Tensor, batch: DecodeBatch, rows: RowParameters) -> None:
        """Write the parameters of a step's rows.

        Args:
            request_slots: int64 [rows].
            batch: with the rows' lengths.
            rows: what is written to.
        """
        _gather_kernel[(batch.rows,)](
            self.values,
            self._families,
            request_slots,
            batch.lengths,
            rows.values,
            rows.shares,
            rows.thresholds,
            batch.rows,
            self.values.stride(0),
            columns=OF_ROWS,
            column_block=triton.next_power_of_2(OF_ROWS),
            num_warps=1,
        )


@dataclass(frozen=True, eq=False)
class RowParameters:
    """The parameters of a batch's rows in one step.

    Attributes:
        values: int32 [parameters, rows].
        shares: float64 [rows]; Tactic's p, 0 in rows of other families.
        thresholds: float32 [rows, 3]; of early termination, as ``attend`` takes them.
    """

    values: Tensor
    shares: Tensor
    thresholds: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> RowParameters:
        """Return the parameters of ``rows`` dense rows."""
        thresholds = torch.zeros(rows, 3, dtype=torch.float32, device=device)
        thresholds[:, 2] = torch.inf
        return cls(
            torch.zeros(OF_ROWS, rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.float64, device=device),
            thresholds,
        )

    def __getitem__(self, parameter: Parameter) -> Tensor:
        """Return a parameter of all rows: int32 [rows]."""
        return self.values[parameter]

    @property
    def streaming_llm(self) -> StreamingLLMRows:
        return StreamingLLMRows(self[Parameter.SINKS], self[Parameter.WINDOW])

    @property
    def quest(self) -> QuestRows:
        return QuestRows(
            self[Parameter.QUEST_PAGES],
            self[Parameter.SINKS],
            self[Parameter.QUEST_FULL_LAYERS],
            self[Parameter.BY_SCORE],
        )

    @property
    def quoka(self) -> QuokaRows:
        return QuokaRows(self[Parameter.QUOKA_BUDGET], self[Parameter.SINKS], self[Parameter.BY_SCORE])

    def delta(self, roles: Tensor) -> DeltaRows:
        """Return DELTA's parameters with ``roles``, int8 [layers, rows]."""
        return DeltaRows(
            roles,
            self[Parameter.DELTA_PAGES],
            self[Parameter.DELTA_RECENT],
            self[Parameter.SINKS],
            self[Parameter.BY_SCORE],
        )

    def stored(self, positions: Tensor, offsets: Tensor, kept: Tensor) -> StoredRows:
        """Return SnapKV's parameters with ``positions``, ``offsets`` and ``kept`` as in ``StoredRows``."""
        return StoredRows(positions, offsets, kept, self[Parameter.PROMPT_LENGTH])


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(
    table_ptr: tl.tensor,
    families_ptr: tl.tensor,
    request_slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    values_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    rows: tl.tensor,
    table_stride: tl.tensor,
    columns: tl.constexpr,
    column_block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    own_ptr = table_ptr + tl.load(request_slots_ptr + row) * table_stride
    length = tl.load(lengths_ptr + row).to(tl.int64)
    is_sparse = length > tl.load(own_ptr + _SPARSE_FROM)
    family = tl.load(own_ptr + _FAMILY)
    column = tl.arange(0, column_block)
    is_column = column < columns
    owner = tl.load(families_ptr + column, mask=is_column, other=-1)
    value = tl.load(own_ptr + column, mask=is_column, other=0)
    bits = tl.load(own_ptr + _QUOKA_RATIO)
    budget = tl.ceil(bits.to(tl.float64, bitcast=True) * (length - 1).to(tl.float64)).to(tl.int64) + 1
    budget = tl.maximum(budget, tl.load(own_ptr + _SINKS) + 1)
    value = tl.where((column == _QUOKA_BUDGET) & (bits != 0), budget, value)
    applies = is_sparse & ((owner < 0) | (owner == family))
    tl.store(values_ptr + column * rows + row, tl.where(applies, value, 0).to(tl.int32), mask=is_column)
    share = tl.load(own_ptr + _TACTIC_P).to(tl.float64, bitcast=True)
    tl.store(shares_ptr + row, tl.where(is_sparse & (family == _TACTIC), share, 0.0))
    which = tl.arange(0, 4)
    threshold = tl.load(own_ptr + _SCALE + which, mask=which < 3, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    never = tl.where(which == 2, float("inf"), 0.0)
    tl.store(thresholds_ptr + row * 3 + which, tl.where(is_sparse, threshold, never), mask=which < 3)


_SPARSE_FROM = tl.constexpr(int(Parameter.SPARSE_FROM))
_FAMILY = tl.constexpr(int(Parameter.FAMILY))
_SINKS = tl.constexpr(int(Parameter.SINKS))
_QUOKA_RATIO = tl.constexpr(int(Parameter.QUOKA_RATIO))
_QUOKA_BUDGET = tl.constexpr(int(Parameter.QUOKA_BUDGET))
_TACTIC_P = tl.constexpr(int(Parameter.TACTIC_P))
_TACTIC = tl.constexpr(int(Family.TACTIC))
_SCALE = tl.constexpr(int(Parameter.SCALE))
