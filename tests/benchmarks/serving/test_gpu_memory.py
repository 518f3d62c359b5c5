"""Watching a GPU's memory: without one, and that peaks between the ends of a block are seen."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pynvml  # type: ignore[import-untyped]
import pytest

from benchmarks.serving import gpu_memory
from benchmarks.serving.gpu_memory import PeakMemory


def test_the_peak_lies_inside() -> None:
    seen = threading.Event()
    told = [1, 9]

    def used() -> int:
        value = told.pop(0) if told else 2
        if not told:
            seen.set()
        return value

    with PeakMemory(used) as memory:
        assert seen.wait(10)
    assert memory.bytes == 9


def test_what_is_in_use_at_the_ends_is_seen_in_blocks_of_no_time() -> None:
    told = iter((3, 5))
    with PeakMemory(lambda: next(told)) as memory:
        pass
    assert memory.bytes == 5


def test_nothing_is_told_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    gpu_memory._gpus.cache_clear()
    with PeakMemory() as memory:
        pass
    gpu_memory._gpus.cache_clear()
    assert memory.bytes is None


@pytest.mark.parametrize(("visible", "expected"), [(None, 40), ("0,2", 30), ("1", 20), ("GPU-3", 40), ("", None)])
def test_other_gpus_than_the_visible_do_not_count(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int | None
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda name: int(name.removeprefix("GPU-")))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: SimpleNamespace(used=10 * (gpu + 1)))
    gpu_memory._gpus.cache_clear()
    assert gpu_memory.used_bytes() == expected
    gpu_memory._gpus.cache_clear()
