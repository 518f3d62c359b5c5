"""Pages that checks have found, in the decode steps of a server on a GPU."""

from __future__ import annotations

import math
import weakref
from typing import ClassVar, Final

import torch
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.attend.gpu_check import CheckPartial, PageSums
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Entry, Selector, Server
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.request import Request
from winnow_kernels.policies.snapkv import gpu as stored_gpu
from winnow_kernels.policies.snapkv.gpu import StoredRows
from winnow_kernels.policies.snapkv.gpu_positions import StoredPositions
from winnow_kernels.policies.verified_pages import gpu
from winnow_kernels.policies.verified_pages.gpu import BudgetRows, KeptPages
from winnow_kernels.policies.verified_pages.parameters import VerifiedPages
from winnow_kernels.policies.verified_pages.reference import PageBudget

KIND: Final = "verified_pages"
CAPACITY: Final = 2**23
"""Pages of a server: of 540 requests of a Llama-3.1-8B that keep 1,024 tokens for each KV head."""
MASSES_BYTES: Final = 2**26
"""Of the masses that wait until pages are chosen; more where one layer of the largest batch has more."""


class CheckedPagesSelector(Selector):
    """What the last check of each request has chosen, and everything behind it."""

    observes_checks: ClassVar[bool] = True

    def __init__(self, server: Server) -> None:
        caches, step = server.caches, server.step
        layers, kv_heads = len(caches), caches[0].kv_heads
        device = step.slots.device
        self._page_size = step.batch.page_size
        self._query_heads = server.query_heads
        self._stored = StoredPositions(server.requests, layers, kv_heads, device, CAPACITY)
        self._since = torch.zeros(server.requests, dtype=torch.int32, device=device)
        empty = StoredRows.empty(step.rows, layers, kv_heads, 1, device)
        self._offsets, self._kept, self._since_of_rows = empty.offsets, empty.kept, empty.prompt_lengths
        pages = step.batch.page_table.shape[1]
        self._sums = torch.empty(SCRATCH_BYTES // torch.float32.itemsize, dtype=torch.float32, device=device)
        masses = max(step.rows * kv_heads * pages, MASSES_BYTES // torch.float32.itemsize)
        self._masses = torch.empty(masses, dtype=torch.float32, device=device)
        self._entered: dict[int, weakref.ref[Request]] = {}

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        entered = self._entered.get(slot)
        if entered is not None and entered() is request:
            # It has rested: what was chosen are positions, and stays true.
            return Entry()
        assert isinstance(request.decode, VerifiedPages)
        budget = PageBudget.of(request.decode, self._page_size)
        _, layers, kv_heads = self._stored.kept.shape
        room = budget.sinks + budget.most
        pages = torch.arange(room, dtype=torch.int32, device=context.device).repeat(layers * kv_heads)
        self._stored.keep(request, slot, pages, torch.full((layers, kv_heads), room))
        first = budget.first_unchecked(int(context.lengths[0]), self._page_size)
        self._stored.kept[slot] = min(budget.sinks, first)
        self._since[slot] = first * self._page_size
        self._entered[slot] = weakref.ref(request)
        return Entry()

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        rows, slots = step.rows, step.request_slots
        torch.index_select(self._stored.offsets, 0, slots, out=self._offsets[:rows])
        torch.index_select(self._stored.kept, 0, slots, out=self._kept[:rows])
        acts = step.parameters.own(KIND, "recent") > 0
        torch.mul(self._since[slots], acts, out=self._since_of_rows[:rows])

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        del queries, cache
        of_rows = StoredRows(
            self._stored.positions,
            self._offsets[: step.rows],
            self._kept[: step.rows],
            self._since_of_rows[: step.rows],
        )
        stored_gpu.select(layer, step.batch, of_rows, step.selection(layer), self._page_size)

    def rows_observed(self, new_tokens: int, step: Step) -> int:
        pages, tiles = self._pages_and_tiles(step)
        bytes_of_row = new_tokens * self._query_heads * (pages + tiles) * torch.float32.itemsize
        return max(1, SCRATCH_BYTES // bytes_of_row)

    def page_sums(self, new_tokens: int, step: Step) -> PageSums:
        pages, _ = self._pages_and_tiles(step)
        highest = self._sums[step.rows * new_tokens * self._query_heads * pages :]
        return PageSums(self._sums, highest, step.parameters.own(KIND, "recent"), pages)

    def observe(self, layer: int, new_tokens: int, part: Step, rows: slice, whole: Step, partial: CheckPartial) -> None:
        masses = self._masses_of(whole)[layer % self._layers_at_once(whole), rows]
        sums = self.page_sums(new_tokens, part)
        gpu.weigh(new_tokens, part.batch, _budgets(part), sums, part.checked, partial.totals, masses)

    def observed(self, layer: int, new_tokens: int, step: Step) -> None:
        at_once, layers = self._layers_at_once(step), self._stored.kept.shape[1]
        of_launch = layer % at_once + 1
        if of_launch < at_once and layer < layers - 1:
            return
        gpu.keep(
            layer - of_launch + 1,
            new_tokens,
            step.batch,
            _budgets(step),
            self._masses_of(step)[:of_launch],
            step.request_slots,
            KeptPages(self._stored.positions, self._stored.offsets, self._stored.kept, self._since),
        )

    def _pages_and_tiles(self, step: Step) -> tuple[int, int]:
        """Return how many pages a row and KV head has, and how many tiles of attention."""
        pages = step.batch.page_table.shape[1]
        return pages, -(-pages * self._page_size // TILE)

    def _layers_at_once(self, step: Step) -> int:
        of_layer = step.rows * self._stored.kept.shape[2] * step.batch.page_table.shape[1]
        return min(self._stored.kept.shape[1], len(self._masses) // of_layer)

    def _masses_of(self, step: Step) -> Tensor:
        """Return scratch, float32 [layers, rows, KV heads, pages]."""
        pages, kv_heads = step.batch.page_table.shape[1], self._stored.kept.shape[2]
        shape = (self._layers_at_once(step), step.rows, kv_heads, pages)
        return self._masses[: math.prod(shape)].view(shape)


def _budgets(step: Step) -> BudgetRows:
    own = step.parameters
    return BudgetRows(own.own(KIND, "recent"), own.own(KIND, "most"), own.sinks)
