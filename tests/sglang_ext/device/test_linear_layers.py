"""Models with linear attention in most layers: SGLang runs those beside the backend, policies act on the others.

The wrapper and the pool are SGLang's own. What stands for its linear backend says what it was asked.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_winnow.attention_registration import _note_requests
from sglang_winnow.backend_name import NAME
from sglang_winnow.device.layers import ModelLayers
from sglang_winnow.device.variants import _capture_all, _label_of
from sglang_winnow.own_backend import own_backend
from sglang_winnow.request_state import RequestTable
from sglang_winnow.softmaxes import layer_cache
from tests.sglang_ext.device.test_decode import (
    PAGE_SIZE,
    POLICIES,
    SHAPE,
    Layers,
    Server,
    by_torch,
    policies_act_at_every_length,
    queries_of,
)
from tests.sglang_ext.device.test_windowed_layers import (
    Dense,
    assert_equal_statistics,
    backend_of,
    decode_batch,
    extend_batch,
    policies_of_model,
    requests_of,
)
from tests.sglang_ext.device.test_windowed_layers import layer as sglang_layer
from winnow_kernels.attend.dense import prefill
from winnow_kernels.policies.declarations import kinds_of

__all__ = ["policies_act_at_every_length"]

# As Qwen3-Next's, of twelve layers.
FULL = (3, 7, 11)
LINEAR = tuple(number for number in range(12) if number not in FULL)
NAMES = ("quest", "delta", "pyramidkv", "streaming_llm", "dense")
MODEL_POLICIES = policies_of_model(FULL)


class Linear(AttentionBackend):  # type: ignore[misc]
    """Stands for SGLang's backend of the layers with linear attention."""

    needs_cpu_seq_lens = False

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.asked.append(("plan", forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.asked.append(("graph", forward_batch, in_capture))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.asked.append(("in graph", forward_batch))

    def on_after_cuda_graph_warmup(self) -> None:
        self.asked.append(("warmed up",))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.asked.append(("graphs", max_bs, max_num_tokens))

    def forward_decode(self, **given: Any) -> Any:
        self.asked.append(("decode", given["layer"].layer_id))
        return given["mixed_qkv"]

    def forward_extend(self, **given: Any) -> Any:
        self.asked.append(("extend", given["layer"].layer_id))
        return given["mixed_qkv"]


class DenseOfPlaces(Dense):
    """Computes layers of the model from caches by place."""

    max_context_len = 4096
    data_type = torch.float32

    def __init__(self, server: Server) -> None:
        super().__init__(server, windows={})
        self.states: list[tuple[Any, ...]] = []

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool) -> Any:
        return super().forward_decode(q, k, v, placed(layer), batch, save)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
        return super().forward_extend(q, k, v, placed(layer), batch, save_kv_cache)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.states.append((max_bs, max_num_tokens))

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        self.plans.append(batch)
        self.states.append(("planned", in_capture))

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        self.states.append(("in graph", batch))

    def on_after_cuda_graph_warmup(self) -> None:
        self.states.append(("warmed up",))


def placed(layer: Any) -> Any:
    return SimpleNamespace(**vars(layer) | {"layer_id": FULL.index(layer.layer_id)})


def wrapped(server: Server, dense: Any, kinds: Collection[str] = ()) -> HybridLinearAttnBackend:
    """SGLang's wrapper around the device backend, which has ``server``'s caches of the layers with full attention."""
    backend = backend_of(server, dense, kinds)
    backend._layers = ModelLayers(FULL, {})
    backend.requests = RequestTable(server.statistics, 0, backend._layers.placed, len(LINEAR))
    backend.token_to_kv_pool = None
    return HybridLinearAttnBackend(backend, Linear(), list(FULL))


def servers(names: Collection[str], lengths: list[int], device: torch.device) -> tuple[Server, Server]:
    """The torch path's server, of a model that has the layers with full attention alone, and the device's."""
    torch_server = Server(list(names), lengths, device, layers=Layers(FULL), policies={**POLICIES, **MODEL_ONLY})
    return torch_server, Server(list(names), lengths, device, layers=Layers(FULL), policies=MODEL_POLICIES)


MODEL_ONLY = {"quoka prefill": MODEL_POLICIES["quoka prefill"]}


def note(wrapper: HybridLinearAttnBackend, server: Server, batch: Any) -> None:
    runner: Any = SimpleNamespace(attn_backend=wrapper, server_args=SimpleNamespace(attention_backend=NAME))
    _note_requests(batch, type(batch), SimpleNamespace(reqs=requests_of(server)), runner)


def test_decode_is_that_of_a_model_of_the_layers_with_full_attention(device: torch.device) -> None:
    torch_server, server = servers(NAMES, [110 + 13 * i for i in range(len(NAMES))], device)
    dense = DenseOfPlaces(torch_server)
    wrapper = wrapped(server, dense, kinds_of(NAMES))
    linear: Any = wrapper.linear_attn_backend
    for step in range(2):
        expected = by_torch(torch_server, step)
        batch = decode_batch(server)
        note(wrapper, server, batch)
        wrapper.init_forward_metadata(batch)
        for number in range(12):
            place = FULL.index(number) if number in FULL else None
            queries = queries_of(server, step, place or 0)
            output = wrapper.forward(
                queries, queries, queries, sglang_layer(number), batch, False, mixed_qkv=queries, a=None, b=None
            )
            wanted = queries if place is None else expected[place].flatten(1)
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
        assert linear.asked == [("plan", batch), *(("decode", number) for number in LINEAR)]
        linear.asked.clear()
        torch_server.grow()
        server.grow()
    assert not dense.plans
    assert_equal_statistics(torch_server, server)
    assert {(state.sliding_layers, state.linear_layers) for state in server.states} == {(0, len(LINEAR))}


@pytest.mark.parametrize("names", [["quoka prefill", "snapkv", "quoka prefill"], ["dense", "pyramidkv", "delta"]])
def test_prefill_is_that_of_a_model_of_the_layers_with_full_attention(names: list[str], device: torch.device) -> None:
    torch_server, server = servers(names, [137, 80, 131], device)
    for state in (*torch_server.states, *server.states):
        state.kept = None
    batch = extend_batch(server, [64, 16, 0])
    dense = DenseOfPlaces(torch_server)
    wrapper = wrapped(server, dense)
    note(wrapper, server, batch)
    wrapper.init_forward_metadata(batch)
    tokens = sum(batch.extend_seq_lens_cpu)
    for number in range(12):
        generator = torch.Generator().manual_seed(number)
        queries = torch.randn(tokens, SHAPE.query_heads, SHAPE.head_dim, generator=generator).to(device)
        output = wrapper.forward(
            queries, queries, queries, sglang_layer(number), batch, False, mixed_qkv=queries, a=None, b=None
        )
        if number not in FULL:
            assert output is queries
            continue
        cache, first = server.caches[FULL.index(number)], 0
        for state, slot, end, new in zip(
            server.states, server.request_slots, batch.seq_lens, batch.extend_seq_lens_cpu, strict=True
        ):
            rows = slice(first, first + new)
            first += new
            if state.policy.has_dense_prefill:
                wanted = prefill(queries[rows], server.table[slot, :end].long(), cache, SHAPE.scale, None)
                torch.testing.assert_close(output[rows], wanted.flatten(1), rtol=1e-4, atol=1e-4)
        assert first == tokens
    linear: Any = wrapper.linear_attn_backend
    assert linear.asked == [("plan", batch), *(("extend", number) for number in LINEAR)]
    assert {state.linear_layers for state in server.states} == {len(LINEAR)}


def test_graphs_of_each_label_are_planned_for_both_backends(device: torch.device) -> None:
    _, server = servers(["quest", "dense"], [120, 130], device)
    dense = DenseOfPlaces(server)
    wrapper = wrapped(server, dense, kinds_of(["quest"]))
    own, linear = own_backend(SimpleNamespace(attn_backend=wrapper)), wrapper.linear_attn_backend
    assert own is wrapper.full_attn_backend
    wrapper.init_cuda_graph_state(2, 2)
    assert linear.asked.pop() == ("graphs", 2, 2)
    assert dense.states == [(2, 2)]
    assert wrapper.get_cuda_graph_seq_len_fill_value() == 1
    batch = decode_batch(server)
    labels: list[str] = []
    compiled: list[int] = []
    own.compile = compiled.append

    def capture(runner: Any, _size: int, _forward: Any, _stream: Any, label: str) -> None:
        labels.append(label)
        assert own.capturing == label
        runner.attn_backend.init_forward_metadata_out_graph(batch, in_capture=True)
        runner.attn_backend.init_forward_metadata_in_graph(batch)
        runner.attn_backend.on_after_cuda_graph_warmup()

    runner = SimpleNamespace(attn_backend=wrapper)
    _capture_all(capture, runner, 2, lambda: None, None)
    assert labels == list(own.variants)
    assert compiled == [2]
    assert linear.asked == [("graph", batch, True), ("in graph", batch), ("warmed up",)] * len(labels)
    linear.asked.clear()
    note(wrapper, server, batch)
    label = _label_of(lambda *_: None, runner, batch)
    assert label in labels
    assert "quest" in str(label)
    wrapper.init_forward_metadata_out_graph(batch)
    assert linear.asked == [("graph", batch, False)]
    assert own._decode.variant == own.variants[label]


def test_an_idle_rank_is_planned_for_both_backends(device: torch.device) -> None:
    _, server = servers(["dense"], [40], device)
    dense = DenseOfPlaces(server)
    wrapper = wrapped(server, dense)
    idle: Any = SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    wrapper.init_forward_metadata(idle)
    assert dense.plans == [idle]
    assert wrapper.linear_attn_backend.asked == [("plan", idle)]


def test_caches_of_places_are_those_that_the_pool_writes_to(device: torch.device) -> None:
    """SGLang's pool has layers with full attention alone, under its own numbers."""
    pool = HybridLinearKVPool(
        size=8 * PAGE_SIZE,
        dtype=torch.float32,
        page_size=PAGE_SIZE,
        head_num=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        full_attention_layer_ids=list(FULL),
        device=str(device),
        mamba_pool=None,
    )
    layers = [
        SimpleNamespace(
            layer_id=number, logit_cap=0.0, sliding_window_size=-1, k_scale=None, v_scale=None, k_scale_float=None
        )
        for number in FULL
    ]
    model = ModelLayers.of(layers)
    assert (model.full, model.placed, model.last) == (FULL, FULL, FULL[-1])
    caches = [layer_cache(pool, layer) for layer in layers]
    slots = torch.tensor([17, 18, 40], device=device)
    for number, layer in zip(FULL, layers, strict=True):
        keys = torch.full((3, SHAPE.kv_heads, SHAPE.head_dim), float(number), device=device)
        pool.set_kv_buffer(layer, KVWriteLoc(slots, None), keys, -keys)
    for place, number in enumerate(FULL):
        assert model.place(number) == place
        assert torch.equal(caches[place].keys[slots], torch.full_like(caches[place].keys[slots], number))
        assert torch.equal(caches[place].values[slots], torch.full_like(caches[place].values[slots], -number))
        assert caches[place].keys.shape == pool.full_kv_pool.k_buffer[place].shape
    assert {model.place(number) for number in LINEAR} == {None}
