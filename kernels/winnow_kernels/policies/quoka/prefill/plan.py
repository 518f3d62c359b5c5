"""Which blocks of a pass QUOKA scores together, and the tables that tell the kernels so.

All of it is the host's work, once a pass, for all layers. It ends in a few copies to the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.host_tensors import to_device
from winnow_kernels.policies.quoka.prefill import top
from winnow_kernels.policies.quoka.prefill.tables import GROUP_COLUMNS, REQUEST_COLUMNS, SPARSE_COLUMNS
from winnow_kernels.prefill.blocks import WHOLE, Block, PrefillBlocks, aligned

MIN_REPRESENTATIVES: Final = 8
"""Fewer are padded: a group of more than 16 blocks would score too many keys that only its later blocks may see."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Blocks whose scores are in the workspace together.

    Attributes:
        sparse: int32 [blocks, 3] on the device; columns as in ``quoka_prefill_tables``.
        groups: int32 [groups, 4] on the device; likewise, blocks counted from the first of the run.
        longest: the most tokens before a block.
    """

    sparse: Tensor
    groups: Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class Run:
    """Blocks whose numbers of representatives are padded to the same power of two.

    Attributes:
        representatives: that power of two.
        queries: the most queries of a block.
        sparse: int32 [blocks, 3] on the device; the blocks of all batches in their order.
        batches: what the run is cut into.
    """

    representatives: int
    queries: int
    sparse: Tensor
    batches: Sequence[Batch]


@dataclass(frozen=True, eq=False)
class Plan:
    """All sparse blocks of a pass.

    Attributes:
        requests: int32 [requests, 4] on the device; columns as in ``quoka_prefill_tables``.
        longest: the most tokens before a block; 0 if no block is sparse.
        norms: how many numbers the norms take.
        runs: the blocks.
    """

    requests: Tensor
    longest: int
    norms: int
    runs: Sequence[Run]

    @classmethod
    def of(cls, blocks: PrefillBlocks, kv_heads: int, most_representatives: int, most_scores: int) -> Plan:
        """Plan a pass.

        Args:
            blocks: of the pass.
            kv_heads: KV heads of a layer.
            most_representatives: that are scored in one product.
            most_scores: numbers that there is room for.
        """
        own = sorted(
            ((number, block) for number, block in enumerate(blocks.blocks) if block.budget != WHOLE),
            key=lambda each: (padded(each[1].representatives), each[1].row, each[1].start),
        )
        scored: dict[int, int] = {}
        for _, block in own:
            scored[block.row] = max(scored.get(block.row, 0), block.start)
        device = blocks.page_table.device
        requests = []
        norms = 0
        for row, tokens in scored.items():
            requests.append((row, tokens, norms, aligned(tokens)))
            norms += kv_heads * aligned(tokens)
        norms_of = {row: (offset, stride) for row, _, offset, stride in requests}
        runs = []
        for representatives, of_run in groupby(own, key=lambda each: padded(each[1].representatives)):
            most = max(most_representatives // representatives, 1)
            runs.append(_run(representatives, list(of_run), norms_of, kv_heads, most, most_scores, device))
        return cls(_table(requests, REQUEST_COLUMNS, device), max(scored.values(), default=0), norms, runs)


def padded(representatives: int) -> int:
    """Return how many vectors stand for a block's representatives: some of them twice."""
    return max(MIN_REPRESENTATIVES, triton.next_power_of_2(representatives))


def scores_stride(tokens: int) -> int:
    """Return how many numbers the scores of ``tokens`` tokens take, with what is listed of them behind them."""
    return aligned(tokens) + (top.LISTED if tokens > top.LISTED else 0)


def _batches(blocks: list[tuple[int, Block]], kv_heads: int, most_scores: int) -> Iterator[list[tuple[int, Block]]]:
    """Yield consecutive blocks whose scores fit together, in batches that are about as large as each other."""
    sizes = [kv_heads * scores_stride(block.start) for _, block in blocks]
    enough = sum(sizes) / -(-sum(sizes) // most_scores)
    batch: list[tuple[int, Block]] = []
    taken = 0
    for each, size in zip(blocks, sizes, strict=True):
        assert size <= most_scores
        if taken >= enough or taken + size > most_scores:
            yield batch
            batch, taken = [], 0
        batch.append(each)
        taken += size
    yield batch


def _run(
    representatives: int,
    blocks: list[tuple[int, Block]],
    norms_of: dict[int, tuple[int, int]],
    kv_heads: int,
    most_in_group: int,
    most_scores: int,
    device: torch.device,
) -> Run:
    """Cut a run into batches, and these into groups; ``norms_of`` says where a row's norms lie."""
    batches = list(_batches(blocks, kv_heads, most_scores))
    rows = []
    for batch in batches:
        offset = 0
        for number, block in batch:
            rows.append((number, offset, scores_stride(block.start)))
            offset += kv_heads * scores_stride(block.start)
    sparse = _table(rows, SPARSE_COLUMNS, device)
    first = 0
    cut = []
    for batch, own in zip(batches, sparse.split([len(batch) for batch in batches]), strict=True):
        groups = []
        for row, of_row in groupby(block.row for _, block in batch):
            end = first + sum(1 for _ in of_row)
            begins = range(first, end, most_in_group)
            groups += [(begin, min(most_in_group, end - begin), *norms_of[row]) for begin in begins]
            first = end
        longest = max(block.start for _, block in batch)
        # Not a view: for one that begins anywhere but at a multiple of 16 bytes kernels are compiled anew.
        cut.append(Batch(own.clone(), _table(groups, GROUP_COLUMNS, device), longest))
    return Run(representatives, max(block.queries for _, block in blocks), sparse, cut)


def _table(rows: Sequence[tuple[int, ...]], columns: tl.constexpr, device: torch.device) -> Tensor:
    """Copy a table to the device, int32 [rows, columns]."""
    return to_device(torch.tensor(rows, dtype=torch.int32).view(-1, columns.value), device)
