"""What a CUDA server is made of: its kinds, the kinds of its batches, the memory it leaves for them."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn

from sglang_winnow import audit_share, graph_sets, key_bits
from sglang_winnow.device import backend as backend_module
from sglang_winnow.device import memory
from sglang_winnow.device.backend import WinnowDeviceBackend
from sglang_winnow.device.construction import enabled_kinds, width_of
from sglang_winnow.device.decode import Variant
from sglang_winnow.device.memory import audit_bytes, check_bytes, fixed_bytes
from sglang_winnow.device.reserved_indexes import reserved_indexes
from sglang_winnow.device.variants import DENSE, variant_for, variants_of
from sglang_winnow.graph_sets import GraphSet
from sglang_winnow.metrics import Metrics
from sglang_winnow.refusals import PAGE_SIZES_ON_CUDA
from sglang_winnow.request_state import RequestState
from sglang_winnow.served_policies import served_policies
from winnow_kernels.decode.gpu_step import StepBuffers
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import IndexSettings
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.declarations import DECLARATIONS, KINDS, LAYOUT
from winnow_kernels.policies.quoka.prefill.selection import SCORES_BYTES
from winnow_kernels.policies.registry import DECODE_POLICIES, INDEXED_BY_DEFAULT, POLICIES_SETTING
from winnow_kernels.policies.snapkv.gpu_positions import OutOfPositionsError, StoredPositions

ALL = frozenset(KINDS)
LAYERS = 6


def test_on_a_cpu_all_kinds_are_served_unless_the_environment_names_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICIES_SETTING, raising=False)
    assert enabled_kinds(verifies=True) == ALL
    monkeypatch.setenv(POLICIES_SETTING, "tactic, snapkv,pyramidkv,dense")
    assert enabled_kinds(verifies=True) == {"tactic", "snapkv"}
    monkeypatch.setenv(POLICIES_SETTING, "")
    assert enabled_kinds(verifies=True) == frozenset()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, as far as anyone asks, and no policy in the environment."""
    monkeypatch.delenv(POLICIES_SETTING, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_a_policy_that_never_paid_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(DECLARATIONS["snapkv"]), "pays_on_gpu", False)
    assert "snapkv" not in served_policies(verifies=True)
    assert {"dense", "delta"} < set(served_policies(verifies=True))
    monkeypatch.setenv(POLICIES_SETTING, "snapkv")
    assert served_policies(verifies=True) == ("dense", "snapkv")


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_what_drafts_alone_is_served_where_drafts_are_checked() -> None:
    assert set(served_policies(verifies=True)) - set(served_policies(verifies=False)) == {"verified_pages"}


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_a_policy_whose_index_no_preset_needs_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    served = set(served_policies(verifies=True))
    indexes = {DECLARATIONS[name].index for name in INDEXED_BY_DEFAULT}
    for name in DECODE_POLICIES:
        declared = DECLARATIONS[name]
        assert (name in served) == (declared.pays_on_gpu and declared.index in {None, *indexes})
    left_out = set(DECODE_POLICIES) - served
    assert any(DECLARATIONS[name].index is not None for name in left_out)
    monkeypatch.setenv(POLICIES_SETTING, ",".join(left_out))
    assert set(served_policies(verifies=True)) == {"dense", *left_out}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("page_size", PAGE_SIZES_ON_CUDA)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_by_default_indexes_take_12_percent_of_the_cache_at_most(head_dim: int, page_size: int) -> None:
    shape = PoolShape(layers=32, kv_heads=8, head_dim=head_dim, element_size=2)
    reserved = reserved_indexes(served_policies(verifies=True), shape, page_size)
    assert {name for index in reserved for name in index.policies} >= set(INDEXED_BY_DEFAULT)
    assert sum(index.share for index in reserved) <= 0.12


def test_an_unknown_policy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICIES_SETTING, "quest,tactics")
    with pytest.raises(ValueError, match=r"WINNOW_POLICIES: no decode policy is called 'tactics'; there are dense, "):
        enabled_kinds(verifies=True)


def test_what_may_have_been_released_is_never_attended_to_whole() -> None:
    assert width_of({"quest", "snapkv"}, 4096) == 4096
    assert width_of({"quest", "tactic"}, 4096) == 3072


KINDS_SERVED = st.sets(st.sampled_from(sorted(ALL)))


def variants_drawn(data: st.DataObject, kinds: set[str]) -> dict[str, Variant]:
    sets = st.builds(
        GraphSet, st.frozensets(st.sampled_from(sorted(kinds))) if kinds else st.just(frozenset()), st.booleans()
    )
    profile = data.draw(st.sampled_from([(), (1, 4)]))
    return variants_of(kinds, data.draw(st.lists(sets, max_size=6)), LAYERS, profile, audits=data.draw(st.booleans()))


