from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import typer
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner, Result

from winnow_service.cli import doctor

SUPPORTED = {
    "sglang-winnow": "0.1.0",
    "sglang": "0.5.16",
    "torch": "2.11.0",
    "transformers": "5.12.1",
    "flashinfer-python": "0.6.14",
}
CPU = {
    "cuda": False,
    "device": "CPU (x86_64, 2 threads)",
    "platform": "sglang_winnow.platform",
    "problem": None,
}
CUDA = CPU | {"cuda": True, "device": "NVIDIA H100", "platform": "sglang.srt.platforms.cuda"}


class Machine:
    """A machine whose facts the tests decide."""

    def __init__(self) -> None:
        self.packages = dict(SUPPORTED)
        self.programs = {
            "redis-server": "/usr/bin/redis-server",
            "prometheus": "/usr/bin/prometheus",
            "haproxy": "/usr/sbin/haproxy",
        }
        self.facts: dict[str, object] | doctor.ProbeError = dict(CPU)

    def version(self, name: str) -> str:
        if name not in self.packages:
            raise PackageNotFoundError(name)
        return self.packages[name]

    def requires(self, name: str) -> list[str]:
        self.version(name)
        return ["torch==2.11.0", "transformers==5.12.1", "flashinfer_python==0.6.14", "other; python_version < '3'"]

    def probe(self) -> dict[str, object]:
        if isinstance(self.facts, doctor.ProbeError):
            raise self.facts
        return self.facts


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(doctor, "version", machine.version)
    monkeypatch.setattr(doctor, "requires", machine.requires)
    monkeypatch.setattr(doctor, "probe", machine.probe)
    monkeypatch.setattr(shutil, "which", machine.programs.get)
    monkeypatch.setenv("COLUMNS", "250")
    return machine


def run() -> Result:
    app = typer.Typer()
    app.command()(doctor.doctor)
    return CliRunner().invoke(app)


@pytest.mark.parametrize("facts", [CPU, CUDA])
def test_supported_machine_passes(machine: Machine, facts: dict[str, object]) -> None:
    machine.facts = facts
    result = run()
    assert result.exit_code == 0, result.output
    for shown in (*SUPPORTED.values(), str(facts["device"]), "/usr/bin/prometheus"):
        assert shown in result.output


@pytest.mark.parametrize("newest", ["0.5.23", "0.5.23.post1"])
def test_window_reaches_to_its_last_version(machine: Machine, newest: str) -> None:
    machine.packages["sglang"] = newest
    assert run().exit_code == 0


@pytest.mark.parametrize("outside", ["0.5.15", "0.5.15.post1", "0.5.24", "0.6.0"])
def test_sglang_outside_the_window_fails(machine: Machine, outside: str) -> None:
    machine.packages["sglang"] = outside
    result = run()
    assert result.exit_code == 1
    remedy = result.output.splitlines()[-1]
    assert remedy.startswith("sglang: ")
    assert outside in remedy
    assert "pip install 'sglang-winnow[runtime]'" in remedy


@pytest.mark.parametrize("package", ["sglang", "torch", "transformers", "flashinfer-python"])
def test_missing_package_fails(machine: Machine, package: str) -> None:
    del machine.packages[package]
    result = run()
    assert result.exit_code == 1
    assert "not installed" in result.output
    assert result.output.splitlines()[-1].startswith(f"{package}: install the runtime")


@pytest.mark.parametrize("package", ["torch", "transformers", "flashinfer-python"])
def test_package_that_sglang_does_not_accept_fails(machine: Machine, package: str) -> None:
    machine.packages[package] = "1.0"
    result = run()
    assert result.exit_code == 1
    assert f"{package}: 1.0 is outside ==" in result.output


@pytest.mark.parametrize(
    "facts",
    [CPU | {"platform": "sglang.srt.platforms.interface"}, CUDA | {"platform": "sglang_winnow.platform"}],
    ids=["no plugin on the CPU", "plugin in CUDA's place"],
)
def test_wrong_platform_fails(machine: Machine, facts: dict[str, object]) -> None:
    machine.facts = facts
    result = run()
    assert result.exit_code == 1
    assert f"CPU platform plugin: SGLang chose {facts['platform']}" in result.output


