"""Attention over selections on the device against the torch reference."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_float64 import attend_head_until_settled
from tests.kernels.caches import SOFTMAXES, random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.cuda_on_host.module import loaded_on_host
from tests.kernels.gpu.compiling import SHARED_LIMIT, compile_launches
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.parameters import termination_at
from winnow_kernels.attend.cuda.kernel import CudaAttend
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.gpu import AttendBuffers, Launch, attend
from winnow_kernels.attend.gpu_merge import PARTIAL_SLOTS
from winnow_kernels.attend.reference import attend as reference_attend
from winnow_kernels.batch import ELSEWHERE, WHOLE, Count, DecodeBatch, DeviceSelection, ReportedShares
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.cuda.module import loaded
from winnow_kernels.selection.tokens import Selection
from winnow_kernels.softmax import Softmax

# The interpreter multiplies matrices of bfloat16 as if they were integers.
HALF_PRECISIONS = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
# The interpreter takes 5 ms for a tile.
LONGEST, EXAMPLES = (1500, 5) if INTERPRETED else (20_000, 200)
SETTLING = termination_at(0.05, 0.01, 2)
# Head dim, query heads of a KV head, and whether some row terminates early.
SHAPES = [(64, 4, True), (128, 16, True), (64, 4, False), (128, 4, False), (128, 16, False), (256, 7, False)]
OTHER_SOFTMAXES = [(256, 2, False, "cap"), (256, 2, True, "cap"), (64, 8, False, "sinks"), (64, 8, True, "sinks")]


@dataclass(frozen=True)
class Layer:
    """A layer in a decode step: ``counts`` tokens of each row and KV head in random order, or ``WHOLE``."""

    queries: Tensor
    cache: LayerCache
    context: Context
    page_size: int
    slots: Tensor
    counts: Tensor

    @classmethod
    def random(
        cls,
        lengths: Sequence[int],
        counts: Sequence[Sequence[int]],
        group: int,
        head_dim: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Layer:
        kv_heads, pool = len(counts[0]), sum(-(-n // page_size) for n in lengths) * page_size + page_size
        generator = torch.Generator().manual_seed(seed)
        context = scattered_context(lengths, pool, page_size, seed)
        cache = random_cache(pool, kv_heads, head_dim, seed, dtype)
        # A common part in all values, as in a model: outputs of random values alone never settle.
        cache = replace(cache, values=cache.values + 3 * torch.randn(head_dim, generator=generator).to(dtype))
        slots = torch.full((len(lengths), kv_heads, max(1, *map(max, counts))), pool, dtype=torch.int64)
        for row, of_row in enumerate(counts):
            for head, count in enumerate(of_row):
                order = torch.randperm(lengths[row], generator=generator)[: max(0, count)]
                slots[row, head, : max(0, count)] = context.slots[row, order]
        queries = random_queries(len(lengths), kv_heads * group, head_dim, seed).to(dtype)
        return cls(queries, cache, context, page_size, slots, torch.tensor(counts))

    def row(self, row: int) -> Layer:
        """The same pool, with one of the rows alone."""
        only = slice(row, row + 1)
        context = Context(self.context.slots[only], self.context.lengths[only])
        return replace(
            self, queries=self.queries[only], context=context, slots=self.slots[only], counts=self.counts[only]
        )

    def batch(self, device: torch.device) -> DecodeBatch:
        batch = DecodeBatch.empty(len(self.queries), self.context.longest + 100, self.page_size, device)
        for row, length in enumerate(self.context.lengths.tolist()):
            pages = self.context.slots[row, : length : self.page_size] // self.page_size
            batch.page_table[row, : len(pages)] = pages
        batch.lengths.copy_(self.context.lengths)
        return batch


@dataclass(frozen=True)
class Result:
    output: Tensor
    log_sum_exp: Tensor
    counts: Tensor


def expected(layer: Layer, scale: float, thresholds: Sequence[EarlyTermination | None]) -> Result:
    whole, lengths = layer.counts == WHOLE, layer.context.lengths
    longest = max(layer.context.longest, layer.slots.shape[2])
    slots = torch.nn.functional.pad(layer.slots, (0, longest - layer.slots.shape[2]))
    for row, head in whole.nonzero().tolist():
        own = layer.context.slots[row, : int(lengths[row])]
        slots[row, head, : len(own)] = own.flip(0) if thresholds[row] else own
    meter = Meter(len(lengths), torch.device("cpu"))
    meter.count_context(layer.context, layer.cache)
    selection = Selection(slots, layer.counts.where(~whole, lengths[:, None]))
    termination = Termination.of(thresholds, torch.device("cpu"))
    attended = reference_attend(layer.queries, layer.cache, selection, scale, meter, termination)
    columns = [meter.context, meter.attended, meter.context_bytes, meter.read_bytes]
    columns += [meter.traversals, meter.terminated, meter.tiles, meter.skipped_tiles]
    return Result(attended.output, attended.log_sum_exp, torch.stack(columns, 1))


def least_margin(layer: Layer, scale: float, thresholds: Sequence[EarlyTermination | None]) -> float:
    """Return how near to its threshold anything compared is, in float64.

    Nearer than float32 rounds, both judgements are right.
    """
    group = layer.queries.shape[1] // layer.cache.kv_heads
    margins = [math.inf]
    for row, length in enumerate(layer.context.lengths.tolist()):
        for head, count in enumerate(layer.counts[row].tolist() if thresholds[row] else []):
            own = layer.context.slots[row, :length].flip(0) if count == WHOLE else layer.slots[row, head, :count]
            queries = layer.queries[row, head * group : (head + 1) * group]
            read = attend_head_until_settled(queries, layer.cache, head, own.tolist(), scale, thresholds[row])
            margins.append(read.margin)
    return min(margins)


def actual(
    layer: Layer,
    scale: float,
    thresholds: Sequence[EarlyTermination | None] | None,
    device: torch.device,
    multiprocessors: int | None = None,
    *,
    in_cuda: bool = False,
    blocks: int | None = None,
) -> Result:
    """What the kernel yields; ``thresholds`` None for the variant without early termination.

    ``in_cuda`` where it is the one in CUDA C++, in so many ``blocks``, that attends for rows without.
    """
    batch = layer.batch(device)
    softmax = layer.cache.softmax
    if softmax.sink_logits is not None:
        softmax = replace(softmax, sink_logits=softmax.sink_logits.to(device))
    cache = LayerCache(layer.cache.keys.to(device), layer.cache.values.to(device), softmax=softmax)
    selection = DeviceSelection(layer.slots.int().to(device), layer.counts.int().to(device))
    rows, query_heads, head_dim = layer.queries.shape
    group = query_heads // cache.kv_heads
    # As in a model, queries are part of a wider tensor.
    queries = torch.randn(rows, query_heads + 2, head_dim).to(layer.queries.dtype)[:, :query_heads].to(device)
    queries.copy_(layer.queries)
    buffers = AttendBuffers.empty(rows + 1, query_heads, cache, Launch.of(head_dim, cache.keys.element_size(), group))
    if in_cuda:
        load = loaded if device.type == "cuda" else loaded_on_host
        cuda = CudaAttend.on(device, cache, query_heads, load)
        buffers = replace(buffers, cuda=replace(cuda, blocks=blocks or cuda.blocks))
    if multiprocessors is not None:
        buffers = replace(buffers, multiprocessors=multiprocessors)
    output = torch.full_like(layer.queries, torch.nan, device=device)
    tensor = None
    if thresholds is not None:
        of_rows = [(t.scale, t.direction, t.patience) if t else (0.0, 0.0, torch.inf) for t in thresholds]
        tensor = torch.tensor(of_rows, dtype=torch.float32, device=device)
    attend(queries, cache, batch, selection, scale, tensor, buffers, output)
    return Result(output.cpu(), buffers.log_sum_exp[:rows].cpu(), batch.counts.cpu())


Neighbours = tuple[Layer, list[EarlyTermination | None]]
"""Rows, and the early termination of each."""


@st.composite
def neighbours(draw: st.DrawFn, longest: int, dtype: torch.dtype) -> Neighbours:
    """Draw rows of up to ``longest`` tokens, whole or selected from, with early termination or without."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=2, max_size=4))
    whole, settling = (draw(st.lists(st.booleans(), min_size=4, max_size=4)) for _ in range(2))
    counts = [[WHOLE, WHOLE] if w else [n, max(1, n - 9)] for w, n in zip(whole, lengths, strict=False)]
    thresholds = [SETTLING if s else None for s, _ in zip(settling, lengths, strict=False)]
    seed = draw(st.integers(0, 1000))
    return Layer.random(lengths, counts, group=3, head_dim=64, dtype=dtype, seed=seed), thresholds


