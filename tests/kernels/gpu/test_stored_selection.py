"""SnapKV's and PyramidKV's selector on a GPU against the torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.selectors import check_equal, check_untouched, check_whole, on_device, untouched
from tests.kernels.parameters import snapkv_parameters
from winnow_kernels.attend.gather import Meter
from winnow_kernels.policies.snapkv.gpu import StoredRows, select
from winnow_kernels.policies.snapkv.observation import ObservationBuffer
from winnow_kernels.policies.snapkv.reference import SnapKVState, SnapKVStep

SLOTS, KV_HEADS, LAYERS = 4096, 2, 3


class _Ragged(SnapKVState):
    """Every KV head keeps a token less than the one before."""

    def counts(self, layer: int) -> Tensor:
        return super().counts(layer) - torch.arange(KV_HEADS)


def _state(prompt_length: int, kept: int, seed: int, state_of: type[SnapKVState] = SnapKVState) -> SnapKVState:
    """A request that keeps ``kept`` tokens of its prompt in the first layer, one less in each after."""
    state = state_of(snapkv_parameters(kept, 5, 8), ObservationBuffer(8, prompt_length))
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        orders = [torch.randperm(prompt_length, generator=generator) for _ in range(KV_HEADS)]
        state.kept[layer] = torch.stack(orders)[:, : kept - layer]
    return state


def _rows(states: list[SnapKVState | None], device: torch.device, capacity: int = 10_000) -> StoredRows:
    rows = StoredRows.empty(len(states), LAYERS, KV_HEADS, capacity, device)
    used = 7
    for row, state in enumerate(states):
        if state is not None:
            rows.prompt_lengths[row] = state.prompt_length
            for layer, kept in state.kept.items():
                for head, (own, count) in enumerate(zip(kept, state.counts(layer).tolist(), strict=True)):
                    rows.offsets[row, layer, head], rows.kept[row, layer, head] = used, count
                    rows.positions[used : used + count] = own[:count].to(device, torch.int32)
                    used += count
    return rows


def test_rows_are_the_references_and_other_families_stay_untouched(device: torch.device) -> None:
    context = scattered_context([1500, 60, 101, 300, 20, 170, 400], SLOTS)
    states = [_state(300, 40, 0), None, _state(100, 50, 1), _state(170, 9, 2), _state(19, 19, 3), _state(105, 30, 4)]
    states.append(_state(200, 90, 5, _Ragged))
    batch = on_device(context, device)
    rows = _rows(states, device)
    cache, queries = random_cache(SLOTS, KV_HEADS, 8), random_queries(1, KV_HEADS, 8)
    for layer in range(LAYERS):
        selection = untouched(batch, KV_HEADS, 1280)
        select(layer, batch, rows, selection)
        for row, state in enumerate(states):
            if state is None:
                check_untouched(selection, row)
                continue
            step = SnapKVStep(context.rows([row]), 1.0, None, [state])
            check_equal(selection, row, step.select(layer, queries, cache, Meter(1, torch.device("cpu"))))
    assert (batch.counts == 0).all()


def test_a_selection_that_has_no_room_is_the_whole_context(device: torch.device) -> None:
    batch = on_device(scattered_context([190, 189], SLOTS), device)
    selection = untouched(batch, KV_HEADS, 100)
    select(0, batch, _rows([_state(100, 11, 0), _state(100, 11, 0)], device), selection)
    check_whole(selection, 0)
    assert (selection.counts[1] == 100).all()


def test_a_long_selection_is_the_references(device: torch.device) -> None:
    """Products of its positions are beyond 32 bits."""
    length, kept = 61_000, 50_000
    context, state = scattered_context([length], 2 * length), _state(60_000, kept, 0)
    batch = on_device(context, device)
    selection = untouched(batch, KV_HEADS, length)
    select(0, batch, _rows([state], device, LAYERS * KV_HEADS * kept + 7), selection)
    step = SnapKVStep(context.rows([0]), 1.0, None, [state])
    cache, queries = random_cache(16, KV_HEADS, 8), random_queries(1, KV_HEADS, 8)
    check_equal(selection, 0, step.select(0, queries, cache, Meter(1, torch.device("cpu"))))
