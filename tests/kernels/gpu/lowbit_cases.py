"""Layers of the low-bit policies on the device, selected in by their kernels and by the references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.coded_cases import never
from tests.kernels.cuda_on_host.module import loaded_on_host
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.gpu.selectors import cache_on, check_untouched, on_device, untouched
from winnow_kernels.attend.gather import Meter
from winnow_kernels.batch import NO_MASS, WHOLE_TO_THE_END, Count, DeviceSelection
from winnow_kernels.cache import Context, LayerCache, widened_dtype
from winnow_kernels.cuda.module import loaded
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_k.reference import LowBitTopKStep
from winnow_kernels.policies.lowbit_top_p.aim import aimed_share
from winnow_kernels.policies.lowbit_top_p.gpu.cuda.arguments import Sizes
from winnow_kernels.policies.lowbit_top_p.gpu.cuda.kernels import CudaKernels, serves
from winnow_kernels.policies.lowbit_top_p.gpu.layer import Layer
from winnow_kernels.policies.lowbit_top_p.gpu.selection import select
from winnow_kernels.policies.lowbit_top_p.gpu.state import Anchors, Policies, Scratch
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_kernels.policies.lowbit_top_p.reference import LowBitTopPStep

DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
Parameters = LowBitTopP | LowBitTopK


@dataclass(frozen=True)
class Asked:
    """What a row asks for, and whether early termination makes the order of its selection matter."""

    parameters: Parameters
    ordered: bool = False

    @property
    def most(self) -> int:
        return (self.parameters.max_tokens or 0) if isinstance(self.parameters, LowBitTopP) else 0


@dataclass(frozen=True)
class Case:
    """Rows in a layer.

    Attributes:
        cache: of the layer.
        context: of the rows.
        index: codes of the pool's keys.
        queries: [rows, query heads, head dim].
        asked: by each row; None in rows of other kinds.
        in_cuda: whether CUDA C++ lists and takes, on a CPU too, or Triton.
    """

    cache: LayerCache
    context: Context
    index: KeyCodes
    queries: Tensor
    asked: Sequence[Asked | None]
    in_cuda: bool = False

    @classmethod
    def of(
        cls,
        device: torch.device,
        lengths: Sequence[int],
        asked: Sequence[Asked | None],
        kv_heads: int = 1,
        group: int = 2,
        head_dim: int = 64,
        bits: int = 2,
        page_size: int = 16,
        sharpness: float = 2.0,
        seed: int = 0,
        *,
        in_cuda: bool = False,
        stored: torch.dtype | None = None,
    ) -> Case:
        # The interpreter multiplies no half precision, and CUDA C++ nothing else.
        stored = stored or (torch.bfloat16 if in_cuda else DTYPE)
        dtype = widened_dtype(stored)
        slots = (sum(-(-length // page_size) for length in lengths) + 1) * page_size
        cache = cache_on(device, random_cache(slots, kv_heads, head_dim, seed, stored))
        context = scattered_context(lengths, slots, page_size, seed)
        queries = sharpness * random_queries(len(lengths), kv_heads * group, head_dim, seed + 1)
        case = cls.with_keys(cache, context, queries.to(device, dtype), asked, bits, page_size)
        return replace(case, in_cuda=in_cuda)

    @classmethod
    def with_keys(
        cls,
        cache: LayerCache,
        context: Context,
        queries: Tensor,
        asked: Sequence[Asked | None],
        bits: int = 2,
        page_size: int = 16,
    ) -> Case:
        device = queries.device
        index = KeyCodes([cache], PageGenerations(cache.slots, page_size, device), bits=bits)
        index.ensure(torch.arange(cache.slots // page_size, device=device))
        on_it = Context(context.slots.to(device), context.lengths.to(device))
        return cls(cache, on_it, index, queries, asked)

    def row(self, row: int) -> Case:
        """Return one of the rows alone."""
        return replace(self, context=self.context.rows([row]), queries=self.queries[[row]], asked=[self.asked[row]])

    @property
    def scale(self) -> float:
        return self.cache.head_dim**-0.5

    @property
    def page_size(self) -> int:
        return self.index.generations.page_size

    @property
    def by_key(self) -> bool:
        return any(own is not None and isinstance(own.parameters, LowBitTopK) for own in self.asked)

    def no_anchors(self) -> Anchors:
        """Return those of requests of which nothing is known; their slots are not the rows' numbers."""
        rows = len(self.asked)
        slots = torch.arange(rows, device=self.queries.device).flip(0) + 1
        return Anchors.empty(rows + 2, self.queries.shape[1], self.cache.kv_heads, slots)


@dataclass(frozen=True)
class Selected:
    """What kernels have left.

    Attributes:
        selection: of all rows.
        beliefs: float32 [rows, query heads, 2].
        capped: int32 [rows].
        read_bytes: int64 [rows].
        scratch: of the last rows.
        anchors: of the layer.
    """

    selection: DeviceSelection
    beliefs: Tensor
    capped: Tensor
    read_bytes: Tensor
    scratch: Scratch
    anchors: Anchors


