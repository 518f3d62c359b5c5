"""What differs between releases of SGLang, against the one that is installed."""

from __future__ import annotations

import inspect
import logging
import pkgutil
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_winnow import start
from sglang_winnow.attention_backend import WinnowAttentionBackend
from sglang_winnow.device import variants
from sglang_winnow.device.backend import WinnowDeviceBackend
from sglang_winnow.device.variants import GraphVariants
from sglang_winnow.plugin import HOOKS
from sglang_winnow.sglang_versions.backend_defaults import OF_BASE, OF_DENSE, take_from_dense
from sglang_winnow.sglang_versions.hook_targets import TARGETS, target
from sglang_winnow.sglang_versions.releases import (
    ATTENTION_GRAPH_VARIANTS,
    NEWEST,
    OLDEST,
    RUNNING,
    require_supported,
    runs,
)
from sglang_winnow.sglang_versions.sampling import OF_BATCH, OF_ROWS, OF_SOME, ask_for_tokens_alone

METHODS = (
    "forward_decode",
    "forward_extend",
    "get_cuda_graph_seq_len_fill_value",
    "init_cuda_graph_state",
    "init_forward_metadata",
    "init_forward_metadata_in_graph",
    "init_forward_metadata_out_graph",
    "on_after_cuda_graph_warmup",
)
BACKEND = SimpleNamespace(variants={"dense": 0, "quest": 1, "all": 2}, label="quest", capturing=None)


def test_an_older_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.15 is older than 0\.5\.16, the oldest that Winnow runs on"):
        require_supported(Version("0.5.15"))


def test_an_older_sglang_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "require_supported", lambda: require_supported(Version("0.5.15")))
    with pytest.raises(SystemExit, match=r"Winnow: the server does not start, because SGLang 0\.5\.15 is older than "):
        start.register()


@pytest.mark.parametrize("release", [OLDEST, RUNNING, NEWEST])
def test_a_release_of_the_window_is_taken_as_it_is(release: Version, caplog: pytest.LogCaptureFixture) -> None:
    require_supported(release)
    assert not caplog.records


def test_a_newer_release_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require_supported(Version("0.5.99"))
    assert "not tested on SGLang 0.5.99, only up to 0.5.23" in caplog.text


@pytest.mark.parametrize("function", TARGETS)
def test_targets_that_moved_are_found_where_the_table_says(function: str) -> None:
    assert callable(pkgutil.resolve_name(target(function)))
    # What comes before may still be there, and no longer be what decides.
    for elsewhere in (name for release, name in TARGETS[function].items() if release > RUNNING):
        with pytest.raises((ImportError, AttributeError)):
            pkgutil.resolve_name(elsewhere)


@pytest.mark.parametrize("hook", [*HOOKS, *variants.HOOKS], ids=lambda hook: hook.target)
def test_every_target_of_a_hook_is_there(hook: Any) -> None:
    assert callable(pkgutil.resolve_name(hook.target))


def test_what_the_base_class_answers_for_the_device_backend_was_thought_of() -> None:
    answered = {name for name in vars(AttentionBackend) if not name.startswith("__") and name != "_abc_impl"}
    assert answered - vars(WinnowDeviceBackend).keys() <= OF_BASE | set(OF_DENSE)


def test_what_a_batch_asks_of_the_sampler_was_thought_of() -> None:
    assert {field.name for field in fields(SamplingBatchInfo)} <= {*OF_ROWS, *OF_SOME} | OF_BATCH


def test_what_only_some_rows_ask_for_is_removed() -> None:
    names = {field.name for field in fields(SamplingBatchInfo)}
    info: Any = SimpleNamespace(**dict.fromkeys(names, True))
    ask_for_tokens_alone(info)
    assert {name for name in names if getattr(info, name) is None} == names & set(OF_SOME)
    assert vars(info).keys() == names
    assert info.has_custom_logit_processor is False