def assert_same_bits_alone(
    layer: Layer, thresholds: Sequence[EarlyTermination | None], device: torch.device, *, in_cuda: bool = False
) -> None:
    """A row's output, log-sum-exp and counts are the same to the last bit without its neighbours."""
    together = actual(layer, 0.125, thresholds, device, in_cuda=in_cuda)
    for row, own in enumerate(thresholds):
        # Alone, a row without early termination runs in the variant without.
        alone = actual(layer.row(row), 0.125, [own] if own else None, device, in_cuda=in_cuda)
        assert torch.equal(alone.output[0], together.output[row])
        assert torch.equal(alone.log_sum_exp[0], together.log_sum_exp[row])
        assert torch.equal(alone.counts[0], together.counts[row])


def assert_equal(result: Result, correct: Result, tolerance: float) -> None:
    torch.testing.assert_close(result.output, correct.output, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(result.log_sum_exp, correct.log_sum_exp, atol=tolerance, rtol=tolerance)
    assert result.counts.tolist() == correct.counts.tolist()


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size"),
    [(2, 4, 64, 16), (1, 7, 96, 32), (2, 5, 128, 64), (1, 16, 256, 16), (3, 1, 64, 32)],
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_PRECISIONS])
def test_equals_the_reference(
    kv_heads: int, group: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    heads = range(kv_heads)
    counts = [[300 + head for head in heads], [64] * kv_heads, [WHOLE] * kv_heads, [WHOLE] * kv_heads, [1] * kv_heads]
    layer = Layer.random([310, 65, 1, 190, 7], counts, group, head_dim, page_size, dtype)
    scale = head_dim**-0.5

    result = actual(layer, scale, None, device)

    assert_equal(result, expected(layer, scale, [None] * 5), 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("termination", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size", "dtype"),
    [
        (2, 4, 64, 16, torch.float32),
        *(
            pytest.param(*shape, dtype, marks=pytest.mark.full)
            for shape in [(2, 4, 64, 16), (1, 7, 96, 32), (2, 5, 128, 64), (1, 16, 256, 16), (3, 1, 64, 32)]
            for dtype in [torch.float32, *HALF_PRECISIONS]
        ),
    ],
)
def test_a_cache_in_8_bits(
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    termination: bool,
    device: torch.device,
) -> None:
    heads = range(kv_heads)
    counts = [[300 + head for head in heads], [64] * kv_heads, [WHOLE] * kv_heads, [WHOLE] * kv_heads, [1] * kv_heads]
    layer = Layer.random([310, 65, 1, 190, 7], counts, group, head_dim, page_size)
    narrow = [vectors.to(torch.float8_e4m3fn) for vectors in (layer.cache.keys, layer.cache.values)]
    layer = replace(layer, queries=layer.queries.to(dtype), cache=LayerCache(*narrow))
    # One that is never calm enough, so that rounding decides nothing.
    thresholds = [termination_at(0.0, 0.0, 1)] * 5 if termination else [None] * 5
    scale = head_dim**-0.5

    result = actual(layer, scale, thresholds if termination else None, device)

    assert_equal(result, expected(layer, scale, thresholds), 1e-5 if dtype == torch.float32 else 2e-2)
    assert result.counts[0, Count.CONTEXT_BYTES] == 310 * kv_heads * 2 * head_dim


@pytest.mark.parametrize("softmax", SOFTMAXES[1:])
@pytest.mark.parametrize("termination", [False, True])
@pytest.mark.parametrize(("group", "head_dim"), [(7, 96), (16, 64)])
def test_caps_and_sinks(group: int, head_dim: int, termination: bool, softmax: str, device: torch.device) -> None:
    layer = Layer.random([310, 1500, 190], [[300, 64], [WHOLE, 1100], [1, WHOLE]], group, head_dim)
    layer = replace(layer, cache=replace(layer.cache, softmax=random_softmax(softmax, 2 * group)))
    # With a sink an output grows with all that is read, and settles late.
    settling = termination_at(0.3, 0.01, 2)
    thresholds = [settling, settling, None] if termination else [None] * 3
    scale = head_dim**-0.5

    result = actual(layer, scale, thresholds if termination else None, device)

    assert_equal(result, expected(layer, scale, thresholds), 2e-5)
    assert bool(result.counts[:, Count.SKIPPED_TILES].any()) == termination


def test_a_cap_far_beyond_scores_changes_little_and_one_far_below_bounds_all(device: torch.device) -> None:
    layer = Layer.random([200], [[WHOLE]], group=4, head_dim=64)
    plain = actual(layer, 10.0, None, device)
    for cap, correct in ((1e4, plain.log_sum_exp), (1e-3, torch.full((1, 4), math.log(200)))):
        bounded = replace(layer, cache=replace(layer.cache, softmax=Softmax(cap)))
        torch.testing.assert_close(actual(bounded, 10.0, None, device).log_sum_exp, correct, atol=0.05, rtol=0)


def test_long_contexts_have_longer_splits(device: torch.device) -> None:
    layer = Layer.random([3000, 16600], [[WHOLE], [WHOLE]], group=3, head_dim=64)
    assert_equal(actual(layer, 0.1, None, device), expected(layer, 0.1, [None, None]), 1e-5)


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=3),
    left_out=st.lists(st.none() | st.integers(0, 50), min_size=3, max_size=3),
    thresholds=st.builds(
        termination_at, st.sampled_from([0.003, 0.03]), st.sampled_from([0.0003, 0.003]), st.integers(1, 4)
    ),
    plain=st.integers(0, 3),
    softmax=st.sampled_from(SOFTMAXES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=EXAMPLES)
def test_early_termination_reads_what_the_reference_reads(
    lengths: list[int],
    left_out: list[int | None],
    thresholds: EarlyTermination,
    plain: int,
    softmax: str,
    seed: int,
    device: torch.device,
) -> None:
    counts = [
        [WHOLE if n is None else max(1, length - n - 7 * head) for head in range(2)]
        for length, n in zip(lengths, left_out, strict=False)
    ]
    layer = Layer.random(lengths, counts, group=2, head_dim=64, seed=seed)
    layer = replace(layer, cache=replace(layer.cache, softmax=random_softmax(softmax, 4, seed)))
    of_rows = [None if row == plain else thresholds for row in range(len(lengths))]
    assume(least_margin(layer, 0.125, of_rows) > 1e-6)
    assert_equal(actual(layer, 0.125, of_rows, device), expected(layer, 0.125, of_rows), 2e-5)


def test_early_termination_in_several_splits(device: torch.device) -> None:
    layer = Layer.random([3000, 2100], [[WHOLE], [2075]], group=5, head_dim=96)
    thresholds = [SETTLING, SETTLING.model_copy(update={"patience": 6})]

    result = actual(layer, 0.1, thresholds, device)

    assert_equal(result, expected(layer, 0.1, thresholds), 2e-5)
    assert int(result.counts[:, 7].min()) > 0


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 256])
def test_the_probe_looks_where_the_reference_looks(head_dim: int, device: torch.device) -> None:
    """One dimension in each thirty-second of them changes from tile to tile: whether it is seen decides."""
    layer = Layer.random([1000, 1000], [[WHOLE], [WHOLE]], group=2, head_dim=head_dim)
    thresholds = [SETTLING, SETTLING]
    results = []
    for offset in range(math.ceil(head_dim / 32)):
        layer.cache.values[:] = 1.0
        dims = [dim for dim in range(head_dim) if dim % math.ceil(head_dim / 32) == offset]
        layer.cache.values[..., dims] = 3.0 * torch.randn(layer.cache.slots, layer.cache.kv_heads, 1)
        result = actual(layer, 0.1, thresholds, device)
        assert_equal(result, expected(layer, 0.1, thresholds), 2e-5)
        results.append(int(result.counts[:, Count.SKIPPED_TILES].sum()))
    assert max(results) > 0