@given(
    data=st.data(),
    kinds=KINDS_SERVED,
    needed=KINDS_SERVED,
    ordered=st.booleans(),
    layers=st.sets(st.integers(0, LAYERS - 1)),
)
def test_a_batch_gets_the_smallest_variant_that_launches_what_it_needs(
    data: st.DataObject, kinds: set[str], needed: set[str], ordered: bool, layers: set[int]
) -> None:
    variants = variants_drawn(data, kinds)
    needed &= kinds
    wanted = Variant(frozenset(needed), ordered, frozenset(layers if "delta" in needed else ()))
    if not wanted.is_dense and any(variant.audited for variant in variants.values()):
        wanted = replace(wanted, audited=data.draw(st.booleans()))
    chosen = variants[variant_for(wanted, variants)]
    assert chosen.covers(wanted)
    assert chosen.audited == wanted.audited
    assert not any(other != chosen and chosen.covers(other) and other.covers(wanted) for other in variants.values())
    assert all(len(chosen.kinds) <= len(other.kinds) for other in variants.values() if other.covers(wanted))


@given(data=st.data(), kinds=KINDS_SERVED)
def test_a_variant_is_there_once_and_each_kind_has_its_own(data: st.DataObject, kinds: set[str]) -> None:
    variants = variants_drawn(data, kinds)
    assert len(set(variants.values())) == len(variants)
    assert next(iter(variants)) == DENSE
    assert variants[DENSE].is_dense
    for kind in kinds:
        assert variants[kind].kinds == {kind}
        assert not variants[kind].ordered
        assert not variants[kind].audited
    twins = {replace(variant, audited=False) for variant in variants.values() if variant.audited}
    others = {variant for variant in variants.values() if not (variant.audited or variant.is_dense)}
    assert twins in (set(), others)
    layers = frozenset(range(LAYERS) if "delta" in kinds else ())
    assert list(variants.values())[-1].covers(Variant(frozenset(kinds), True, layers))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("delta_layers", "count"), [((), 11), ((1, 4), 12)])
