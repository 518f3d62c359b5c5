"""Models in which some layers have a sliding window: the dense backend computes those, policies act on the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_winnow.device.backend import WinnowDeviceBackend
from sglang_winnow.device.dense import DensePlans
from sglang_winnow.device.layers import ModelLayers
from sglang_winnow.device.variants import DENSE, variants_of
from sglang_winnow.prefill_plan import PrefillPlan
from sglang_winnow.request_state import RequestTable
from sglang_winnow.verification_plan import VerificationPlan
from tests.sglang_ext.device.test_check import all_drafted, batch_of, check_backend
from tests.sglang_ext.device.test_decode import (
    KV_HEADS,
    LONGEST,
    POLICIES,
    SHAPE,
    Layers,
    Server,
    by_torch,
    device_decode,
    in_8_bits,
    policies_act_at_every_length,
    queries_of,
)
from winnow_kernels.attend.dense import attend_all, prefill
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.declarations import kinds_of, selectors_of
from winnow_kernels.policies.quoka.prefill.selection import QuokaPrefillWorkspace

__all__ = ["policies_act_at_every_length"]

FULL = (2, 5, 6)
WINDOWS = {0: 40, 1: 40, 3: 40, 4: 40, 7: 40}
MODEL = ModelLayers(FULL, WINDOWS)
IN_MODEL = Layers(range(8), WINDOWS)
BY_PLACE = Layers(FULL)
# Those that name layers, and those that keep something of each.
NAMES = ("quest", "delta", "pyramidkv", "tactic", "streaming_llm", "dense")


def policies_of_model(full: Sequence[int]) -> dict[str, Mapping[str, Any]]:
    """Return the policies for a model whose layers ``full`` have full attention: they name these by their numbers."""

    def in_model(policy: Mapping[str, Any]) -> dict[str, Any]:
        decode = dict(policy.get("decode", {}))
        if "full_layers" in decode:
            decode["full_layers"] = full[decode["full_layers"]]
        if "delta_layers" in decode:
            decode["delta_layers"] = [full[place] for place in decode["delta_layers"]]
        return {**policy, "decode": decode} if decode else dict(policy)

    quoka: Mapping[str, Any] = {"prefill": {"policy": "quoka", "budget": 64, "block": 64}}
    return {**{name: in_model(policy) for name, policy in POLICIES.items()}, "quoka prefill": quoka}


MODEL_POLICIES = policies_of_model(FULL)


class Dense:
    """Stands for SGLang's dense backend: it has one plan, and computes batches that are planned."""

    def __init__(self, server: Server, windows: Mapping[int, int] = WINDOWS) -> None:
        self._server = server
        self._windows = windows
        self.plans: list[Any] = []

    def init_forward_metadata(self, batch: Any) -> None:
        self.plans.append(batch)

    def forward_decode(self, q: Tensor, _k: Tensor, _v: Tensor, layer: Any, batch: Any, _save: bool) -> Tensor:
        assert self.plans[-1] is batch
        slots = self._server.table[batch.req_pool_indices, : int(batch.seq_lens.max())].long()
        cache = self._server.caches[layer.layer_id]
        context = Context.of(slots, batch.seq_lens, cache.slots)
        queries = q.view(-1, SHAPE.query_heads, SHAPE.head_dim)
        meter = Meter(len(queries), q.device)
        window = self._windows.get(layer.layer_id)
        return attend_all(queries, context, cache, layer.scaling, meter, window).flatten(1)

    def forward_extend(
        self, q: Tensor, _k: Tensor, _v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        del save_kv_cache
        assert self.plans[-1] is batch
        parts, first = [], 0
        for slot, end, new in zip(batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens, strict=True):
            own = q.view(-1, SHAPE.query_heads, SHAPE.head_dim)[first : first + new]
            cache = self._server.caches[layer.layer_id]
            slots = self._server.table[slot, :end].long()
            parts.append(prefill(own, slots, cache, layer.scaling, self._windows.get(layer.layer_id)).flatten(1))
            first += new
        return torch.cat(parts)


def backend_of(server: Server, dense: Any, kinds: Collection[str] = ()) -> Any:
    """The device backend of a model with ``FULL`` and ``WINDOWS``, with ``server``'s caches of the former.

    It serves the policies of ``kinds``.
    """
    backend: Any = object.__new__(WinnowDeviceBackend)
    backend._dense, backend._dense_plans = dense, DensePlans(dense)
    backend._layers, backend._caches = MODEL, server.caches
    backend.indexes, backend.statistics = server.indexes, server.statistics
    backend.requests = RequestTable(server.statistics, len(WINDOWS), FULL)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=server.table)
    backend._decode = device_decode(server, lambda own: selectors_of(kinds, own))
    backend.variants = variants_of(kinds, (), len(FULL), delta_layers=(1,))
    backend.label, backend.capturing = DENSE, None
    backend._dtype = torch.float32
    backend._states, backend._slots, backend._lengths, backend._prefill = [], [], [], None
    backend._explained, backend.compared, backend._attends_densely = [], [], False
    backend._workspace = QuokaPrefillWorkspace.empty(KV_HEADS, LONGEST, server.device, 2**20)
    return backend