def selected(
    case: Case, anchors: Anchors | None = None, rows_at_once: int | None = None, width: int | None = None
) -> Selected:
    """Select as a server does, ``rows_at_once``, all by default."""
    device, rows, kv_heads = case.queries.device, len(case.asked), case.cache.kv_heads
    batch = on_device(case.context, device, page_size=case.page_size)
    group = case.queries.shape[1] // kv_heads
    at_once = rows_at_once or rows
    scratch = Scratch.empty(at_once, kv_heads, group, case.cache.head_dim, batch.longest, device, with_keys=case.by_key)
    cuda = cuda_kernels(case, at_once, scratch.tokens) if case.in_cuda else None
    policies = _policies(case)
    selection = untouched(batch, kv_heads, width or batch.longest)
    beliefs = torch.full((rows, case.queries.shape[1], 2), NO_MASS, device=device)
    capped = torch.zeros(rows, dtype=torch.int32, device=device)
    anchors = anchors or case.no_anchors()
    for begin in range(0, rows, at_once):
        own = slice(begin, begin + at_once)
        select(
            Layer(
                0,
                case.queries[own],
                case.cache,
                case.index,
                batch[own],
                Policies(*(numbers[own] for numbers in policies)),
                case.scale,
            ),
            scratch,
            anchors._replace(slots=anchors.slots[own]),
            DeviceSelection(selection.slots[own], selection.counts[own]),
            beliefs[own],
            capped[own],
            in_order=any(asked is not None and (asked.ordered or asked.most > 0) for asked in case.asked),
            by_key=case.by_key,
            cuda=cuda,
        )
    if cuda:
        assert not cuda.lists.published.any()
        assert not scratch.any_open
    for name in ("histograms", "key_histograms", "met"):
        assert not getattr(scratch, name).any(), name
    counted = batch.counts.clone()
    counted[:, Count.READ_BYTES] = 0
    assert not counted.any()
    return Selected(selection, beliefs, capped, batch.counts[:, Count.READ_BYTES], scratch, anchors)


def cuda_kernels(case: Case, rows: int, tokens: int) -> CudaKernels:
    """Return the kernels in CUDA C++ for a case's sizes: on its GPU, or compiled for this CPU."""
    device, kv_heads = case.queries.device, case.cache.kv_heads
    cache = case.cache
    sizes = Sizes(cache.head_dim, case.queries.shape[1] // kv_heads, kv_heads, case.page_size, cache.keys.dtype)
    assert serves(sizes, case.index.bits)
    return CudaKernels.on(device, sizes, rows, tokens, loaded if device.type == "cuda" else loaded_on_host)


def _policies(case: Case) -> Policies:
    device = case.queries.device
    numbers = torch.zeros(6, len(case.asked), dtype=torch.int32)
    shares = torch.zeros(len(case.asked), dtype=torch.float64)
    for row, (asked, length) in enumerate(zip(case.asked, case.context.lengths.tolist(), strict=True)):
        if asked is None:
            continue
        own, least, budget = asked.parameters, 0, 0
        if isinstance(own, LowBitTopP):
            shares[row], least = aimed_share(own.p, case.index.bits), own.min_tokens
        else:
            budget = own.tokens(length - 1)
        numbers[:, row] = torch.tensor([1, own.sinks, least, asked.most, budget, int(asked.ordered)])
    acts, sinks, least_tokens, most, budgets, by_score = numbers.to(device)
    return Policies(acts, shares.to(device), sinks, least_tokens, most, budgets, by_score)


def _reference(case: Case, row: int) -> LowBitTopKStep | LowBitTopPStep:
    asked = case.asked[row]
    assert asked is not None
    # On a GPU what has a cap is in order, too.
    termination = never(1) if asked.ordered or asked.most else None
    context, own = case.context.rows([row]), asked.parameters
    if isinstance(own, LowBitTopK):
        return LowBitTopKStep(context, case.scale, termination, [own], case.index)
    return LowBitTopPStep(context, case.scale, termination, [own], case.index)


def check(case: Case, got: Selected) -> None:
    """Compare all rows with the reference's."""
    device = case.queries.device
    for row, asked in enumerate(case.asked):
        if asked is None:
            check_untouched(got.selection, row)
            assert (got.beliefs[row] == NO_MASS).all()
            assert not got.capped[row]
            assert not got.read_bytes[row]
            continue
        step, meter = _reference(case, row), Meter(1, device)
        expected = step.select(0, case.queries[[row]], case.cache, meter)
        assert int(got.read_bytes[row]) == int(meter.read_bytes)
        if isinstance(step, LowBitTopPStep):
            assert bool(got.capped[row]) == bool(step.capped[0])
        length = int(case.context.lengths[row])
        if len(step.requests[0].kept) > 0.75 * length:
            # Nothing is scored: the rows' counts stand for everything already.
            check_untouched(got.selection, row)
            continue
        beliefs = got.beliefs[row].unflatten(0, (case.cache.kv_heads, -1)).double()
        for head in range(case.cache.kv_heads):
            count = int(expected.counts[0, head])
            if count == length:
                assert int(got.selection.counts[row, head]) == WHOLE_TO_THE_END
                assert (beliefs[head].float() == NO_MASS).all()
                continue
            assert int(got.selection.counts[row, head]) == count
            slots = got.selection.slots[row, head, :count].tolist()
            assert slots == expected.slots[0, head, :count].tolist()
            believed = torch.stack((step._choice.selected[0, head], step._choice.rest[0, head]), -1)
            total = believed.exp2().sum(-1, keepdim=True).log2()
            # A score in the middle between two steps may be rounded to either, which is a twelfth of a token's mass.
            torch.testing.assert_close((beliefs[head] - total).exp2(), (believed - total).exp2(), rtol=1e-4, atol=1e-3)
