"""Columns of the tables that the kernels of QUOKA's prefill read: what each names, on the host and in kernels."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import triton.language as tl

from winnow_kernels.kernel_arguments import Constant, Number, Pointer
from winnow_kernels.prefill.blocks import Block, PrefillBlocks

_FIELDS: Final = [field.name for field in dataclasses.fields(Block)]

# ``PrefillBlocks.fields``.
BLOCK_COLUMNS: Final = tl.constexpr(len(_FIELDS))
REQUEST: Final = tl.constexpr(_FIELDS.index("row"))
START: Final = tl.constexpr(_FIELDS.index("start"))
BEGIN: Final = tl.constexpr(_FIELDS.index("begin"))
END: Final = tl.constexpr(_FIELDS.index("end"))
FIRST_QUERY: Final = tl.constexpr(_FIELDS.index("first_query"))
BUDGET: Final = tl.constexpr(_FIELDS.index("budget"))
REPRESENTATIVES: Final = tl.constexpr(_FIELDS.index("representatives"))
SINKS: Final = tl.constexpr(_FIELDS.index("sinks"))
RECENT: Final = tl.constexpr(_FIELDS.index("recent"))

# A sparse block: its number in the pass, where the scores of its first KV head lie, and how far apart its KV heads are.
SPARSE_COLUMNS: Final = tl.constexpr(3)
NUMBER: Final = tl.constexpr(0)
SCORES: Final = tl.constexpr(1)
SCORES_STRIDE: Final = tl.constexpr(2)

# Neighbouring sparse blocks of one request: the first, how many they are, and where the request's norms lie.
GROUP_COLUMNS: Final = tl.constexpr(4)
FIRST: Final = tl.constexpr(0)
COUNT: Final = tl.constexpr(1)
NORMS: Final = tl.constexpr(2)
NORMS_STRIDE: Final = tl.constexpr(3)

# A request: its row in the page table, how many tokens are scored, and, as in a group, where their norms lie.
REQUEST_COLUMNS: Final = tl.constexpr(4)
ROW: Final = tl.constexpr(0)
TOKENS: Final = tl.constexpr(1)


class Blocks(NamedTuple):
    """``PrefillBlocks``, for a kernel."""

    fields: Pointer
    page_table: Pointer
    table_stride: Number
    page_size: Constant
    page_bits: Constant

    @classmethod
    def of(cls, blocks: PrefillBlocks) -> Blocks:
        """Return those of ``blocks``."""
        assert blocks.fields.is_contiguous()
        sizes = (blocks.page_size, blocks.page_size.bit_length() - 1)
        return cls(blocks.fields, blocks.page_table, blocks.page_table.stride(0), *map(tl.constexpr, sizes))