def requests_of(server: Server) -> list[Any]:
    """SGLang's, in all releases' forms."""
    slots = server.request_slots.tolist()
    return [
        SimpleNamespace(
            winnow_state=state,
            req_pool_idx=slot,
            cache_protected_len=0,
            kv=SimpleNamespace(req_pool_idx=slot, cache_protected_len=0),
        )
        for state, slot in zip(server.states, slots, strict=True)
    ]


def layer(number: int, scales: tuple[float, float] = (1.0, 1.0)) -> Any:
    return SimpleNamespace(
        layer_id=number,
        tp_q_head_num=SHAPE.query_heads,
        qk_head_dim=SHAPE.head_dim,
        scaling=SHAPE.scale,
        k_scale_float=scales[0],
        v_scale_float=scales[1],
    )


def as_in_gemma3(queries: Tensor) -> Tensor:
    """Return queries as Gemma 3's layers hand them over, [1, tokens, query heads, head dim].

    They have permuted them, so that nothing promises that the heads of a token lie side by side in memory.
    """
    return queries.transpose(0, 1).contiguous().transpose(0, 1).unsqueeze(0)


def decode_batch(server: Server) -> Any:
    lengths = torch.tensor(server.lengths)
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(lengths),
        req_pool_indices=server.request_slots,
        seq_lens=lengths.to(server.device),
        seq_lens_cpu=lengths,
        # ``Server.grow`` says what is written.
        out_cache_loc=torch.empty(0, dtype=torch.int64, device=server.device),
    )


def both(
    names: Sequence[str],
    lengths: Sequence[int],
    device: torch.device,
    stored: Callable[[Tensor], Tensor] = Tensor.clone,
    softmax: str = "plain",
) -> tuple[Server, Server]:
    """The torch path's server, which knows all layers, and the device's, which knows those with full attention."""
    return (
        Server(names, lengths, device, stored=stored, layers=IN_MODEL, policies=MODEL_POLICIES, softmax=softmax),
        Server(names, lengths, device, stored=stored, layers=BY_PLACE, policies=MODEL_POLICIES, softmax=softmax),
    )


def assert_equal_statistics(torch_server: Server, server: Server, but: Sequence[Field] = ()) -> None:
    rows = slice(1, len(server.states) + 1)
    for field in set(Field) - set(but):
        wanted, got = (each.statistics.rows[rows, field].cpu() for each in (torch_server, server))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, msg=field.name)