@given(neighbours=neighbours(LONGEST // 3, HALF_PRECISIONS[-1]))
@settings(max_examples=EXAMPLES)
def test_a_row_gets_the_same_bits_alone_and_among_neighbours(neighbours: Neighbours, device: torch.device) -> None:
    assert_same_bits_alone(*neighbours, device)


@pytest.mark.parametrize("multiprocessors", [2, 7])
def test_a_row_gets_the_same_bits_however_many_programs_share_the_splits(
    multiprocessors: int, device: torch.device
) -> None:
    counts = [[WHOLE, 300], [1, 64], [ELSEWHERE, ELSEWHERE], [129, WHOLE]]
    layer = Layer.random([1100, 70, 20, 140], counts, group=2, head_dim=64, dtype=HALF_PRECISIONS[-1])
    usual, other = actual(layer, 0.125, None, device), actual(layer, 0.125, None, device, multiprocessors)
    attended = [0, 1, 3]
    assert torch.equal(other.output[attended], usual.output[attended])
    assert torch.equal(other.log_sum_exp[attended], usual.log_sum_exp[attended])
    assert torch.equal(other.counts, usual.counts)
    # What another kernel attends to is left alone.
    assert other.output[2].isnan().all()


def test_what_is_not_selected_may_hold_anything(device: torch.device) -> None:
    layer = Layer.random([100, 40], [[3], [WHOLE]], group=4, head_dim=64)
    correct = expected(layer, 0.125, [None, None])
    used = torch.cat([layer.slots[0, 0, :3], layer.context.slots[1, :40]])
    unused = torch.ones(layer.cache.slots, dtype=torch.bool)
    unused[used] = False
    layer.cache.keys[unused] = torch.nan
    layer.cache.values[unused] = torch.inf
    assert_equal(actual(layer, 0.125, None, device), correct, 1e-5)


def test_counts_are_added(device: torch.device) -> None:
    layer = Layer.random([100], [[30]], group=1, head_dim=64)
    batch = layer.batch(device)
    cache = LayerCache(layer.cache.keys.to(device), layer.cache.values.to(device))
    selection = DeviceSelection(layer.slots.int().to(device), layer.counts.int().to(device))
    output = torch.empty_like(layer.queries, device=device)
    for _ in range(3):
        buffers = AttendBuffers.empty(1, 1, cache)
        attend(layer.queries.to(device), cache, batch, selection, 0.125, None, buffers, output)
    assert batch.counts.tolist() == [[300, 90, 300 * 512, 90 * 512, 0, 0, 0, 0]]


def test_padding_is_one_token_of_slot_zero(device: torch.device) -> None:
    cache = random_cache(64, 2, 64)
    cache = LayerCache(cache.keys.to(device), cache.values.to(device))
    batch = DecodeBatch.empty(3, 64, 16, device)
    queries = random_queries(3, 4, 64).to(device)
    output = torch.empty_like(queries)
    buffers = AttendBuffers.empty(3, 4, cache)
    attend(queries, cache, batch, DeviceSelection.empty(3, 2, 8, device), 0.125, None, buffers, output)
    torch.testing.assert_close(output, cache.values[0].repeat_interleave(2, 0).expand(3, -1, -1))


def test_bytes_of_buffers() -> None:
    buffers = AttendBuffers.empty(2, 32, LayerCache(*torch.empty(2, 16, 8, 128)))
    partial = 2 * 32 * PARTIAL_SLOTS * 129 * 4
    assert buffers.bytes == partial + 2 * 32 * 4 + 2 * 8 * PARTIAL_SLOTS * 4


def _launch() -> None:
    """Attend at each of ``SHAPES``, of bfloat16, with 8 KV heads, on a device like a H100."""
    batch = DecodeBatch.empty(32, 1024, 16, torch.device("cpu"))
    selection = DeviceSelection.empty(32, 8, 256, torch.device("cpu"))
    for head_dim, group, termination in SHAPES:
        cache = LayerCache(*torch.empty(2, 64, 8, head_dim, dtype=torch.bfloat16))
        queries = torch.empty(32, 8 * group, head_dim, dtype=torch.bfloat16)
        reported = ReportedShares.empty(32, 8 * group, queries.device)
        thresholds = torch.empty(32, 3) if termination else None
        buffers = replace(AttendBuffers.empty(32, 8 * group, cache), multiprocessors=132)
        attend(queries, cache, batch, selection, 0.125, thresholds, buffers, torch.empty_like(queries), reported)


def _launch_with_caps_and_sinks() -> None:
    """The same with a cap, and with sinks: of the shapes of Gemma 2 and gpt-oss."""
    batch = DecodeBatch.empty(32, 1024, 16, torch.device("cpu"))
    selection = DeviceSelection.empty(32, 8, 256, torch.device("cpu"))
    for head_dim, group, termination, softmax in OTHER_SOFTMAXES:
        own = random_softmax(softmax, 8 * group)
        cache = LayerCache(*torch.empty(2, 64, 8, head_dim, dtype=torch.bfloat16), softmax=own)
        queries = torch.empty(32, 8 * group, head_dim, dtype=torch.bfloat16)
        thresholds = torch.empty(32, 3) if termination else None
        buffers = replace(AttendBuffers.empty(32, 8 * group, cache), multiprocessors=132)
        attend(queries, cache, batch, selection, 0.125, thresholds, buffers, torch.empty_like(queries))


def test_caps_and_sinks_fit_a_hopper_multiprocessor() -> None:
    compiled = compile_launches(_launch_with_caps_and_sinks)
    for (head_dim, group, termination, _), attending in zip(OTHER_SOFTMAXES, compiled[::2], strict=True):
        launch = Launch.of(head_dim, 2, group)
        programs = launch.programs_with_termination if termination else launch.programs
        assert attending.local_bytes == 0
        assert programs * attending.warps * 32 * attending.registers <= 64 << 10
        assert programs * (attending.shared_bytes + 1024) <= SHARED_LIMIT + 1024


def test_fits_a_hopper_multiprocessor() -> None:
    """As many programs as the launch counts on, without spills, with tiles loaded while others are attended to."""
    compiled = compile_launches(_launch)
    for (head_dim, group, termination), attending, merging in zip(SHAPES, compiled[::2], compiled[1::2], strict=True):
        launch = Launch.of(head_dim, 2, group)
        programs = launch.programs_with_termination if termination else launch.programs
        assert attending.local_bytes == merging.local_bytes == 0
        assert programs * attending.warps * 32 * attending.registers <= 64 << 10
        assert programs * (attending.shared_bytes + 1024) <= SHARED_LIMIT + 1024
        ahead = launch.tiles_ahead_with_termination if termination else launch.tiles_ahead
        # With one tile ahead, it is other programs that compute meanwhile.
        assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", attending.ptx))) >= min(ahead - 1, 1)
