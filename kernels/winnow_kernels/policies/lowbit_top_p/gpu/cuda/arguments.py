"""What a selection's CUDA kernels are given, ``Arguments`` of ``selection.cuh``, and what they are compiled for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from winnow_kernels.batch import NO_MASS, WHOLE_TO_THE_END, Count
from winnow_kernels.cuda.module import source_of
from winnow_kernels.cuda.products import PRODUCTS, macros_of
from winnow_kernels.decode.coded_tokens import WHOLE_SHARE, WINDOW
from winnow_kernels.decode.predicted_attention import FLOOR, KEY_STEPS, LOWEST_KEY, ORDER_KEYS, STEPS
from winnow_kernels.indexes.key_codes import BLOCK, QUERY_LEVELS, BlockLayout, rotation
from winnow_kernels.policies.lowbit_top_p.gpu.state import ORDERS
from winnow_kernels.policies.lowbit_top_p.parameters import WHOLE_ABOVE

BITS: Final = 2
"""Of a channel of a key."""
TILE: Final = 128
"""Tokens that a warp scores and lists at a time."""
BLOCKS_OF_PAIR: Final = 32
"""Blocks, at most, that take the tokens of one pair."""
PAIRS: Final = 768
"""Rows × KV heads, at most."""
SPARE: Final = 24
"""Steps below the cut that a sample of the mass and the last cut's distance from the floor let expect: from there on
tokens are listed, or from lower on (``SPARE_OF_END``)."""
SPARE_OF_END: Final = 8
"""Steps below the last cut itself from which on tokens are listed at the latest. A sample that happens to have one of
the heaviest tokens tells more mass than there is, and so a higher cut."""
LIST_WARPS: Final = 8
TAKE_WARPS: Final = 8
STEPS_KEPT: Final = 2048
"""Steps of tokens' query heads that a warp that takes has room for."""
_MAX_TILES: Final = 256
_FOLDER: Final = Path(__file__).parent
_HEADERS: Final = {
    "list.cu": (
        _FOLDER / "selection.cuh",
        _FOLDER / "shared.cuh",
        PRODUCTS,
        _FOLDER / "prepare.cuh",
        _FOLDER / "scores.cuh",
        _FOLDER / "settle.cuh",
    ),
    "take.cu": (_FOLDER / "selection.cuh",),
}