def compare_decode(
    names: Sequence[str],
    steps: int,
    device: torch.device,
    stored: Callable[[Tensor], Tensor] = Tensor.clone,
    softmax: str = "plain",
) -> None:
    torch_server, server = both(names, [110 + 13 * i % 100 for i in range(len(names))], device, stored, softmax)
    dense = Dense(torch_server)
    backend = backend_of(server, dense, kinds_of({state.policy.decode.policy for state in server.states}))
    for step in range(steps):
        expected = by_torch(torch_server, step)
        batch = decode_batch(server)
        backend.note(requests_of(server), batch, 0)
        backend.init_forward_metadata(batch)
        for number in IN_MODEL.numbers:
            queries = queries_of(server, step, number)
            output = backend.forward_decode(as_in_gemma3(queries), queries, queries, layer(number), batch, False)
            torch.testing.assert_close(output, expected[number].flatten(1), rtol=1e-4, atol=1e-4)
        torch_server.grow()
        server.grow()
    assert len(dense.plans) == steps
    assert_equal_statistics(torch_server, server)
    assert {state.sliding_layers for state in server.states} == {len(WINDOWS)}


@pytest.mark.parametrize("stored", [Tensor.clone, pytest.param(in_8_bits, marks=pytest.mark.full)])
def test_decode_is_that_of_the_torch_path(stored: Callable[[Tensor], Tensor], device: torch.device) -> None:
    compare_decode(NAMES, 1, device, stored)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("softmax", ["plain", "cap and sinks"])
def test_decode_of_all_policies_is_that_of_the_torch_path(softmax: str, device: torch.device) -> None:
    compare_decode(list(POLICIES), 2, device, softmax=softmax)


def test_decode_with_caps_and_sinks_is_that_of_the_torch_path(device: torch.device) -> None:
    compare_decode(["quest", "delta", "lowbit_top_p"], 1, device, softmax="cap and sinks")


def test_a_dense_batch_is_left_to_the_dense_backend(device: torch.device) -> None:
    compare_decode(["dense", "dense"], 2, device)


def extend_batch(server: Server, starts: Sequence[int]) -> Any:
    ends = torch.tensor(server.lengths) - 1
    prefixes = torch.tensor(starts)
    news = ends - prefixes
    slots = zip(server.request_slots.tolist(), starts, ends.tolist(), strict=True)
    tokens = torch.cat([server.table[slot, start:end].long() for slot, start, end in slots])
    firsts = torch.tensor([0, *news.tolist()]).cumsum(0)[:-1]
    device = server.device
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(ends),
        req_pool_indices=server.request_slots,
        seq_lens=ends.to(device),
        seq_lens_cpu=ends,
        out_cache_loc=tokens,
        positions=tokens,
        input_ids=tokens,
        extend_seq_lens=news.to(device),
        extend_prefix_lens=prefixes.to(device),
        extend_start_loc=firsts.int().to(device),
        extend_seq_lens_cpu=news.tolist(),
        extend_prefix_lens_cpu=list(starts),
    )


