"""The blocks that a request is cut into, and what they read, against the torch reference."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.parameters import quoka_prefill_parameters
from winnow_kernels.policies.quoka.prefill.cut import DENSE_BLOCK, blocks_of, dense_blocks_of
from winnow_kernels.policies.quoka.prefill.reads import reads_of
from winnow_kernels.policies.quoka.reference import PrefillReads, quoka_prefill, select_for_blocks
from winnow_kernels.prefill.blocks import WHOLE, Block, PrefillBlocks

CHUNKS = st.tuples(st.integers(0, 600), st.integers(1, 400))


@given(
    chunk=CHUNKS,
    first_query=st.integers(0, 50),
    budget=st.integers(24, 300).map(lambda n: {"budget": n})
    | st.floats(0.05, 1.0).map(lambda ratio: {"budget_ratio": ratio}),
    block=st.sampled_from([32, 48, 64, 128, 512]),
    dense_prefix=st.sampled_from([0, 100, 5000]),
    sinks=st.sampled_from([0, 24]),
    recency_ratio=st.sampled_from([0.0, 0.3, 1.0]),
)
@settings(max_examples=60)
def test_blocks_and_reads_are_the_references(
    chunk: tuple[int, int],
    first_query: int,
    budget: dict[str, Any],
    block: int,
    dense_prefix: int,
    sinks: int,
    recency_ratio: float,
) -> None:
    prefix_length, new_tokens = chunk
    length = prefix_length + new_tokens
    parameters = quoka_prefill_parameters(
        block=block, queries=4, dense_prefix=dense_prefix, sinks=sinks, recency_ratio=recency_ratio, **budget
    )
    cache, queries = random_cache(1024, 2, 16), random_queries(new_tokens, 4, 16)
    slots = scattered_context([length], 1024).slots[0]

    blocks = blocks_of(3, first_query, prefix_length, length, parameters)

    assert reads_of(blocks, cache) == quoka_prefill(queries, slots, cache, 0.25, parameters)[1]
    selected = {start: chosen.shape[1] for start, chosen in select_for_blocks(queries, slots, cache, parameters)}
    assert {b.start: b.budget for b in blocks if b.budget != WHOLE} == selected
    assert {b.representatives for b in blocks if b.budget != WHOLE} <= {4}
    assert {b.representatives for b in blocks if b.budget == WHOLE} <= {0}
    for b in blocks:
        always = (0, 0) if b.budget == WHOLE else (sinks, parameters.recent(b.start))
        assert (b.sinks, b.recent) == always
        assert b.budget == WHOLE or b.sinks + b.recent <= b.budget
    assert_cover(blocks, 3, first_query, prefix_length, length)


@given(chunk=CHUNKS, first_query=st.integers(0, 50))
def test_a_dense_request_is_cut_too(chunk: tuple[int, int], first_query: int) -> None:
    prefix_length, length = chunk[0], sum(chunk)
    blocks = dense_blocks_of(1, first_query, prefix_length, length)
    assert {(block.budget, block.representatives) for block in blocks} == {(WHOLE, 0)}
    assert_cover(blocks, 1, first_query, prefix_length, length)
    cache = random_cache(16, 2, 16)
    assert reads_of(blocks, cache) == PrefillReads.of_dense(prefix_length, length, DENSE_BLOCK, cache)


def assert_cover(blocks: list[Block], row: int, first_query: int, prefix_length: int, length: int) -> None:
    """Every new token lies in one block, at its place among the queries, behind its block's start on the grid."""
    positions = [position for block in blocks for position in range(block.begin, block.end)]
    places = [block.first_query + i for block in blocks for i in range(block.queries)]
    assert positions == list(range(prefix_length, length))
    assert places == list(range(first_query, first_query + length - prefix_length))
    assert {block.row for block in blocks} == {row}
    assert all(block.start <= block.begin < block.end for block in blocks)


def test_no_new_tokens_are_no_blocks() -> None:
    parameters = quoka_prefill_parameters(budget=64)
    assert blocks_of(0, 0, 100, 100, parameters) == dense_blocks_of(0, 0, 100, 100) == []
    assert reads_of([], random_cache(16, 1, 16)) == PrefillReads()


def test_fields_on_the_device_are_the_blocks_attributes(device: torch.device) -> None:
    blocks = blocks_of(2, 7, 100, 300, quoka_prefill_parameters(budget=64, queries=16, sinks=8, recency_ratio=0.5))
    table = torch.zeros(3, 32, dtype=torch.int32, device=device)
    fields = PrefillBlocks.of(blocks, table, 16).fields
    assert fields.dtype == torch.int32
    assert fields.tolist() == [
        [2, 0, 100, 128, 7, WHOLE, 0, 0, 0],
        [2, 128, 128, 256, 35, 64, 16, 8, 32],
        [2, 256, 256, 300, 163, 64, 16, 8, 32],
    ]
