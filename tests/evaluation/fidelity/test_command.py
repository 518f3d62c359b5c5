"""The command, from its options to record, table and plot, on a small random model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.evaluation.fidelity.test_record import ASKED_KEYS
from winnow_evaluation.fidelity.__main__ import app, parse_contexts
from winnow_evaluation.fidelity.measure import _Batch
from winnow_evaluation.fidelity.record import KEYS, FidelityRecord
from winnow_evaluation.options import OptionError
from winnow_service.cli.main import app as program

QUEST = '{"decode": {"policy": "quest", "budget": 64, "full_layers": 0}}'
TACTIC = '{"decode": {"policy": "tactic", "p": 0.5, "full_layers": 0}}'
STOPPED = '{"decode": {"policy": "streaming_llm", "window": 192}, "early_termination": {"patience": 1}}'
BOTH = '{"decode": {"policy": "quest", "budget": 64, "full_layers": 0}, "prefill": {"policy": "quoka", "budget": 64}}'
PREFILL = '{"prefill": {"policy": "quoka", "budget": 64}}'
LOWBIT = '{"decode": {"policy": "lowbit_top_p", "p": 0.5}}'
DELTA = '{"decode": {"policy": "delta", "budget": 64, "recency": 16, "full_layers": 0}}'


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in "abc":
        (folder / name).write_text(" ".join(f"{name}{number}" for number in range(400)))
    return folder


def _invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def _plain(output: str) -> str:
    """An error without the frame that it is printed in."""
    return " ".join(output.replace("│", " ").split())


@pytest.fixture(scope="module")
def record(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> FidelityRecord:
    output = tmp_path_factory.mktemp("record") / "record.json"
    policies = [
        argument for policy in (QUEST, TACTIC, STOPPED, PREFILL, BOTH, DELTA) for argument in ("--policy", policy)
    ]
    size = ["--context", "256,384", "--prompts", "3", "--tokens", "5", "--scored", "32", "--prefill-prompts", "2"]
    result = _invoke(
        "--model", folder, "--text-folder", text, *size, *policies, "--batch", "2", "--device", "cpu",
        "--output", output, "--plot", output.with_suffix(".svg"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "oracle top-p p 0.9" in result.stdout
    assert "streaming_llm window 192, early termination" in result.stdout
    assert output.with_suffix(".svg").is_file()
    return FidelityRecord.read(output)


def _row(record: FidelityRecord, **about: Any) -> dict[str, Any]:
    [found] = [row for row in record.rows if all(row[name] == value for name, value in about.items())]
    return found


def test_a_run_that_is_cut_off_leaves_what_it_measured(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Batch, "_measure_prefill", cut_off)
    output = tmp_path / "record.json"
    result = _invoke(
        "--model", folder, "--text-folder", text, "--context", "256", "--prompts", "2", "--tokens", "3", "--device",
        "cpu", "--policy", QUEST, "--policy", PREFILL, "--no-oracles", "--output", output,
    )  # fmt: skip
    assert result.exit_code != 0
    kept = FidelityRecord.read(output)
    assert [(row["phase"], row["policy"], row["prompts"]) for row in kept.rows] == [
        ("decode", "dense", 2),
        ("decode", "quest", 2),
    ]
    assert kept.runs[0]["complete"] is False


def test_each_row_says_what_it_is_of(record: FidelityRecord, folder: Path) -> None:
    for row in record.rows:
        assert list(row) == list(KEYS)
        assert set(ASKED_KEYS) <= row.keys()
        assert row["model"] == folder.name
        assert record.runs[row["run"]]["context"] == row["context"]
        low, high = row["intervals"]["kl"]
        assert low - 1e-12 <= row["kl"] <= high + 1e-12
        prompts, tokens = (3, 15) if row["phase"] == "decode" and "prefill" not in row["parameters"] else (2, None)
        assert row["prompts"] == prompts
        assert tokens in (None, row["tokens"])
    for run in record.runs:
        assert run["complete"]
        assert run.keys() >= {"model", "device", "dtype", "versions", "commit", "date", "interval", "delta_layers"}


def test_decode_rows(record: FidelityRecord) -> None:
    dense = _row(record, policy="dense", phase="decode", context=384)
    assert dense["kl"] == pytest.approx(0, abs=1e-6)
    assert (dense["top1"], dense["attended_ratio"], dense["kv_read_ratio"], dense["true_share"]) == (1, 1, 1, 1)
    quest = _row(record, policy="quest", parameters=_quest(record), context=384)
    assert quest["kl"] > 1e-3
    assert quest["attended_ratio"] < quest["kv_read_ratio"] < 0.5
    assert quest["success"] is quest["reported_share"] is quest["share_error"] is None
    assert 0 < quest["true_share"] < 1
    tactic = _row(record, policy="tactic", context=384)
    assert tactic["share_error"] == pytest.approx(tactic["reported_share"] - tactic["true_share"], abs=1e-6)
    assert 0 <= tactic["success"] <= 1
    assert tactic["skipped_ratio"] is None
    stopped = _row(record, policy="streaming_llm", context=384)
    assert 0 <= stopped["skipped_ratio"] <= stopped["terminated_ratio"] <= 1
    best = _row(record, policy="oracle_top_p", parameters={"p": 0.9, "sinks": 16}, context=384)
    assert best["success"] == 1
    assert best["true_share"] >= 0.9


def test_a_narrow_cache_is_compared_with_a_wide_one(folder: Path, text: Path, tmp_path: Path) -> None:
    everything = '{"decode": {"policy": "quest", "budget": 4096, "full_layers": 0}}'
    output = tmp_path / "record.json"
    arguments: list[str | Path] = ["--model", folder, "--text-folder", text, "--context", "256", "--prompts", "2"]
    arguments += ["--tokens", "5", "--device", "cpu", "--no-oracles", "--scored", "32", "--output", output]
    for policy in (everything, QUEST, LOWBIT, PREFILL):
        arguments += ["--policy", policy]
    result = _invoke(*arguments, "--kv-cache-dtype", "fp8_e4m3")
    assert result.exit_code == 0, result.output
    record = FidelityRecord.read(output)
    assert record.runs[0]["kv_cache_dtype"] == "fp8_e4m3"
    assert {row["model"] for row in record.rows} == {f"{folder.name}, KV in fp8_e4m3"}
    dense = _row(record, policy="dense", phase="decode")
    covering, quest = (row for row in record.rows if row["policy"] == "quest")
    # Dense attention itself is off, and a policy that reads everything as much.
    assert dense["kl"] > 1e-4
    assert covering["kl"] == pytest.approx(dense["kl"], rel=1e-3)
    assert quest["kl"] > dense["kl"]
    assert (dense["kv_read_ratio"], dense["true_share"]) == (1, 1)
    assert _row(record, policy="dense", phase="prefill")["kl"] > 1e-4
    assert _row(record, policy="quoka", phase="prefill")["kl"] > _row(record, policy="dense", phase="prefill")["kl"]
    refused = _invoke(*arguments, "--kv-cache-dtype", "fp8")
    assert refused.exit_code == 2
    assert "--kv-cache-dtype" in refused.output


def test_delta_says_where_its_layers_are_from(record: FidelityRecord) -> None:
    row = _row(record, policy="delta", context=256)
    told = record.runs[row["run"]]["delta_layers"]
    assert told["source"] == "one prompt that is not measured"
    assert row["parameters"]["delta_layers"] == told["layers"]


def test_rows_that_are_known_are_not_measured_again(
    record: FidelityRecord, folder: Path, text: Path, tmp_path: Path
) -> None:
    known, output = tmp_path / "known.json", tmp_path / "new.json"
    FidelityRecord(record.runs, [row for row in record.rows if row["policy"] != "oracle_pages"]).write(known)
    result = _invoke(
        "--model", folder, "--text-folder", text, "--context", "384", "--prompts", "3", "--tokens", "5", "--device",
        "cpu", "--policy", QUEST, "--policy", LOWBIT, "--bits", "2,4", "--known", known, "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = FidelityRecord.read(output)
    assert [(row["policy"], row["parameters"].get("bits")) for row in found.rows] == [
        ("dense", None),
        ("lowbit_top_p", 2),
        ("lowbit_top_p", 4),
        ("oracle_pages", None),
    ]
    assert "lowbit_top_p p 0.5, 4 bits" in result.stdout
    coarse, fine = found.rows[1:3]
    assert coarse["kv_read_ratio"] < fine["kv_read_ratio"]
    assert abs(fine["share_error"]) < abs(coarse["share_error"])
    # The prompts are the same: where there is one of each, dense attention is as before, but for rounding.
    own, before = found.rows[0]["intervals"], _row(record, policy="dense", phase="decode", context=384)["intervals"]
    assert own.keys() == before.keys()
    for figure, interval in own.items():
        assert interval == pytest.approx(before[figure], abs=5e-6), figure


def test_prefill_rows_and_what_is_decoded_after_them(record: FidelityRecord) -> None:
    again = _row(record, phase="prefill", policy="dense", context=384)
    assert again["kl"] == pytest.approx(0, abs=1e-6)
    quoka = _row(record, phase="prefill", policy="quoka", context=384)
    assert (quoka["prompts"], quoka["tokens"]) == (2, 64)
    assert quoka["kl"] > 1e-4
    assert 0 < quoka["attended_ratio"] < 1
    assert quoka["true_share"] is None
    both = [row for row in record.rows if "prefill" in row["parameters"] and row["context"] == 384]
    assert [(row["phase"], row["policy"], row["prompts"]) for row in both] == [("decode", "quest", 2)]
    assert both[0]["kl"] != _row(record, policy="quest", parameters=_quest(record), context=384)["kl"]


def _quest(record: FidelityRecord) -> dict[str, Any]:
    """The parameters of the policy that is decoded after a dense prefill."""
    of_quest = [row["parameters"] for row in record.rows if row["policy"] == "quest"]
    return next(parameters for parameters in of_quest if "prefill" not in parameters)


def test_tasks_of_the_evaluation(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    result = _invoke(
        "--model", folder, "--tasks", "niah_single_1,vt", "--context", "2k", "--prompts", "2", "--tokens", "4",
        "--policy", "fast", "--no-oracles", "--device", "cpu", "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = FidelityRecord.read(output)
    assert [(row["policy"], row["preset"], row["text"]) for row in record.rows] == [
        ("dense", None, "niah_single_1, vt"),
        ("lowbit_top_k", "fast", "niah_single_1, vt"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "9k"], "more than the model's context of 8192"),
        (["--context", "1"], "'1' is not a number of tokens from 64 on"),
        (["--context", "7k"], "the text has 0 pieces of 7233 tokens; 3 are asked for"),
        (["--policy", '{"decode": {"policy": "tactic", "p": 2}}'], "decode.p"),
        (["--policy", "swift"], "none of the presets"),
        (["--bits", "2,5"], "'5' is none of 2, 3, 4"),
        (["--policy", DELTA, "--delta-layers", "7"], "'7' is not the number of a layer, from 0 to 1"),
        (["--policy", DELTA, "--delta-layers", "a"], "'a' is not the number of a layer"),
        (["--tasks", "nothing"], "nothing"),
        (["--dtype", "int8"], "none of float32, bfloat16, float16"),
        (["--output", "/nowhere/record.json"], "does not exist"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder: Path, text: Path, arguments: list[str], message: str) -> None:
    given = ["--model", str(folder), "--text-folder", str(text), "--context", "256", "--prompts", "2"]
    result = _invoke(*given, "--device", "cpu", *arguments)
    assert result.exit_code != 0
    assert message in _plain(result.output)


@pytest.mark.parametrize(("text", "contexts"), [("2k,7.5k", (2048, 7680)), ("4096, 4096,64", (64, 4096))])
def test_contexts(text: str, contexts: tuple[int, ...]) -> None:
    assert parse_contexts(text) == contexts


@pytest.mark.parametrize("text", ["", "7.3", "2m", "63", "1.0001k"])
def test_bad_contexts(text: str) -> None:
    with pytest.raises(OptionError, match="not a number of tokens from 64 on"):
        parse_contexts(text)


def test_merge_and_plot_of_records(record: FidelityRecord, tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        record.write(tmp_path / name)
    arguments = [str(tmp_path / name) for name in ("all.json", "one.json", "two.json")]
    assert CliRunner().invoke(app, ["merge", *arguments]).exit_code == 0
    assert len(FidelityRecord.read(tmp_path / "all.json").rows) == len(record.rows)
    drawn = CliRunner().invoke(app, ["plot", str(tmp_path / "all.json"), "--folder", str(tmp_path / "plots")])
    assert drawn.exit_code == 0, drawn.output
    assert len(list((tmp_path / "plots").glob("fidelity-*.svg"))) == 2
    (tmp_path / "one.json").write_text("[]")
    assert "no record of winnow fidelity" in _plain(CliRunner().invoke(app, ["merge", *arguments]).output)


def test_the_program_starts_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def note(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", note)
    result = CliRunner().invoke(program, ["fidelity", "--model", "smollm2", "--context", "2k,4k"])
    assert result.exit_code == 3
    assert started == [[sys.executable, "-m", "winnow_evaluation.fidelity", "--model", "smollm2", "--context", "2k,4k"]]


WITHOUT_SGLANG = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "sglang":
            raise ImportError("sglang is not installed")
sys.meta_path.insert(0, Blocked())
from winnow_evaluation.fidelity.__main__ import main
main(sys.argv[1:])
"""


def test_it_runs_without_sglang(folder: Path, text: Path) -> None:
    given = ["--model", folder, "--text-folder", text, "--context", "128", "--prompts", "1", "--tokens", "2"]
    command = [sys.executable, "-c", WITHOUT_SGLANG, *map(str, given), "--policy", QUEST, "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "quest budget 64" in done.stdout
