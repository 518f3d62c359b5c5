"""Attention of a prefill pass's blocks on the device against plain float64, and against the torch reference."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import SOFTMAXES, random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.gpu.compiling import SHARED_LIMIT, compile_launches
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.gpu.selectors import cache_on
from tests.kernels.parameters import quoka_prefill_parameters
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.policies.quoka.prefill.attention import Launch, attend_blocks
from winnow_kernels.policies.quoka.prefill.cut import blocks_of, dense_blocks_of
from winnow_kernels.policies.quoka.prefill.selection import BlockSelection
from winnow_kernels.policies.quoka.reference import quoka_prefill, select_for_blocks
from winnow_kernels.prefill.blocks import WHOLE, Block, PrefillBlocks
from winnow_kernels.softmax import capped

# The interpreter multiplies matrices of bfloat16 as if they were integers.
HALF_PRECISIONS = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
# The interpreter takes milliseconds for a tile.
LONGEST, EXAMPLES = (200, 3) if INTERPRETED else (5000, 100)

HEAD_DIMS = (64, 96, 128, 256)


@dataclass(frozen=True)
class Pass:
    """A layer in a prefill pass: the positions that each block selected, int64 [KV heads, budget], ascending."""

    queries: Tensor
    cache: LayerCache
    context: Context
    page_size: int
    blocks: Sequence[Block]
    selected: Sequence[Tensor]

    @classmethod
    def random(
        cls,
        blocks: Sequence[Block],
        kv_heads: int,
        group: int,
        head_dim: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Pass:
        lengths = [max(b.end for b in blocks if b.row == row) for row in range(1 + max(b.row for b in blocks))]
        pool = sum(-(-n // page_size) for n in lengths) * page_size + page_size
        generator = torch.Generator().manual_seed(seed)
        selected = [
            torch.rand(kv_heads, b.start, generator=generator).argsort(-1)[:, : max(0, b.budget)].sort(-1).values
            for b in blocks
        ]
        queries = random_queries(max(b.first_query + b.queries for b in blocks), kv_heads * group, head_dim, seed)
        context = scattered_context(lengths, pool, page_size, seed)
        cache = random_cache(pool, kv_heads, head_dim, seed, dtype)
        return cls(queries.to(dtype), cache, context, page_size, blocks, selected)

    def block(self, number: int) -> Pass:
        """The same pass with one of the blocks alone."""
        return replace(self, blocks=[self.blocks[number]], selected=[self.selected[number]])

    def slots(self, number: int) -> Tensor:
        """The slots that a block selected."""
        return self.context.slots[self.blocks[number].row, self.selected[number]]

    def own(self, number: int) -> tuple[int, Tensor]:
        """From where on a block attends causally, and the slots from there to its end."""
        block = self.blocks[number]
        origin = 0 if block.budget == WHOLE else block.start
        return origin, self.context.slots[block.row, origin : block.end]


def expected(layer: Pass, scale: float) -> Tensor:
    """In float64; NaN for queries in no block."""
    output = torch.full_like(layer.queries, torch.nan, dtype=torch.float64)
    log_sum_exps = torch.zeros_like(output[..., 0])
    kv_heads = layer.cache.kv_heads
    for number, block in enumerate(layer.blocks):
        rows = slice(block.first_query, block.first_query + block.queries)
        origin, own = layer.own(number)
        causal = torch.arange(origin, block.end) <= torch.arange(block.begin, block.end)[:, None]
        for head in range(kv_heads):
            slots = torch.cat((layer.slots(number)[head], own))
            seen = torch.cat((torch.ones(block.queries, len(slots) - len(own), dtype=torch.bool), causal), 1)
            keys, values = (pool[slots, head].double() for pool in (layer.cache.keys, layer.cache.values))
            queries = layer.queries[rows].unflatten(1, (kv_heads, -1))[:, head].double()
            scores = capped(queries @ keys.T * scale, layer.cache.softmax.cap).masked_fill(~seen[:, None], -torch.inf)
            output[rows].unflatten(1, (kv_heads, -1))[:, head] = scores.softmax(-1) @ values
            log_sum_exps[rows].unflatten(1, (kv_heads, -1))[:, head] = scores.logsumexp(-1)
    return layer.cache.softmax.with_sinks(output, log_sum_exps)


def actual(layer: Pass, scale: float, device: torch.device) -> Tensor:
    """What the kernel yields; NaN where it writes nothing."""
    table = torch.full((len(layer.context.slots), layer.context.longest), 1 << 20, dtype=torch.int32)
    for row, length in enumerate(layer.context.lengths.tolist()):
        pages = layer.context.slots[row, : length : layer.page_size] // layer.page_size
        table[row, : len(pages)] = pages
    blocks = PrefillBlocks.of(layer.blocks, table.to(device), layer.page_size)
    width = max((chosen.shape[1] for chosen in layer.selected), default=0) + 3
    slots = torch.full((len(layer.blocks), layer.cache.kv_heads, width), 1 << 20, dtype=torch.int32)
    for number, chosen in enumerate(layer.selected):
        slots[number, :, : chosen.shape[1]] = layer.slots(number)
    cache = cache_on(device, layer.cache)
    # As in a model, queries are part of a wider tensor.
    count, heads, head_dim = layer.queries.shape
    queries = torch.randn(count, heads + 2, head_dim).to(layer.queries.dtype)[:, :heads].to(device)
    queries.copy_(layer.queries)
    output = torch.full((count, heads + 1, head_dim), torch.nan, dtype=queries.dtype, device=device)[:, 1:]
    # In the interpreter float32, too, has the tiles that half precision has on a GPU.
    launch = Launch.of(head_dim, 2) if INTERPRETED else None
    attend_blocks(queries, cache, blocks, BlockSelection(slots.to(device)), scale, output, launch)
    return output.cpu()


def assert_equal(layer: Pass, scale: float, device: torch.device) -> None:
    tolerance = 2e-5 if layer.queries.dtype == torch.float32 else 2e-2
    result = actual(layer, scale, device)
    torch.testing.assert_close(result.double(), expected(layer, scale), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size"),
    [(2, 4, 64, 16), (1, 7, 96, 32), (1, 5, 128, 64), (1, 16, 256, 16), (3, 1, 64, 32)],
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_PRECISIONS])
def test_equals_plain_attention(
    kv_heads: int, group: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    blocks = [
        # Cut by the begin of the chunk, and by its end; a tail of one token in a tile, and none.
        Block(row=0, start=128, begin=171, end=192, first_query=0, budget=65, representatives=4),
        Block(row=0, start=192, begin=192, end=202, first_query=21, budget=128, representatives=4),
        Block(row=1, start=0, begin=0, end=30, first_query=40, budget=WHOLE, representatives=0),
        Block(row=2, start=64, begin=115, end=128, first_query=70, budget=1, representatives=1),
        Block(row=2, start=128, begin=128, end=140, first_query=83, budget=WHOLE, representatives=0),
    ]
    layer = Pass.random(blocks, kv_heads, group, head_dim, page_size, dtype)
    assert_equal(layer, head_dim**-0.5, device)


@pytest.mark.parametrize("dtype", HALF_PRECISIONS)
def test_blocks_of_several_tiles(dtype: torch.dtype, device: torch.device) -> None:
    blocks = [Block(row=0, start=512, begin=600, end=1000, first_query=0, budget=100, representatives=4)]
    assert_equal(Pass.random(blocks, 1, 3, 64, dtype=dtype), 0.125, device)


@pytest.mark.parametrize("softmax", SOFTMAXES[1:])
@pytest.mark.parametrize(("group", "head_dim"), [(7, 96), (2, 256)])
def test_caps_and_sinks(group: int, head_dim: int, softmax: str, device: torch.device) -> None:
    blocks = [
        Block(row=0, start=128, begin=128, end=190, first_query=0, budget=70, representatives=4),
        Block(row=1, start=0, begin=30, end=128, first_query=62, budget=WHOLE, representatives=4),
        Block(row=2, start=64, begin=70, end=71, first_query=160, budget=1, representatives=4),
    ]
    plain = Pass.random(blocks, 2, group, head_dim)
    own = random_softmax(softmax, 2 * group)
    layer = replace(plain, cache=replace(plain.cache, softmax=own), queries=3 * plain.queries)
    assert_equal(layer, 0.125, device)
    assert not torch.allclose(expected(layer, 0.125), expected(replace(layer, cache=plain.cache), 0.125), atol=1e-2)


def test_a_start_inside_a_page(device: torch.device) -> None:
    blocks = [Block(row=0, start=70, begin=75, end=140, first_query=0, budget=20, representatives=4)]
    assert_equal(Pass.random(blocks, 2, 2, 64, page_size=64), 0.125, device)


@given(
    chunks=st.lists(st.tuples(st.integers(0, LONGEST), st.integers(1, LONGEST // 2)), min_size=1, max_size=3),
    budgets=st.lists(st.none() | st.integers(1, 200) | st.floats(0.05, 1.0), min_size=3, max_size=3),
    block=st.sampled_from([64, 128, 512]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=EXAMPLES)
def test_requests_in_one_pass_are_as_the_reference_has_each(
    chunks: list[tuple[int, int]], budgets: list[int | float | None], block: int, seed: int, device: torch.device
) -> None:
    first, blocks, requests = 0, [], []
    for row, ((prefix_length, new_tokens), budget) in enumerate(zip(chunks, budgets, strict=False)):
        length = prefix_length + new_tokens
        name = "budget" if isinstance(budget, int) else "budget_ratio"
        parameters = quoka_prefill_parameters(block=block, queries=4, **{name: budget or 1.0})  # type: ignore[arg-type]
        if budget is None:
            blocks += dense_blocks_of(row, first, prefix_length, length)
        else:
            blocks += blocks_of(row, first, prefix_length, length, parameters)
        requests.append((slice(first, first + new_tokens), length, parameters))
        first += new_tokens
    layer = Pass.random(blocks, 2, 3, 64, seed=seed)
    chosen: dict[tuple[int, int], Tensor] = {}
    outputs = []
    for row, (rows, length, parameters) in enumerate(requests):
        slots = layer.context.slots[row, :length]
        selections = select_for_blocks(layer.queries[rows], slots, layer.cache, parameters)
        chosen |= {(row, start): positions.sort(-1).values for start, positions in selections}
        outputs.append(quoka_prefill(layer.queries[rows], slots, layer.cache, 0.125, parameters)[0])
    selected = [chosen.get((b.row, b.start), layer.selected[number]) for number, b in enumerate(blocks)]

    result = actual(replace(layer, selected=selected), 0.125, device)

    torch.testing.assert_close(result, torch.cat(outputs), atol=2e-5, rtol=2e-5)


def test_a_block_gets_the_same_bits_alone_and_among_others(device: torch.device) -> None:
    blocks = [
        Block(row=0, start=192, begin=192, end=256, first_query=0, budget=70, representatives=4),
        Block(row=1, start=0, begin=5, end=128, first_query=64, budget=WHOLE, representatives=0),
        Block(row=1, start=128, begin=128, end=200, first_query=187, budget=90, representatives=4),
    ]
    layer = Pass.random(blocks, 2, 2, 64, dtype=HALF_PRECISIONS[-1])
    together = actual(layer, 0.125, device)
    for number, block in enumerate(blocks):
        rows = slice(block.first_query, block.first_query + block.queries)
        assert torch.equal(actual(layer.block(number), 0.125, device)[rows], together[rows])


def test_what_is_not_attended_to_may_hold_anything(device: torch.device) -> None:
    blocks = [
        Block(row=0, start=128, begin=140, end=170, first_query=0, budget=33, representatives=4),
        Block(row=1, start=0, begin=30, end=50, first_query=30, budget=WHOLE, representatives=0),
    ]
    layer = Pass.random(blocks, 1, 4, 64)
    used = torch.cat([layer.slots(0)[0], layer.own(0)[1], layer.own(1)[1]])
    unused = torch.ones(layer.cache.slots, dtype=torch.bool)
    unused[used] = False
    assert bool(unused.any())
    correct = expected(layer, 0.125)
    layer.cache.keys[unused] = torch.nan
    layer.cache.values[unused] = torch.inf
    torch.testing.assert_close(actual(layer, 0.125, device).double(), correct, atol=2e-5, rtol=2e-5)


def test_a_pass_without_blocks_writes_nothing(device: torch.device) -> None:
    layer = Pass.random([Block(0, 0, 0, 10, 0, WHOLE, 0)], 1, 1, 64)
    assert bool(actual(replace(layer, blocks=[], selected=[]), 0.125, device).isnan().all())


def _launch() -> None:
    """Attend at each of ``HEAD_DIMS`` from one block, with 32 query and 8 KV heads."""
    blocks = PrefillBlocks.of([Block(0, 256, 256, 384, 0, 16, 8)], torch.zeros(1, 64, dtype=torch.int32), 16)
    for head_dim in HEAD_DIMS:
        cache = LayerCache(*torch.empty(2, 64, 8, head_dim, dtype=torch.bfloat16))
        queries = torch.empty(128, 32, head_dim, dtype=torch.bfloat16)
        selection = BlockSelection(torch.zeros(1, 8, 16, dtype=torch.int32))
        attend_blocks(queries, cache, blocks, selection, 0.125, torch.empty_like(queries))


def test_fits_a_hopper_multiprocessor() -> None:
    """On tensor cores, with tiles loaded while others are attended to, and their slots before that."""
    for head_dim, compiled in zip(HEAD_DIMS, compile_launches(_launch), strict=True):
        # Of two programs on a multiprocessor each has half of the registers, and spills a few outside of the loop.
        assert compiled.local_bytes <= (32 if Launch.of(head_dim, 2).registers else 0)
        assert compiled.shared_bytes <= SHARED_LIMIT
        assert "wgmma.mma_async" in compiled.ptx
        # Only keys and values are copied, two tiles of each ahead.
        assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.ptx))) == 2
        assert not re.search(r"cp\.async\.ca", compiled.ptx)
        # In the loop only Q × K is waited for, so that P × V runs while the next softmax is computed.
        assert len(re.findall(r"wgmma\.wait_group", compiled.ptx)) == 2
        # The assembler finishes each wgmma before the next if registers of one are touched while others run.
        if head_dim < 256:
            assert "serialized" not in _assembler_report(compiled.ptx)


def _assembler_report(ptx: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Used" in done.stderr
    return done.stderr
