"""The SGLang plugin whose attention does nothing, in this process: what its backends write and answer."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from benchmarks.serving.server_plugins import NOOP_ATTENTION

LAYER = SimpleNamespace(tp_q_head_num=4, v_head_dim=8, layer_id=1)


class Pool:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, Any, Tensor, Tensor]] = []

    def set_kv_buffer(self, layer: Any, where: Any, keys: Tensor, values: Tensor) -> None:
        self.written.append((layer, where, keys, values))


class Dense(AttentionBackend):  # type: ignore[misc]
    """A backend of SGLang's, as far as it matters here; to attend with it fails."""

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool = runner.token_to_kv_pool


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in list(ATTENTION_BACKENDS):
        monkeypatch.setitem(ATTENTION_BACKENDS, name, Dense)
    spec = importlib.util.spec_from_file_location(
        NOOP_ATTENTION.name, NOOP_ATTENTION.folder / f"{NOOP_ATTENTION.name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register()
    return module


@pytest.mark.parametrize("name", ["fa3", "flashinfer", "torch_native"])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_keys_and_values_are_written_and_zeros_answered(plugin: ModuleType, name: str, mode: ForwardMode) -> None:
    pool = Pool()
    backend = ATTENTION_BACKENDS[name](SimpleNamespace(token_to_kv_pool=pool))
    assert isinstance(backend, Dense)
    queries, keys, values = torch.randn(3, 32), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    batch = SimpleNamespace(forward_mode=mode, out_cache_loc=torch.arange(3))
    output = backend.forward(queries, keys, values, LAYER, batch, sinks=None)
    assert torch.equal(output, torch.zeros(3, 32))
    [(layer, where, written_keys, written_values)] = pool.written
    assert layer is LAYER
    assert where.loc is batch.out_cache_loc
    assert written_keys is keys
    assert written_values is values
    # Where SGLang writes them together with the rotation, it passes none, or says so.
    backend.forward(queries, None, None, LAYER, batch)
    backend.forward(queries, keys, values, LAYER, batch, save_kv_cache=False)
    assert len(pool.written) == 1
    assert NOOP_ATTENTION.notice == plugin.IN_PLACE


def test_a_server_that_does_not_use_it_is_refused(tmp_path: Any) -> None:
    log = tmp_path / "noop.log"
    log.write_text("ready")
    with pytest.raises(RuntimeError, match="has not loaded"):
        NOOP_ATTENTION.check_log(log)
    log.write_text(f"WARNING {NOOP_ATTENTION.notice}")
    NOOP_ATTENTION.check_log(log)
