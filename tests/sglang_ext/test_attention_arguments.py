"""What the attention backend ``winnow`` changes of a server's arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig

from sglang_winnow import attention_registration
from sglang_winnow.attention_registration import HOOKS, MAX_RUNNING, PAGE_SIZE
from sglang_winnow.backend_name import NAME
from sglang_winnow.sglang_versions.arguments import resolved
from sglang_winnow.sglang_versions.hook_targets import target

HOOKED = {hook.target: hook.function for hook in HOOKS}
RESOLVE = HOOKED[target("resolve the attention backend")]
SIZED_LATER = HOOKED[target("plan to size the KV cache after graphs")]


def server_arguments(backend: str = NAME, prefill: str = Backend.BREAKABLE) -> Any:
    """Return the arguments that matter, of a server whose prefill has graphs of one kind."""
    graphs = CudaGraphConfig()
    graphs.prefill.backend = prefill
    return SimpleNamespace(
        attention_backend=backend,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        cuda_graph_config=graphs,
        max_running_requests=None,
        page_size=None,
    )


def server_arguments_by_phase() -> Any:
    """Return them where the backend was named for prefill and for decode: SGLang joins these later."""
    arguments = server_arguments(prefill=Backend.FULL)
    arguments.attention_backend = None
    arguments.prefill_attention_backend = arguments.decode_attention_backend = NAME
    return arguments


def fill_in(arguments: Any) -> Any:
    RESOLVE(None, arguments)
    return resolved(arguments)


@pytest.fixture(params=[True, False])
def on_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return bool(request.param)


def test_cuda_has_pages_and_graphs(on_cuda: bool) -> None:
    arguments = fill_in(server_arguments())
    graphs = arguments.cuda_graph_config
    if on_cuda:
        assert (graphs.prefill.backend, graphs.decode.backend) == (Backend.BREAKABLE, Backend.FULL)
        assert (arguments.max_running_requests, arguments.page_size) == (MAX_RUNNING, PAGE_SIZE)
        assert arguments.disable_hybrid_swa_memory
    else:
        assert (graphs.prefill.backend, graphs.decode.backend) == (Backend.DISABLED, Backend.DISABLED)
        assert (arguments.max_running_requests, arguments.page_size) == (None, None)


@pytest.mark.parametrize("on_cuda", [True], indirect=True)
@pytest.mark.parametrize("prefill", [Backend.FULL, Backend.TC_PIECEWISE, Backend.DISABLED])
def test_attention_is_never_captured_in_prefill(prefill: str, on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_cuda
    warned: list[object] = []
    monkeypatch.setattr(attention_registration.logger, "warning", lambda _, kind: warned.append(kind))
    graphs = fill_in(server_arguments(prefill=prefill)).cuda_graph_config
    assert (graphs.prefill.backend, graphs.decode.backend) == (Backend.DISABLED, Backend.FULL)
    assert warned == ([] if prefill == Backend.DISABLED else [prefill])


@pytest.mark.parametrize("on_cuda", [True], indirect=True)
def test_a_backend_named_for_both_phases_is_the_same(on_cuda: bool) -> None:
    assert on_cuda
    arguments = fill_in(server_arguments_by_phase())
    assert arguments.cuda_graph_config.prefill.backend == Backend.DISABLED
    assert arguments.page_size == PAGE_SIZE
    assert not SIZED_LATER(lambda _: True, server_arguments_by_phase())


def test_other_backends_are_left_alone() -> None:
    arguments = server_arguments("fa3", Backend.FULL)
    RESOLVE(None, arguments)
    assert vars(arguments) == vars(server_arguments("fa3", Backend.FULL))


@pytest.mark.parametrize("planned", [True, False])
def test_the_kv_cache_is_as_large_at_capture_as_later(planned: bool) -> None:
    assert not SIZED_LATER(lambda _: planned, server_arguments())
    assert SIZED_LATER(lambda _: planned, server_arguments("fa3")) == planned
