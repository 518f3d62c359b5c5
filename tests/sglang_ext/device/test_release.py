"""Prompts that are released on the device: the steps are those without, and read nothing of what was given back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from sglang_winnow.device.decode import DeviceDecode
from tests.policy_rows import VOTED, small_policies
from tests.sglang_ext.device.test_decode import (
    LAYERS,
    LONGEST,
    PAGE_SIZE,
    TERMINATION,
    Server,
    Share,
    by_torch,
    device_decode,
    in_8_bits,
    of_field,
    on_device,
    policies_act_at_every_length,
)
from winnow_kernels.decode.ranks import Ranks
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.snapkv.gpu_positions import StoredPositions
from winnow_kernels.policies.snapkv.selector import StoredSelector

pytestmark = pytest.mark.usefixtures(policies_act_at_every_length.__name__)

SMALL = small_policies()


def _voted(name: str, **others: Any) -> dict[str, Any]:
    return {"decode": {**SMALL[name]["decode"], **others}}


KEEPING: Mapping[str, Mapping[str, Any]] = {
    **{name: _voted(name) for name in VOTED},
    "terminated": _voted("ada_snapkv") | {"early_termination": TERMINATION},
    "kept": _voted("snapkv"),
    "too much": _voted("snapkv", budget=170),
    "quest": SMALL["quest"],
    "dense": {},
}
RELEASING: Mapping[str, Mapping[str, Any]] = {
    **KEEPING,
    **{name: _voted(name, release=True) for name in VOTED},
    "terminated": _voted("ada_snapkv", release=True) | {"early_termination": TERMINATION},
    "too much": _voted("snapkv", budget=170, release=True),
}
LENGTHS = [210 - 7 * place for place in range(len(KEEPING))]


def _servers(
    names: list[str], lengths: list[int], device: torch.device, stored: Any = Tensor.clone
) -> tuple[Server, Server, DeviceDecode]:
    keeping, releasing = (
        Server(names, lengths, device, policies=policies, stored=stored) for policies in (KEEPING, RELEASING)
    )
    return keeping, releasing, device_decode(releasing)


def _step(keeping: Server, releasing: Server, decode: DeviceDecode, step: int) -> None:
    expected = by_torch(keeping, step)
    for layer, output in enumerate(on_device(releasing, decode, step, padding=1)):
        torch.testing.assert_close(output, expected[layer], rtol=1e-4, atol=1e-4)


def _spoil(server: Server, slots: Tensor) -> None:
    """Write to slots that are free what would show in every output, as their next owner might."""
    for cache in server.caches:
        for half in (cache.keys, cache.values):
            half[slots] = torch.nan


@pytest.mark.parametrize("stored", [Tensor.clone, pytest.param(in_8_bits, marks=pytest.mark.full)])
def test_steps_are_those_without_release_and_read_nothing_that_was_given_back(
    stored: Any, device: torch.device
) -> None:
    names = list(KEEPING)
    keeping, releasing, decode = _servers(names, LENGTHS, device, stored)
    before = releasing.table.clone()
    # Of the first, pages of the prompt are in the prefix cache.
    releasing.states[0].shared = 2 * PAGE_SIZE
    for step in range(2):
        _step(keeping, releasing, decode, step)
        if step == 0:
            for name, state, slot in zip(names, releasing.states, releasing.request_slots.tolist(), strict=True):
                if name in {"kept", "quest", "dense"}:
                    assert state.released is None
                    continue
                assert state.released is not None
                prompt = before[slot, : state.prompt_length // PAGE_SIZE * PAGE_SIZE].tolist()
                row = releasing.table[slot, : len(prompt)].tolist()
                free = [] if state.released.slots is None else state.released.slots.tolist()
                # What it shares and what it keeps comes first, and whole pages are given back behind.
                assert (row, free) == (
                    prompt[: len(prompt) - len(free)] + [0] * len(free),
                    prompt[len(prompt) - len(free) :],
                )
                assert len(free) == state.released.tokens
                assert (len(free) > 0) == (name != "too much")
                _spoil(releasing, torch.tensor(free, dtype=torch.int64, device=device))
            # As the kernel that moves them notes.
            assert (releasing.indexes.generations.counts > keeping.indexes.generations.counts).any()
        keeping.grow()
        releasing.grow()
    wanted, got = (server.statistics.rows[1 : len(names) + 1].cpu() for server in (keeping, releasing))
    for counted in Field:
        torch.testing.assert_close(
            got[:, counted], wanted[:, counted], rtol=1e-5, atol=1e-5, msg=partial(of_field, counted)
        )


def test_a_prompt_that_was_retracted_is_released_anew(device: torch.device) -> None:
    names = ["snapkv", "ada_snapkv"]
    keeping, releasing, decode = _servers(names, [208, 180], device)
    caches = [(cache.keys.clone(), cache.values.clone()) for cache in releasing.caches]
    table = releasing.table.clone()
    for step in range(2):
        _step(keeping, releasing, decode, step)
        assert all(state.released is not None and state.released.tokens > 0 for state in releasing.states)
        # As if both were prefilled anew, each to the pages that the other had.
        for cache, halves in zip(releasing.caches, caches, strict=True):
            for half, was in zip((cache.keys, cache.values), halves, strict=True):
                half.copy_(was)
        releasing.table.copy_(table)
        keeping.swap()
        releasing.swap()
        assert all(state.released is None for state in releasing.states)


def test_a_request_without_room_for_its_positions_gives_nothing_back(device: torch.device) -> None:
    _, releasing, decode = _servers(["snapkv"], [208], device)
    selector, table = decode._selectors["snapkv"], releasing.table.clone()
    assert isinstance(selector, StoredSelector)
    for step, capacity in enumerate((8, 8 * LONGEST)):
        selector._stored = StoredPositions(len(table), LAYERS, releasing.caches[0].kv_heads, device, capacity=capacity)
        on_device(releasing, decode, step, padding=0)
        assert releasing.states[0].released is None
        # Prefilled anew in the same slot, it stays dense, whatever room there is.
        releasing.states[0].begin_prefill(207)
    assert torch.equal(releasing.table, table)


def test_ranks_release_as_many_tokens(device: torch.device) -> None:
    """Each keeps as many slots as the one whose KV heads need most."""

    def as_another_rank(numbers: Tensor, operation: ReduceOp.RedOpType) -> None:
        assert operation == ReduceOp.MAX
        numbers.clamp_(min=100)

    share = Share(slice(None), slice(None), Ranks(0, as_another_rank))
    server = Server(["ada_snapkv"], [208], device, share, policies=RELEASING)
    on_device(server, device_decode(server), 0, padding=0)
    released = server.states[0].released
    assert released is not None
    assert released.tokens == 192 - 112