@pytest.mark.parametrize("softmax", ["plain", "cap and sinks"])
@pytest.mark.parametrize(
    ("names", "chunks", "plans_of_parts"),
    [
        (["quoka prefill", "snapkv", "quoka prefill"], [(64, 136), (16, 79), (0, 130)], 2),
        (["quoka prefill", "quoka prefill"], [(64, 136), (0, 130)], 0),
        (["dense", "pyramidkv", "delta"], [(64, 99), (16, 79), (0, 50)], 0),
    ],
)
def test_prefill_is_that_of_the_torch_path(
    names: Sequence[str], chunks: Sequence[tuple[int, int]], plans_of_parts: int, softmax: str, device: torch.device
) -> None:
    """Sparse blocks beside dense requests, all sparse, and all dense; layers with a window are dense for everybody."""
    torch_server, server = both(names, [end + 1 for _, end in chunks], device, softmax=softmax)
    for state in (*torch_server.states, *server.states):
        state.kept = None
    batch = extend_batch(server, [start for start, _ in chunks])
    dense = Dense(torch_server)
    backend = backend_of(server, dense)
    backend.note(requests_of(server), batch, 0)
    backend.init_forward_metadata(batch)
    slots = torch_server.table[torch_server.request_slots, : int(batch.seq_lens.max())].long()
    plan = PrefillPlan(
        Context.of(slots, batch.seq_lens, torch_server.caches[0].slots),
        torch_server.request_slots,
        torch_server.states,
        batch.extend_prefix_lens_cpu,
        batch.extend_seq_lens_cpu,
        torch_server.indexes,
        torch_server.statistics,
        layers=FULL,
    )
    tokens = sum(batch.extend_seq_lens_cpu)
    for number, cache in enumerate(torch_server.caches):
        generator = torch.Generator().manual_seed(number)
        queries = torch.randn(tokens, SHAPE.query_heads, SHAPE.head_dim, generator=generator).to(device)
        expected = plan.attend(number, queries, cache, SHAPE.scale, WINDOWS.get(number))
        output = backend.forward_extend(as_in_gemma3(queries), queries, queries, layer(number), batch, False)
        torch.testing.assert_close(output, expected.flatten(1), rtol=1e-4, atol=1e-4)
    plan.finish()
    # Between layers with a window there are two groups with full attention, and a part of each may be dense.
    assert [each is batch for each in dense.plans].count(False) == plans_of_parts
    assert len(dense.plans) == 1 + 2 * plans_of_parts
    assert_equal_statistics(torch_server, server, but=[Field.INDEX_BUILT_TOKENS])
    for place, number in enumerate(FULL):
        for own, other in zip(server.states, torch_server.states, strict=True):
            if own.kept is not None and other.kept is not None:
                assert torch.equal(own.kept.kept[place].sort().values, other.kept.kept[number].sort().values)


@pytest.mark.parametrize(("scales", "softmax"), [(None, "plain"), ((2.0, 0.5), "plain"), (None, "cap and sinks")])
def test_a_check_is_that_of_the_torch_path(
    scales: tuple[float, float] | None, softmax: str, device: torch.device
) -> None:
    """``scales`` are those of a cache in 8 bits."""
    of_keys, of_values = scales or (1.0, 1.0)
    names, new_tokens, padding = ["quest, verified", "streaming_llm, verified"], 5, 1
    torch_server, server = both(names, [143, 30], device, Tensor.clone if scales is None else in_8_bits, softmax)
    check = check_backend(server, device_decode(server, lambda own: selectors_of((), own)), MODEL)
    batch = batch_of(server, new_tokens, padding)
    check.init_forward_metadata(batch)
    lengths = torch.tensor(server.lengths, device=device) + new_tokens
    slots = torch_server.table[torch_server.request_slots, : int(lengths.max())].long()
    plan = VerificationPlan(
        Context.of(slots, lengths, torch_server.caches[0].slots),
        new_tokens,
        torch_server.request_slots,
        torch_server.states,
        torch_server.statistics,
    )
    real = len(names) * new_tokens
    for number, cache in enumerate(torch_server.caches):
        generator = torch.Generator().manual_seed(number)
        queries = torch.randn(len(batch.input_ids), SHAPE.query_heads, SHAPE.head_dim, generator=generator).to(device)
        served = layer(number, (of_keys, of_values))
        output = check.forward_extend(as_in_gemma3(queries), queries, queries, served, batch, save_kv_cache=False)
        expected = of_values * plan.attend(number, of_keys * queries[:real], cache, SHAPE.scale, WINDOWS.get(number))
        torch.testing.assert_close(output[:real], expected.flatten(1), rtol=1e-4, atol=1e-4)
    plan.finish()
    accepted = all_drafted([1, 2], new_tokens, device)
    plan.accept(accepted)
    check.accept(accepted)
    assert_equal_statistics(torch_server, server)
