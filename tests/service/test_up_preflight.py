"""What ``winnow up`` checks first, where a test must say what the machine is like."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from winnow_service.supervisor import preflight, programs
from winnow_service.supervisor.programs import Device, client_address, resolve, runtime_program


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_sglang_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(preflight.PreflightError, match=r"pip install 'sglang-winnow\[runtime\]'"):
        preflight.check_runtime_installed()


def test_auto_is_cuda_where_the_driver_lists_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
    assert resolve(Device.auto) is Device.cuda
    assert resolve(Device.cpu) is Device.cpu
    preflight.check_device(Device.cuda)


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices found'"])
def test_auto_is_cpu_where_the_driver_lists_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, script)
    assert resolve(Device.auto) is Device.cpu
    with pytest.raises(preflight.PreflightError, match="--device cpu"):
        preflight.check_device(Device.cuda)


def test_gpu_memory_is_what_counts_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "echo 4000; echo 2000")
    model = tmp_path / "model"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.touch()
    preflight.check_memory(model, Device.cuda)
    with weights.open("wb") as file:
        file.truncate(3 * preflight.GIB)
    with pytest.raises(preflight.PreflightError, match=r"needs about 6\.0 GiB of GPU memory .* and 5\.9 GiB are free"):
        preflight.check_memory(model, Device.cuda)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{4 * preflight.GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * preflight.GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {preflight.GIB}\n")
    monkeypatch.setattr(preflight, "CGROUP", tmp_path)
    assert preflight.available_memory_bytes() == 2 * preflight.GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory_bytes() != 2 * preflight.GIB


def test_the_runtime_listens_on_loopback_and_gets_what_follows_the_dashes() -> None:
    program = runtime_program(Path("/models/tiny"), Device.cuda, 31000, ["--page-size", "16"])
    command = " ".join(program.command[1:])
    assert command.startswith("-m sglang.launch_server --host 127.0.0.1 --port 31000 ")
    assert command.endswith(
        " --model-path /models/tiny --served-model-name tiny --attention-backend winnow --page-size 16"
    )
    assert program.ready_url == "http://127.0.0.1:31000/health"
    assert "CUDA_VISIBLE_DEVICES" not in program.environment
    assert runtime_program(Path("m"), Device.cpu, 1, []).environment["CUDA_VISIBLE_DEVICES"] == ""


def test_on_a_gpu_the_runtime_serves_policies_unless_told_otherwise() -> None:
    assert "--attention-backend winnow" in " ".join(runtime_program(Path("m"), Device.cuda, 1, []).command)
    for own in (["--attention-backend", "fa3"], ["--attention-backend=fa3"]):
        assert "winnow" not in runtime_program(Path("m"), Device.cuda, 1, own).command
    assert "winnow" not in runtime_program(Path("m"), Device.cpu, 1, []).command


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_address_that_is_printed_can_be_reached(host: str, address: str) -> None:
    assert client_address(host, 80) == address


def test_no_driver_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not programs.has_cuda_gpu()