def test_the_dense_backend_answers_what_is_its_own() -> None:
    dense: Any = SimpleNamespace(data_type="a", kv_cache_dtype="b", extend_dummy_seqs_capped_by_req_pool=True)
    backend: Any = object.__new__(WinnowDeviceBackend)
    backend._dense = dense
    take_from_dense(backend, dense)
    assert [getattr(backend, name) for name in OF_DENSE] == [getattr(dense, name) for name in OF_DENSE]
    dense.forward_metadata = object()
    assert backend.forward_metadata is dense.forward_metadata
    backend.forward_metadata = other = object()
    assert dense.forward_metadata is other


def test_the_dense_backend_says_until_when_decode_reads_what_is_shared() -> None:
    backend: Any = object.__new__(WinnowDeviceBackend)
    backend._dense = SimpleNamespace(shared_read_ends=lambda mode: ("dense", mode))
    assert backend.shared_read_ends(ForwardMode.DECODE) == ("dense", ForwardMode.DECODE)
    if hasattr(AttentionBackend, "shared_read_ends"):
        of_base = object.__new__(WinnowAttentionBackend).shared_read_ends(ForwardMode.EXTEND)
        assert backend.shared_read_ends(ForwardMode.EXTEND) is of_base


@pytest.mark.parametrize("backend", [WinnowAttentionBackend, WinnowDeviceBackend])
@pytest.mark.parametrize("method", METHODS)
def test_methods_take_what_sglang_passes(backend: type, method: str) -> None:
    passed = inspect.signature(getattr(AttentionBackend, method)).parameters
    taken = inspect.signature(getattr(backend, method)).parameters
    positional = [name for name, taker in taken.items() if taker.kind is taker.POSITIONAL_OR_KEYWORD]
    assert list(passed)[: len(positional)] == positional


def test_requests_of_a_batch_are_noted_by_what_sglang_passes() -> None:
    parameters = list(inspect.signature(ForwardBatch.init_new).parameters)
    assert parameters[:2] == ["batch", "model_runner"]


def test_graphs_are_captured_for_every_kind_of_batch() -> None:
    captured: list[tuple[object, ...]] = []
    compiled: list[int] = []
    backend = SimpleNamespace(**vars(BACKEND), compile=compiled.append)
    runner: Any = SimpleNamespace(attn_backend=backend, attention_graph_variants=None)

    def capture(*arguments: Any) -> None:
        bound = inspect.signature(DecodeCudaGraphRunner.capture_one_shape).bind(*arguments).arguments
        captured.append((bound["size"], bound.get("stream_idx"), backend.capturing))

    if runs(ATTENTION_GRAPH_VARIANTS):
        variants._name_variants(runner)
        for label in runner.attention_graph_variants.capture_labels:
            arguments = (runner, 8, print, None, None, label)
            variants._note_captured(*arguments)
            capture(*arguments)
    else:
        variants._capture_all(capture, runner, 8, print, None, None)
    assert captured == [(8, None, label) for label in backend.variants]
    assert compiled == [8]


def test_a_batch_replays_the_graph_of_its_kind() -> None:
    runner: Any = SimpleNamespace(attn_backend=BACKEND, attention_graph_variants=GraphVariants(BACKEND))
    if runs(ATTENTION_GRAPH_VARIANTS):
        resolve = DecodeCudaGraphRunner._resolve_attention_variant
        needed = len(inspect.signature(resolve).parameters) - 1
        assert resolve(runner, *(object(), 8)[:needed]) == "quest"
    else:
        assert variants._label_of(lambda *_: None, runner, object()) == "quest"


def test_other_backends_have_the_graphs_that_sglang_gives_them() -> None:
    runner: Any = SimpleNamespace(attn_backend=SimpleNamespace(), attention_graph_variants="own")
    if runs(ATTENTION_GRAPH_VARIANTS):
        variants._name_variants(runner)
        variants._note_captured(runner, 8, print, None, None, "own")
        assert vars(runner) == {"attn_backend": SimpleNamespace(), "attention_graph_variants": "own"}
    else:
        captured: list[tuple[object, ...]] = []
        variants._capture_all(lambda *arguments: captured.append(arguments), runner, 8, print, None, "lora")
        assert captured == [(runner, 8, print, None, "lora")]
        assert variants._label_of(lambda *_: "lora", runner, object()) == "lora"
