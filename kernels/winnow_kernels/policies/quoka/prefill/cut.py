"""Cutting the new tokens of a request into the blocks of a prefill pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.prefill.blocks import WHOLE, Block

DENSE_BLOCK: Final = 128
"""Queries in a block of a dense request."""


def blocks_of(row: int, first_query: int, prefix_length: int, length: int, parameters: QuokaPrefill) -> list[Block]:
    """Return the blocks of a request with QUOKA, as ``reference.quoka_prefill`` has them.

    Args:
        row: of the request, in the page table.
        first_query: where its first new token lies among the queries of the pass.
        prefix_length: tokens of the request before the pass.
        length: tokens of the request with those of the pass.
        parameters: the request's.
    """
    found = []
    for start in _starts(prefix_length, length, parameters.block):
        block = _block(row, first_query, prefix_length, length, start, parameters.block)
        if not parameters.is_dense(start):
            block = replace(
                block,
                budget=parameters.tokens(start),
                representatives=parameters.queries,
                sinks=parameters.sinks,
                recent=parameters.recent(start),
            )
        found.append(block)
    return found


def dense_blocks_of(row: int, first_query: int, prefix_length: int, length: int) -> list[Block]:
    """Return the blocks of a request that is dense; arguments as those of ``blocks_of``."""
    return [
        _block(row, first_query, prefix_length, length, start, DENSE_BLOCK)
        for start in _starts(prefix_length, length, DENSE_BLOCK)
    ]


def _starts(prefix_length: int, length: int, block: int) -> range:
    return range(prefix_length // block * block, length, block) if length > prefix_length else range(0)


def _block(row: int, first_query: int, prefix_length: int, length: int, start: int, block: int) -> Block:
    """Return what a pass has of a block, which attends to everything before it."""
    begin = max(start, prefix_length)
    return Block(
        row=row,
        start=start,
        begin=begin,
        end=min(start + block, length),
        first_query=first_query + begin - prefix_length,
        budget=WHOLE,
        representatives=0,
    )
