"""The parameters of a batch's rows, out of a table with a row for each request slot: one launch at the start of a step.

A request's parameters are written once, into the table. What its rows get in a step depends on its length then: while
its context is short it runs dense, and all its parameters are 0, which is what selectors leave a row alone for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.host_tensors import to_device
from winnow_kernels.kernel_arguments import Number, Pointer


class Parameter(IntEnum):
    """A column of every policy; policies' own come behind. Those before ``SPARSE_FROM`` become rows' parameters."""

    KIND = 0  # number of the kind of policy; 0 is dense
    BY_SCORE = 1  # 1 where the order of a selection matters
    SINKS = 2  # first tokens, always attended to
    SPARSE_FROM = 3  # tokens; up to and with so many the request runs dense
    RATIO = 4  # bits of a float64; where it is not 0, of the tokens before the newest, beside which it is
    SHARE = 5  # bits of a float64
    SCALE = 6  # of early termination; bits of a float32, as the next two
    DIRECTION = 7
    PATIENCE = 8


_COMMON: Final = int(Parameter.SPARSE_FROM)
_OWN: Final = len(Parameter)


@dataclass(frozen=True)
class Columns:
    """The columns of one kind of policy; in rows of other kinds they are 0.

    Attributes:
        names: of int32 numbers.
        of_ratio: that of a budget which may be a ratio of the context; None for no such budget.
    """

    names: tuple[str, ...] = ()
    of_ratio: str | None = None


@dataclass(frozen=True)
class OwnParameters:
    """What a request has in the columns of its kind.

    Attributes:
        numbers: by the columns' names; 0 where it is not named.
        ratio: of the context, in place of the number in ``Columns.of_ratio``; 0 for none.
        share: of the attention mass, float64; 0 for none.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    ratio: float = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class Layout:
    """Where each kind of policy has its columns.

    Attributes:
        kinds: the kinds' columns; the kind at place i has the number i, and dense is the first.
    """

    kinds: Mapping[str, Columns]

    @property
    def of_rows(self) -> int:
        """How many numbers a row has."""
        return _COMMON + sum(len(columns.names) for columns in self.kinds.values())

    @property
    def in_table(self) -> int:
        """How many columns the table has."""
        return self.of_rows + _OWN - _COMMON

    def number(self, kind: str) -> int:
        """Return the number of a kind."""
        return list(self.kinds).index(kind)

    def place(self, kind: str, name: str) -> int:
        """Return where a row has the number of the column ``name`` of ``kind``."""
        before = list(self.kinds)[: self.number(kind)]
        return _COMMON + sum(len(self.kinds[each].names) for each in before) + self.kinds[kind].names.index(name)

    def columns_of(self, kind: str, own: OwnParameters) -> dict[int, int]:
        """Return what the table has of a request of ``kind``, by column."""
        columns = {_OWN - _COMMON + self.place(kind, name): value for name, value in own.numbers.items()}
        return columns | {
            Parameter.KIND: self.number(kind),
            Parameter.RATIO: double_bits(own.ratio),
            Parameter.SHARE: double_bits(own.share),
        }

    def rules(self, device: torch.device) -> Tensor:
        """Return for each number of a row whose it is, -1 for everyone's, and whether a ratio may take its place.

        Returns:
            int32 [2, ``of_rows``].
        """
        owners, by_ratio = [-1] * _COMMON, [0] * _COMMON
        for number, columns in enumerate(self.kinds.values()):
            owners += [number] * len(columns.names)
            by_ratio += [int(name == columns.of_ratio) for name in columns.names]
        return torch.tensor([owners, by_ratio], dtype=torch.int32, device=device)


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

    def __init__(self, layout: Layout, slots: int, device: torch.device) -> None:
        self.values = torch.zeros(slots, layout.in_table, dtype=torch.int64, device=device)
        self.values[:, Parameter.PATIENCE] = float_bits(torch.inf)
        self._rules = layout.rules(device)

    def write(self, slot: int, parameters: Mapping[int, int]) -> None:
        """Write a request's parameters by column; those that are not named are 0, and patience infinite."""
        row = torch.zeros(self.values.shape[1], dtype=torch.int64)
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
            Table(self.values, self.values.stride(0), self._rules),
            request_slots,
            batch.lengths,
            Gathered(rows.values, rows.shares, rows.thresholds, batch.rows),
            columns=len(rows.values),
            column_block=triton.next_power_of_2(len(rows.values)),
            num_warps=1,
        )