def test_failed_probe_is_reported(machine: Machine) -> None:
    machine.facts = doctor.ProbeError("ModuleNotFoundError: No module named 'torch'")
    result = run()
    assert result.exit_code == 1
    assert "device: ModuleNotFoundError: No module named 'torch'; install the runtime" in result.output


def test_programs_of_the_tests_are_not_required(machine: Machine) -> None:
    machine.programs.clear()
    result = run()
    assert result.exit_code == 0
    assert result.output.count("not found") == 3


def test_old_python_is_refused() -> None:
    check = doctor.check_version("python", "3.10.4", doctor.SUPPORTED_PYTHON, "use Python 3.11 or newer")
    assert check.status is doctor.Status.FAILED
    assert "3.10.4 is outside >=3.11; use Python 3.11 or newer" in check.remedy


def test_release_candidate_counts_as_its_number() -> None:
    assert doctor.check_version("sglang", "0.5.17rc1", SpecifierSet(">=0.5.16"), "").status is doctor.Status.OK


def test_a_server_that_would_not_start_fails(machine: Machine) -> None:
    machine.facts = CPU | {"problem": "the server does not start, because SGLang has no such function"}
    result = run()
    assert result.exit_code == 1
    assert "hooks on SGLang: the server does not start, because SGLang has no such function" in result.output


RELEASES: dict[str, dict[str, object]] = {
    "0.5.16": {"start": {}, "cpu": {}, "cuda": {}},
    "0.5.17": {"start": {}},
}


@pytest.mark.parametrize(
    ("release", "cuda", "found", "remedy"),
    [
        ("0.5.16", True, "each policy on a CPU, all on a CPU, CUDA", ""),
        ("0.5.17", False, "each policy on a CPU", ""),
        ("0.5.17", True, "each policy on a CPU", "CUDA was tested with SGLang 0.5.16 alone"),
        ("0.5.17.post1", False, "each policy on a CPU", ""),
        ("0.5.18", False, "nothing", "tests ran with SGLang 0.5.16, 0.5.17"),
    ],
)
def test_it_says_what_was_tested(release: str, cuda: bool, found: str, remedy: str) -> None:
    check = doctor.tested_check(release, RELEASES, cuda=cuda)
    assert (check.found, check.remedy) == (found, remedy)
    assert check.status is (doctor.Status.OPTIONAL if remedy else doctor.Status.OK)


def test_it_says_that_no_release_was_tested_on_a_gpu() -> None:
    check = doctor.tested_check("0.5.17", {"0.5.16": {"cpu": {}}, "0.5.17": {"start": {}}}, cuda=True)
    assert check.remedy == "CUDA was tested with no release of SGLang"


def probing_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "module_command", lambda *_: [sys.executable, "-c", code])


def test_probe_reports_the_childs_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    probing_runs("raise SystemExit('no such device')", monkeypatch)
    with pytest.raises(doctor.ProbeError, match=r"^no such device$"):
        doctor.probe()


def test_probe_reads_past_what_libraries_print(monkeypatch: pytest.MonkeyPatch) -> None:
    probing_runs(f"print('noise'); print({json.dumps(json.dumps(CPU))})", monkeypatch)
    assert doctor.probe() == CPU


def test_probe_finds_this_machines_platform() -> None:
    facts = doctor.probe()
    assert facts["platform"] == ("sglang.srt.platforms.cuda" if facts["cuda"] else "sglang_winnow.platform")
    assert facts["problem"] is None


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("WINNOW_POLICIES", "none_such", "the server does not start, because WINNOW_POLICIES: no decode policy"),
        ("SGLANG_PLUGINS", "other", "SGLang does not load Winnow's plugin; unset SGLANG_PLUGINS"),
    ],
)
def test_probe_finds_what_keeps_a_server_from_starting(
    setting: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, value)
    assert problem in str(doctor.probe()["problem"])


def test_doctor_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, winnow_service.cli.doctor; print({'torch', 'sglang'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "set()"