def least_taking(tiles: int) -> int:
    """Return how many blocks, at least, take the tokens of a pair with up to ``tiles`` tiles."""
    return min(BLOCKS_OF_PAIR, -(-tiles // _MAX_TILES))


@dataclass(frozen=True)
class Sizes:
    """A layer's sizes.

    Attributes:
        head_dim: of a key.
        group: query heads of a KV head.
        kv_heads: of the layer.
        page_size: tokens of a page.
        stored: dtype of keys in the cache.
    """

    head_dim: int
    group: int
    kv_heads: int
    page_size: int
    stored: torch.dtype

    @property
    def columns(self) -> int:
        """Query heads of a pair, and of no pair, as matrix units take them."""
        return 4 if self.group <= 4 else 8

    @property
    def layout(self) -> BlockLayout:
        """Where in a block's piece is what."""
        return BlockLayout.of(self.head_dim, BITS)

    @property
    def list_bytes(self) -> int:
        """Shared memory of a block that lists: ``Shared`` of ``shared.cuh``."""
        blocks = TILE // BLOCK
        stage = blocks * -(-self.layout.end // 16) * 16
        of_warps = LIST_WARPS * (2 * (stage + 8) + blocks * 8 * 4 + 3 * self.columns * 4)
        of_columns = self.columns * (257 * 4 + 11 * 4 + self.head_dim) + 8 * 4
        of_all = of_warps + 8 + of_columns + 32 * self.head_dim // 32 * 2 * 4 + PAIRS * 6 + 24
        return -(-of_all // 16) * 16

    def take_bytes(self, tiles: int) -> int:
        """Shared memory of a block that takes: ``Shared`` of ``take.cu``, and its part of a pair's ``tiles``."""
        kept = TAKE_WARPS * self._take_room * (2 * self.columns + 4)
        of_columns = self.columns * (3 * 4 + TAKE_WARPS * 8)
        return kept + of_columns + 4 * TAKE_WARPS + 8 + 4 * -(-tiles // least_taking(tiles))

    @property
    def _take_room(self) -> int:
        return STEPS_KEPT // self.columns

    def source(self, file: str) -> str:
        """Return the source of ``file`` for these sizes."""
        macros = {
            **macros_of(self.stored, self.head_dim, self.group, self.kv_heads),
            "QUERY_LEVELS": f"{QUERY_LEVELS}.0f",
            "ROTATION_SIGNS": _signs(self.head_dim),
            "STRIDE": triton.next_power_of_2(self.group),
            "PAGE_SIZE": self.page_size,
            "WINDOW": WINDOW,
            "WHOLE_SHARE": f"{WHOLE_SHARE}f",
            "WHOLE_ABOVE": WHOLE_ABOVE,
            "STEPS_TO_FLOOR": -FLOOR * STEPS,
            "SPARE": SPARE,
            "SPARE_OF_END": SPARE_OF_END,
            "PAIRS": PAIRS,
            "STEPS": STEPS,
            "BLOCK": BLOCK,
            "TILE": TILE,
            "LIST_WARPS": LIST_WARPS,
            "TAKE_WARPS": TAKE_WARPS,
            "TAKE_ROOM": self._take_room,
            "BLOCKS_OF_PAIR": BLOCKS_OF_PAIR,
            "LOWEST_KEY": f"({LOWEST_KEY})",
            "KEY_STEPS": KEY_STEPS,
            "ORDER_KEYS": ORDER_KEYS,
            "ORDERS": ORDERS,
            "WHOLE_TO_THE_END": f"({WHOLE_TO_THE_END})",
            "NO_MASS": f"({NO_MASS}f)",
            "READ_BYTES": int(Count.READ_BYTES),
            "BLOCK_BYTES": self.layout.size,
            "MEANS_AT": self.layout.means,
            "FACTORS_AT": self.layout.factors,
            "PIECE_END": self.layout.end,
        }
        return source_of(*_HEADERS[file], _FOLDER / file, macros=macros)


def _signs(head_dim: int) -> str:
    """Return where the rotation's first row is negative, bit by bit, in words of 32 channels."""
    negative = (rotation(head_dim)[0] < 0).long().view(-1, 32)
    return ", ".join(f"{word:#x}u" for word in (negative << torch.arange(32)).sum(1).tolist())


class Lists(NamedTuple):
    """What listing hands on to taking; columns are query heads (``Sizes.columns``).

    steps, int16 [pairs, tokens, columns], and places, uint8 [pairs, tokens]: of each tile's listed tokens, in order,
    the steps above the heads' units, and where in the tile they are. counts, int32 [pairs, tiles], how many these are.
    masses, float32 [pairs, tiles, columns], of all tokens. units, starts, counted_from and cuts, int32 [pairs,
    columns]: the step that the others are relative to, in whose weight masses are; the steps from which on tokens are
    listed, are counted, and are taken. pair_open, int32 [pairs], which are to be listed again. published, int32 [pairs,
    ``BLOCKS_OF_PAIR``], 0 between kernels: one more than each block takes. taken, int64 [pairs, ``BLOCKS_OF_PAIR``,
    columns], the mass of that, in ``GRAIN`` of ``take.cu``.
    """

    steps: Tensor
    places: Tensor
    counts: Tensor
    masses: Tensor
    units: Tensor
    starts: Tensor
    counted_from: Tensor
    cuts: Tensor
    pair_open: Tensor
    published: Tensor
    taken: Tensor

    @classmethod
    def empty(cls, rows: int, sizes: Sizes, tokens: int, device: torch.device) -> Lists:
        """Return that of layers of ``rows`` rows with up to ``tokens`` tokens each."""
        pairs, tiles, columns = rows * sizes.kv_heads, -(-tokens // TILE), sizes.columns

        def zeros(*of_pair: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(pairs, *of_pair, dtype=dtype, device=device)

        return cls(
            steps=zeros(tiles * TILE, columns, dtype=torch.int16),
            places=zeros(tiles * TILE, dtype=torch.uint8),
            counts=zeros(tiles),
            masses=zeros(tiles, columns, dtype=torch.float32),
            units=zeros(columns),
            starts=zeros(columns),
            counted_from=zeros(columns),
            cuts=zeros(columns),
            pair_open=zeros(),
            published=zeros(BLOCKS_OF_PAIR),
            taken=zeros(BLOCKS_OF_PAIR, columns, dtype=torch.int64),
        )

    @property
    def tiles(self) -> int:
        """Tiles of the longest context."""
        return self.counts.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self)


POINTERS: Final = (
    "page_table lengths acts shares sinks least most by_score pieces slots anchor_tops anchor_cuts anchor_ends "
    "queries keys levels sums worths kept tops bases floors open totals rests histograms met any_open marks "
    "others listed orders steps places counts masses units starts counted_from cuts pair_open published taken "
    "selected_slots selected_counts read beliefs"
).split()


class Arguments(ctypes.Structure):
    """``Arguments`` of ``selection.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in ("table_stride", "tokens", "width", "read_stride")),
        *((name, ctypes.c_int64) for name in ("query_row_stride", "query_head_stride", "slot_bytes", "head_bytes")),
        *((name, ctypes.c_int32) for name in ("tiles", "rows", "key_bytes", "in_order")),
        ("scale_log2", ctypes.c_float),
    )