@dataclass(frozen=True, eq=False)
class RowParameters:
    """The parameters of a batch's rows in one step.

    Attributes:
        layout: where each kind of policy has its numbers.
        values: int32 [numbers, rows].
        shares: float64 [rows]; of the attention mass, 0 in rows of policies without.
        thresholds: float32 [rows, 3]; of early termination, as ``attend`` takes them.
    """

    layout: Layout
    values: Tensor
    shares: Tensor
    thresholds: Tensor

    @classmethod
    def empty(cls, layout: Layout, rows: int, device: torch.device) -> RowParameters:
        """Return the parameters of ``rows`` dense rows."""
        thresholds = torch.zeros(rows, 3, dtype=torch.float32, device=device)
        thresholds[:, 2] = torch.inf
        return cls(
            layout,
            torch.zeros(layout.of_rows, rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.float64, device=device),
            thresholds,
        )

    @property
    def kinds(self) -> Tensor:
        """Numbers of the kinds of policy that act: int32 [rows]."""
        return self.values[Parameter.KIND]

    @property
    def by_score(self) -> Tensor:
        """Where the order of a selection matters: int32 [rows]."""
        return self.values[Parameter.BY_SCORE]

    @property
    def sinks(self) -> Tensor:
        """First tokens that are always attended to: int32 [rows]."""
        return self.values[Parameter.SINKS]

    def own(self, kind: str, name: str) -> Tensor:
        """Return the numbers in a column of a kind: int32 [rows]."""
        return self.values[self.layout.place(kind, name)]

    def acting(self, kind: str) -> Tensor:
        """Return in which rows a policy of ``kind`` acts: bool [rows]."""
        return self.kinds == self.layout.number(kind)

    def __getitem__(self, rows: slice) -> RowParameters:
        """Return those of some rows."""
        return RowParameters(self.layout, self.values[:, rows], self.shares[rows], self.thresholds[rows])


class Table(NamedTuple):
    """``ParameterTable``, and what its layout says of columns (``Layout.rules``)."""

    pointer: Pointer
    row_stride: Number
    rules: Pointer


class Gathered(NamedTuple):
    """``RowParameters`` of so many rows."""

    numbers: Pointer
    shares: Pointer
    thresholds: Pointer
    rows: Number


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(
    table: Table,
    request_slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    gathered: Gathered,
    columns: tl.constexpr,
    column_block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    own_ptr = table.pointer + tl.load(request_slots_ptr + row) * table.row_stride
    length = tl.load(lengths_ptr + row).to(tl.int64)
    is_sparse = length > tl.load(own_ptr + _SPARSE_FROM)
    kind = tl.load(own_ptr + _KIND)
    column = tl.arange(0, column_block)
    is_column = column < columns
    owner = tl.load(table.rules + column, mask=is_column, other=-1)
    by_ratio = tl.load(table.rules + columns + column, mask=is_column, other=0)
    # Between the columns that everyone's rows have and policies' own lie those that rows have not.
    value = tl.load(own_ptr + column + tl.where(column < _SPARSE_FROM, 0, _APART), mask=is_column, other=0)
    bits = tl.load(own_ptr + _RATIO)
    budget = tl.ceil(bits.to(tl.float64, bitcast=True) * (length - 1).to(tl.float64)).to(tl.int64) + 1
    budget = tl.maximum(budget, tl.load(own_ptr + _SINKS) + 1)
    value = tl.where((by_ratio != 0) & (bits != 0), budget, value)
    applies = is_sparse & ((owner < 0) | (owner == kind))
    tl.store(gathered.numbers + column * gathered.rows + row, tl.where(applies, value, 0).to(tl.int32), mask=is_column)
    share = tl.load(own_ptr + _SHARE).to(tl.float64, bitcast=True)
    tl.store(gathered.shares + row, tl.where(is_sparse, share, 0.0))
    which = tl.arange(0, 4)
    threshold = tl.load(own_ptr + _SCALE + which, mask=which < 3, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    never = tl.where(which == 2, float("inf"), 0.0)
    tl.store(gathered.thresholds + row * 3 + which, tl.where(is_sparse, threshold, never), mask=which < 3)


_SPARSE_FROM = tl.constexpr(int(Parameter.SPARSE_FROM))
_APART = tl.constexpr(_OWN - _COMMON)
_KIND = tl.constexpr(int(Parameter.KIND))
_SINKS = tl.constexpr(int(Parameter.SINKS))
_RATIO = tl.constexpr(int(Parameter.RATIO))
_SHARE = tl.constexpr(int(Parameter.SHARE))
_SCALE = tl.constexpr(int(Parameter.SCALE))
