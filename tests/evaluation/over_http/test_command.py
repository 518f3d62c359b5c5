"""``winnow eval`` from the command line to the JSON document, against a server on a real port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.evaluation.fake_model import FakeModel, serving
from tests.evaluation.tasks.tiny_tasks import tiny_tasks
from winnow_evaluation import environment
from winnow_evaluation.environment import Commit
from winnow_evaluation.over_http.report import Report
from winnow_service.cli import evaluate

ATTENTION = {
    "decode": {"policy": "quest", "steps": 4, "context_tokens": 500, "attended_ratio": 0.25, "kv_read_ratio": 0.5},
    "prefill": {"policy": "dense", "tokens": 496, "cached_tokens": 0, "attended_ratio": 1.0, "kv_read_ratio": 1.0},
}


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "builtin_tasks", tiny_tasks)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(evaluate.evaluate)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def run_to_report(output: Path, *arguments: str) -> tuple[Result, Report]:
    result = run("--output", str(output), *arguments)
    return result, Report.model_validate_json(output.read_text())


def test_a_right_server_scores_100_and_the_document_says_all(tmp_path: Path) -> None:
    with serving(FakeModel(attention=ATTENTION, api_key="secret-key")) as url:
        result, report = run_to_report(
            tmp_path / "out.json", "--url", url, "--tasks", "tiny", "--lengths", "512,1k", "--samples", "6",
            "--seed", "7", "--policy", '{"decode": {"policy": "quest"}}', "--api-key", "secret-key",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    header = report.header
    assert (header.url, header.model, header.model_max_tokens) == (url, "fake-1", 32768)
    assert (header.device, header.server_version) == ("cpu", "0.0-fake")
    assert (header.seed, header.complete) == (7, True)
    assert header.options["policies"] == {"quest": {"decode": {"policy": "quest"}}}
    assert header.difference_interval is None
    assert {"python", "httpx"} <= header.versions.keys()
    assert [(row.task, row.length) for row in report.rows] == [
        ("tiny_one", 512), ("tiny_one", 1024), ("tiny_four", 512), ("tiny_four", 1024),
    ]  # fmt: skip
    for row in report.rows:
        assert (row.status, row.samples, row.errors, row.accuracy) == ("measured", 6, 0, 100.0)
        assert row.accuracy_low is not None
        assert row.accuracy_low < 100.0
        assert row.accuracy_high == 100.0
        assert row.prompt_tokens is not None
        assert 0.95 * row.length < row.prompt_tokens + 8 <= row.length
        assert row.latency is not None
        assert row.ttft is not None
        assert 0 < row.ttft <= row.latency
        assert row.decode_attended_ratio == pytest.approx(0.25)
        assert row.decode_kv_read_ratio == pytest.approx(0.5)
        assert row.prefill_attended_ratio == pytest.approx(1.0)
        assert (row.policy, row.difference, row.cached_tokens) == ("quest", None, 0)
    assert report.rows[2].tpot is not None
    assert [(s.task, s.length, s.index) for s in report.samples][:7] == [
        *(("tiny_one", 512, index) for index in range(6)), ("tiny_one", 1024, 0),
    ]  # fmt: skip
    for sample in report.samples:
        assert (sample.score, sample.error, sample.finish_reason, sample.seed) == (1.0, None, "stop", 7)
        assert all(reference in sample.output for reference in sample.references)
        assert sample.attention == ATTENTION
    assert "secret-key" not in (tmp_path / "out.json").read_text()
    assert "100.0 [61.0, 100.0]" in result.stdout
    assert "decode attended" in result.stdout
    assert "0.2500" in result.stdout
    assert "policy" not in result.stdout
    assert "difference" not in result.stdout.lower()


def test_requests_are_streamed_greedy_and_carry_the_policy(tmp_path: Path) -> None:
    fake = FakeModel()
    with serving(fake) as url:
        result = run(
            "--url", f"{url}/v1", "--tasks", "tiny_one", "--lengths", "512", "--samples", "2", "--policy", "thrifty"
        )
    assert result.exit_code == 0, result.output
    assert len(fake.streamed()) == 2
    for body in fake.streamed():
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("fake-1", 0, 8)
        assert body["stream_options"] == {"include_usage": True}
        assert body["attention"] == "thrifty"
    assert "the server may have ignored --policy" in result.stdout
    assert "attended" not in result.stdout.split("Accuracy:")[0]


def test_completions_are_asked_with_a_plain_prompt() -> None:
    fake = FakeModel(has_tokenize=False)
    with serving(fake) as url:
        result = run("--url", url, "--tasks", "tiny_one", "--lengths", "512", "--samples", "3", "--api", "completions")
    assert result.exit_code == 0, result.output
    assert all(body["prompt"].endswith("\nAnswer:") and "attention" not in body for body in fake.streamed())


def test_tokens_of_a_chat_prompt_are_asked_for_once_and_sent_with_every_policy() -> None:
    fake = FakeModel()
    with serving(fake) as url:
        result = run(
            "--url", url, "--tasks", "tiny_one", "--lengths", "512", "--samples", "3", "--api", "tokens",
            "--policy", "exact", "--policy", "balanced", "--policy", "fast",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "100.0 %" in result.stderr
    prompts = [tuple(body["prompt"]) for body in fake.streamed()]
    assert len(prompts) == 9
    assert len(set(prompts)) == 3


def test_a_server_that_tells_no_tokens_of_chats_is_named() -> None:
    with serving(FakeModel(has_tokenize=False)) as url:
        result = run("--url", url, "--tasks", "tiny_one", "--lengths", "512", "--samples", "3", "--api", "tokens")
    assert result.exit_code == 1
    assert "HTTP 404" in result.output


def test_wrong_answers_lower_the_accuracy_and_are_no_errors(tmp_path: Path) -> None:
    with serving(FakeModel(wrong_every=3)) as url:
        result, report = run_to_report(
            tmp_path / "out.json", "--url", url, "--tasks", "tiny_one", "--lengths", "512", "--samples", "30"
        )
    assert result.exit_code == 0, result.output
    wrong = sum("0000000" in sample.output for sample in report.samples)
    assert 0 < wrong < 30
    assert report.rows[0].accuracy == pytest.approx(100 * (30 - wrong) / 30)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeModel(failing_every=3), "HTTP 500: deliberate failure"),
        (FakeModel(breaking_every=3), "the stream ended before the answer did"),
    ],
)
def test_errors_count_as_zero_are_shown_and_fail_the_run(tmp_path: Path, fake: FakeModel, message: str) -> None:
    with serving(fake) as url:
        result, report = run_to_report(
            tmp_path / "out.json", "--url", url, "--tasks", "tiny_one", "--lengths", "512", "--samples", "30"
        )
    assert result.exit_code == 1
    failed = [sample for sample in report.samples if sample.error is not None]
    assert 0 < len(failed) < 30
    assert {sample.error for sample in failed} == {message}
    assert {(sample.score, sample.latency) for sample in failed} == {(0.0, None)}
    row = report.rows[0]
    assert (row.samples, row.errors) == (30, len(failed))
    assert row.accuracy == pytest.approx(100 * (30 - len(failed)) / 30)
    assert f"{len(failed)} x error: {message}" in result.stdout


def test_runs_with_other_policies_orders_and_concurrencies_see_the_same_prompts(tmp_path: Path) -> None:
    def prompts(name: str, *arguments: str) -> dict[tuple[str, int, int], str]:
        with serving(FakeModel()) as url:
            _, report = run_to_report(tmp_path / name, "--url", url, *arguments)
        return {(s.task, s.length, s.index): s.prompt_sha256 for s in report.samples}

    many = prompts("a", "--tasks", "tiny,uneven", "--lengths", "512,1024", "--samples", "5", "--concurrency", "16")
    few = prompts(
        "b", "--tasks", "uneven", "--lengths", "1024", "--samples", "3", "--concurrency", "1", "--policy", "p"
    )
    assert len(set(many.values())) == len(many) == 30
    assert few == {key: many[key] for key in few}
    other = prompts("c", "--tasks", "uneven", "--lengths", "1024", "--samples", "3", "--seed", "1")
    assert not set(other.values()) & set(many.values())


@pytest.mark.parametrize("max_tokens", [32768, 512])
def test_a_sample_that_goes_over_is_made_smaller(tmp_path: Path, max_tokens: int) -> None:
    with serving(FakeModel(max_tokens=max_tokens, has_tokenize=False)) as url:
        result, report = run_to_report(
            tmp_path / "out.json", "--url", url, "--tasks", "giant", "--lengths", "512", "--samples", "40"
        )
    assert result.exit_code == 0, result.output
    sizes = {sample.size for sample in report.samples}
    assert len(sizes) > 1
    assert all(sample.prompt_tokens is not None and sample.prompt_tokens + 8 <= 512 for sample in report.samples)
    assert report.rows[0].accuracy == 100.0


def test_a_server_that_refuses_for_ever_is_told_in_its_own_words(tmp_path: Path) -> None:
    with serving(FakeModel(max_tokens=512, refusing_every=3)) as url:
        result, report = run_to_report(
            tmp_path / "out.json", "--url", url, "--tasks", "tiny_one", "--lengths", "512", "--samples", "30"
        )
    assert result.exit_code == 1
    errors = {sample.error for sample in report.samples} - {None}
    assert errors == {"HTTP 400: deliberate refusal"}


def test_a_cell_that_does_not_fit_is_told_and_the_others_run(tmp_path: Path) -> None:
    fake = FakeModel(template_tokens=80)
    with serving(fake) as url:
        result, report = run_to_report(
            tmp_path / "out.json", "--url", url, "--tasks", "tiny_one", "--lengths", "64,512", "--samples", "2"
        )
    assert result.exit_code == 0, result.output
    assert [row.status for row in report.rows] == ["does not fit", "measured"]
    assert report.rows[0].accuracy is None
    assert report.rows[0].smallest_tokens is not None
    assert report.rows[0].smallest_tokens > 64
    assert len(report.samples) == 2
    assert "does not fit: needs" in result.stdout
    with serving(fake) as url:
        assert run("--url", url, "--tasks", "tiny_one", "--lengths", "64").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lengths", "12"), ("--lengths", "64", "16777216")),
        (("--lengths", "64k"), ("--lengths", "65536", "32768")),
        (("--tasks", "nothing"), ("--tasks", "'nothing'", "tiny_one")),
        (("--policy", "{"), ("--policy", "JSON")),
        (("--samples", "0"), ("--samples", "1")),
        (("--concurrency", "0"), ("--concurrency", "1")),
        (("--output", "/nowhere/at/all.json"), ("--output", "/nowhere/at")),
        (("--api", "soap"), ("--api", "'soap'")),
    ],
)
def test_a_bad_option_is_named_with_its_bound(
    arguments: tuple[str, ...], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    with serving(FakeModel()) as url:
        result = run("--url", url, *arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.stderr


def test_a_server_that_is_not_there_is_one_line() -> None:
    with serving(FakeModel()) as url:
        pass
    result = run("--url", url, "--tasks", "tiny_one")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: cannot connect to {url}")
    assert result.stderr.count("\n") == 1


def test_a_server_that_stops_counting_ends_the_run_and_the_finished_cells_are_kept(tmp_path: Path) -> None:
    with serving(FakeModel(tokenize_limit=30)) as url:
        result, report = run_to_report(
            tmp_path / "out.json", "--url", url, "--tasks", "tiny", "--lengths", "512,1k,2k,4k", "--samples", "2"
        )
    assert result.exit_code == 1
    assert "Error: HTTP 503" in result.stderr
    assert not report.header.complete
    assert 0 < len(report.rows) < 8
    assert "| tiny_one |" in result.stdout


def test_a_refused_key_is_told() -> None:
    with serving(FakeModel(api_key="secret-key")) as url:
        result = run("--url", url, "--tasks", "tiny_one", "--api-key", "other")
    assert result.exit_code == 1
    assert "HTTP 401: wrong key" in result.stderr


@pytest.mark.parametrize("tracked", [True, False])
def test_only_a_tracked_file_tells_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracked: bool) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    module, other = tmp_path / "module.py", tmp_path / "other.py"
    module.write_text("first")
    other.write_text("first")
    git("init")
    git("add", module.name if tracked else other.name)
    git("commit", "-m", "one")
    monkeypatch.setattr(environment, "__file__", str(module))
    commit = environment.checkout_commit()
    if not tracked:
        assert commit is None
        return
    assert commit == Commit(id=git("rev-parse", "HEAD"), modified=False)
    module.write_text("second")
    assert environment.checkout_commit() == Commit(id=commit.id, modified=True)


def test_the_list_names_tasks_and_groups() -> None:
    result = run("--list")
    assert result.exit_code == 0
    assert "tiny_one   summary of tiny_one" in result.stdout
    assert "tiny       tiny_one, tiny_four" in result.stdout


WINNOW = [sys.executable, "-c", "from winnow_service.cli.evaluate import evaluate; import typer; typer.run(evaluate)"]


def test_a_process_of_its_own_measures_the_tasks_that_ship(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with serving(FakeModel()) as url:
        done = subprocess.run(
            [*WINNOW, "--url", url, "--tasks", "niah_single_1,niah_multikey_1", "--lengths", "1k", "--samples", "4",
             "--output", str(output)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = Report.model_validate_json(output.read_text())
    assert [row.accuracy for row in report.rows] == [100.0, 100.0]
    assert "| niah_single_1" in done.stdout
    assert "niah_multikey_1 at 1024: accuracy 100.0 %, 0 errors" in done.stderr


def test_an_interrupted_process_keeps_the_finished_cells(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with serving(FakeModel()) as url:
        process = subprocess.Popen(
            [*WINNOW, "--url", url, "--tasks", "niah_single_1", "--lengths", "512,1k,2k,4k,8k,16k", "--samples", "200",
             "--concurrency", "2", "--output", str(output)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            # A shell that starts the tests in the background has them, and what they start, ignore the signal.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("niah_single_1 at 512: accuracy")
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Interrupted" in stderr
    assert "Traceback" not in stderr
    assert "| niah_single_1" in stdout
    document: dict[str, Any] = json.loads(output.read_text())
    assert document["header"]["complete"] is False
    assert document["rows"][0]["length"] == 512
