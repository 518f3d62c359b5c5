"""What a CUDA server is made of: its kinds, the kinds of its batches, the memory it leaves for them."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_winnow.device.construction import enabled_kinds
from sglang_winnow.device.decode import Variant
from sglang_winnow.device.memory import fixed_bytes, index_bytes_of_slot
from sglang_winnow.device.variants import ANY, DENSE, variant_for, variants_of
from sglang_winnow.request_state import RequestState
from sglang_winnow.served_policies import ENVIRONMENT, served_policies
from winnow_kernels.decode.gpu_step import StepBuffers
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.declarations import DECLARATIONS, KINDS, LAYOUT
from winnow_kernels.policies.quoka.prefill.selection import SCORES_BYTES
from winnow_kernels.policies.snapkv.gpu_positions import OutOfPositionsError, StoredPositions

ALL = frozenset(KINDS)
LAYERS = 6


def test_all_kinds_are_served_unless_the_environment_names_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert enabled_kinds() == ALL
    monkeypatch.setenv(ENVIRONMENT, "tactic, snapkv,pyramidkv,dense")
    assert enabled_kinds() == {"tactic", "snapkv"}
    monkeypatch.setenv(ENVIRONMENT, "")
    assert enabled_kinds() == frozenset()


def test_on_a_gpu_a_policy_that_never_paid_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(type(DECLARATIONS["quest"]), "pays_on_gpu", False)
    assert "quest" not in served_policies()
    assert {"dense", "tactic"} < set(served_policies())
    monkeypatch.setenv(ENVIRONMENT, "quest")
    assert served_policies() == ("dense", "quest")


def test_an_unknown_policy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "quest,tactics")
    with pytest.raises(ValueError, match=r"WINNOW_POLICIES: no decode policy is called 'tactics'; there are dense, "):
        enabled_kinds()


@given(
    kinds=st.sets(st.sampled_from(sorted(ALL))),
    needed=st.sets(st.sampled_from(sorted(ALL))),
    ordered=st.booleans(),
    layers=st.sets(st.integers(0, LAYERS - 1)),
)
def test_a_batch_gets_the_first_variant_that_launches_what_it_needs(
    kinds: set[str], needed: set[str], ordered: bool, layers: set[int]
) -> None:
    variants = variants_of(kinds, LAYERS, delta_layers=(1, 4))
    needed &= kinds
    wanted = Variant(frozenset(needed), ordered, frozenset(layers if "delta" in needed else ()))
    label = variant_for(wanted, variants)
    if not needed and not ordered:
        assert label == DENSE
    elif len(needed) == 1 and not ordered and wanted.own_layers <= {1, 4}:
        assert label == next(iter(needed))
    else:
        assert label == ANY
    assert needed <= variants[label].kinds


@pytest.mark.parametrize("kinds", list(combinations(sorted(ALL), 2)))
def test_what_indexes_take_adds_up(kinds: tuple[str, str]) -> None:
    shape = PoolShape(layers=32, kv_heads=8, head_dim=128, element_size=2)
    own = [index_bytes_of_slot([family], shape, 16) for family in kinds]
    assert index_bytes_of_slot(kinds, shape, 16) == pytest.approx(sum(own))
    assert max(own) < 0.07 * shape.slot_bytes


def test_buffers_are_counted_without_being_made() -> None:
    shape = PoolShape(layers=2, kv_heads=2, head_dim=64, element_size=4)
    buffers = StepBuffers(LAYOUT, 3, 256, 16, shape.layers, shape.kv_heads, 192, torch.device("cpu"))
    none = fixed_bytes([], shape, query_heads=4, rows=3, longest=256, page_size=16)
    assert none > buffers.bytes
    assert fixed_bytes(ALL, shape, query_heads=4, rows=3, longest=256, page_size=16) > none
    # Scores of prefill take as much whatever the number of rows.
    twice = fixed_bytes([], shape, query_heads=4, rows=6, longest=256, page_size=16) - SCORES_BYTES
    assert twice > 1.9 * (none - SCORES_BYTES)


def request() -> RequestState:
    return RequestState(AttentionPolicy(), prompt_length=10)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=40))
def test_pieces_do_not_overlap_and_are_free_when_their_requests_are_gone(steps: list[tuple[int, int]]) -> None:
    capacity = 64
    pool = StoredPositions(6, 1, 2, torch.device("cpu"), capacity)
    states: dict[int, RequestState] = {}
    for number, (slot, kept) in enumerate(steps, start=1):
        states.pop(slot, None)
        states[slot] = request()
        try:
            pool.keep(states[slot], slot, torch.full((2 * kept,), number, dtype=torch.int32), torch.full((1, 2), kept))
        except OutOfPositionsError:
            del states[slot]
            continue
        for other in states:
            first, size = int(pool.offsets[other, 0, 0]), int(pool.kept[other].sum())
            assert len(pool.positions[first : first + size].unique()) == 1
    # Who comes back with as many after a retraction gets no second piece.
    free = list(pool._free)
    for slot in list(states):
        kept = int(pool.kept[slot, 0, 0])
        pool.keep(states[slot], slot, torch.full((2 * kept,), 99, dtype=torch.int32), torch.full((1, 2), kept))
    assert pool._free == free
    states.clear()
    pool.keep(request(), 0, torch.zeros(capacity, dtype=torch.int32), torch.full((1, 2), capacity // 2))