def test_by_default_a_server_captures_few_graphs(
    delta_layers: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(graph_sets.ENVIRONMENT, raising=False)
    kinds = enabled_kinds(verifies=False)
    variants = variants_of(kinds, graph_sets.graph_sets(served_policies(verifies=False)), LAYERS, delta_layers)
    # Dense, each alone, two sets of the presets', all with and without early termination, and all in any layers.
    assert len(variants) == 1 + len(kinds) + 2 + 2 + bool(delta_layers) == count
    assert {"dense", "quoka", "lowbit_top_p+early_termination", "all", "all+early_termination"} < variants.keys()
    assert ("all+early_termination+any_layers" in variants) == bool(delta_layers)
    own_layers = {variants[label].own_layers for label in ("delta", "all", "all+early_termination")}
    assert own_layers == {frozenset(delta_layers or range(LAYERS))}
    assert variants["quoka"].own_layers == frozenset()
    audited = variants_of(
        kinds, graph_sets.graph_sets(served_policies(verifies=False)), LAYERS, delta_layers, audits=True
    )
    assert len(audited) == 2 * count - 1
    assert audited.keys() - variants.keys() == {f"{label}+audit" for label in variants if label != DENSE}


SHAPE = PoolShape(layers=32, kv_heads=8, head_dim=128, element_size=2)


def test_policies_that_read_the_same_index_share_it() -> None:
    indexes = {index.name: index for index in reserved_indexes(DECODE_POLICIES, SHAPE, 16)}
    assert sorted(name for index in indexes.values() for name in index.policies) == sorted(
        name for name, declared in DECLARATIONS.items() if declared.index is not None
    )
    assert {"lowbit_top_p", "lowbit_top_k"} <= set(indexes["key codes"].policies)
    for index in indexes.values():
        for name in index.policies:
            [alone] = reserved_indexes([name], SHAPE, 16)
            assert (alone.name, alone.share) == (index.name, index.share)


def test_codes_of_more_bits_take_more() -> None:
    [two], [three], [four] = (
        reserved_indexes(["lowbit_top_p"], SHAPE, 16, IndexSettings(key_bits=bits)) for bits in (2, 3, 4)
    )
    assert two.share == pytest.approx(0.0742, abs=1e-4)
    # One bit more for each channel of a key, of 16 bits each in keys and values.
    assert three.share - two.share == pytest.approx(1 / 32)
    assert four.share - three.share == pytest.approx(1 / 32)


def attention_layer(number: int, window: int = -1) -> RadixAttention:
    return RadixAttention(
        num_heads=32, head_dim=128, scaling=1.0, num_kv_heads=8, layer_id=number, sliding_window_size=window
    )


@pytest.mark.parametrize("algorithm", [None, "WINNOW"])
@pytest.mark.parametrize("windowed", [0, 96])
@pytest.mark.parametrize("audits", [False, True])
def test_a_server_leaves_room_for_indexes_and_says_for_which(
    algorithm: str | None,
    windowed: int,
    audits: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the layers with full attention, 32: beside them there may be others in the KV cache."""
    share = 32 / (32 + windowed)
    monkeypatch.setenv(POLICIES_SETTING, "lowbit_top_p,lowbit_top_k,quest")
    monkeypatch.setenv(key_bits.ENVIRONMENT, "3")
    monkeypatch.setattr(memory, "attention_ranks_of", lambda _: 1)
    monkeypatch.delenv(audit_share.ENVIRONMENT, raising=False)
    if audits:
        monkeypatch.setenv(audit_share.ENVIRONMENT, "0")
    model = SimpleNamespace(
        num_hidden_layers=32 + windowed,
        get_num_kv_heads=lambda _: 8,
        head_dim=128,
        num_attention_heads=32,
        context_len=4096,
    )
    configurator = SimpleNamespace(
        server_args=SimpleNamespace(
            attention_backend="winnow", device="cuda", max_running_requests=4, speculative_algorithm=algorithm
        ),
        model_config=model,
        model=nn.ModuleList(
            attention_layer(number, 512 if number < windowed else -1) for number in range(32 + windowed)
        ),
        kv_cache_dtype=torch.bfloat16,
        page_size=16,
    )
    [hook] = memory.HOOKS
    available = 2**34
    with caplog.at_level(logging.INFO, logger=memory.__name__):
        left = hook.function(lambda _: available, configurator)
    buffers = fixed_bytes(enabled_kinds(verifies=True), SHAPE, query_heads=32, rows=4, longest=4096, page_size=16)
    if algorithm:
        buffers += check_bytes(SHAPE, query_heads=32)
    if audits:
        buffers += audit_bytes(SHAPE, query_heads=32, rows=4)
    assert left == pytest.approx((available - buffers) / (1 + share * (0.1055 + 0.0625)), rel=1e-3)
    total, *indexes, others = caplog.messages
    assert total.startswith("Winnow serves dense, quest, lowbit_top_p, lowbit_top_k. Of 16.00 GB its buffers take ")
    assert total.endswith(f", {100 * share * 0.167969:.1f} % of the KV cache.")
    assert indexes == [
        f"Winnow's page bounds take {100 * share * 0.0626:.1f} % of the KV cache, for quest.",
        f"Winnow's key codes take {100 * share * 0.10547:.1f} % of the KV cache, for lowbit_top_p, lowbit_top_k.",
    ]
    assert others.startswith("Winnow serves only if WINNOW_POLICIES names it: streaming_llm, snapkv, ")
    # On a server that does not verify it has no use.
    assert ("verified_pages" in others) == (algorithm is not None)


def test_buffers_are_counted_without_being_made() -> None:
    shape = PoolShape(layers=2, kv_heads=2, head_dim=64, element_size=4)
    buffers = StepBuffers(LAYOUT, 3, 256, 16, shape.layers, 4, shape.kv_heads, 192, torch.device("cpu"))
    none = fixed_bytes([], shape, query_heads=4, rows=3, longest=256, page_size=16)
    assert none > buffers.bytes
    assert fixed_bytes(ALL, shape, query_heads=4, rows=3, longest=256, page_size=16) > none
    # Scores of prefill take as much whatever the number of rows.
    twice = fixed_bytes([], shape, query_heads=4, rows=6, longest=256, page_size=16) - SCORES_BYTES
    assert twice > 1.9 * (none - SCORES_BYTES)


def request() -> RequestState:
    return RequestState(AttentionPolicy(), prompt_length=10)


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


@pytest.mark.parametrize(("needed", "label", "counted"), [({"quest"}, "quest", 0), ({"quest", "snapkv"}, "all", 1)])
def test_a_step_with_the_graph_of_a_larger_set_is_counted(
    needed: set[str], label: str, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = Metrics()
    monkeypatch.setattr(backend_module, "METRICS", totals)
    backend: Any = object.__new__(WinnowDeviceBackend)
    backend.requests = SimpleNamespace(begin=lambda _: None)
    everything = GraphSet(frozenset({"quest", "snapkv", "tactic"}), ordered=False)
    backend.variants = variants_of(everything.kinds, [everything], LAYERS, ())
    backend._decode = SimpleNamespace(needed=lambda *_: Variant(frozenset(needed)))
    decoding: Any = SimpleNamespace(forward_mode=ForwardMode.DECODE, seq_lens_cpu=torch.tensor([]))
    backend.note([], decoding, 0)
    assert backend.label == label
    assert totals.totals()["superset_decode_steps_total"] == counted
