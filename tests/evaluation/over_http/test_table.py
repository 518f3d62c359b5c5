"""The documentation's table, from documents of ``winnow eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from winnow_evaluation.environment import Commit
from winnow_evaluation.over_http.report import CellRow, Header, Report
from winnow_evaluation.over_http.table import BEGIN, END, TableError, main, tables, updated

POLICIES = {"dense": {}, "tactic|0.9": {"decode": {"policy": "tactic", "p": 0.9}}}


def row(task: str, length: int, policy: str | None, accuracy: float, **more: Any) -> CellRow:
    known: dict[str, Any] = {
        "samples": 400, "accuracy": accuracy, "accuracy_low": accuracy - 1.5, "accuracy_high": accuracy + 0.5,
        "decode_attended_ratio": 1.0, "decode_kv_read_ratio": 1.0, "prefill_attended_ratio": 1.0,
    }  # fmt: skip
    return CellRow(task=task, length=length, policy=policy, status="measured", **(known | more))


def sparse(task: str, length: int, accuracy: float, difference: float, **more: Any) -> CellRow:
    known: dict[str, Any] = {
        "decode_attended_ratio": 0.0614, "decode_kv_read_ratio": 0.1178,
        "difference": difference, "difference_low": difference - 1, "difference_high": difference + 1,
    }  # fmt: skip
    return row(task, length, "tactic|0.9", accuracy, **(known | more))


def report(*rows: CellRow, **more: Any) -> Report:
    known: dict[str, Any] = {
        "url": "http://x", "model": "needle", "model_max_tokens": 32768, "device": "one H200", "server_version": None,
        "versions": {"python": "3.11.7", "sglang": "0.5.16"}, "commit": Commit(id="0123456789", modified=False),
        "date": "2026-11-21T11:56:51+00:00", "seed": 1, "options": {"samples": 400, "policies": POLICIES},
        "complete": True,
    }  # fmt: skip
    return Report(header=Header(**(known | more)), rows=rows, samples=())


ONE = report(
    row("vt", 8192, "dense", 84.9),
    sparse("vt", 8192, 84.9, 0.0),
    row("niah_single_1", 8192, "dense", 99.5),
    sparse("niah_single_1", 8192, 98.5, -1.0, prefill_attended_ratio=0.25, prefill_kv_read_ratio=0.27, errors=2),
    row("niah_single_1", 16384, "dense", 99.0),
    CellRow(task="cwe", length=16384, policy="dense", status="does not fit", smallest_tokens=20000),
    complete=False,
)
OTHER = report(
    row("niah_multikey_1", 16384, "dense", 97.0, decode_attended_ratio=None, decode_kv_read_ratio=None),
    sparse("niah_multikey_1", 16384, 97.0, 0.25),
    commit=None,
    device=None,
    server_version="0.5.16",
)

TABLES = """\
**8,192 tokens** (one H200, needle, 2026-11-21, commit 0123456, 400 samples, seed 1, python 3.11.7, sglang 0.5.16, \
interrupted):

| task | dense | tactic\\|0.9 |
| --- | ---: | ---: |
| `niah_single_1` | 99.5 [98.0, 100.0] / 1.000 / 1.000 | 98.5 [97.0, 99.0] / 0.061 / 0.118<br>prefill 0.250 / 0.270<br>\
-1.0 [-2.0, +0.0]<br>2 errors |

Left out, dense below 85 %: `vt` (84.9).

**16,384 tokens** (one H200, needle, 2026-11-21, commit 0123456, 400 samples, seed 1, python 3.11.7, sglang 0.5.16, \
interrupted; unknown device, needle, 2026-11-21, no commit, 400 samples, seed 1, python 3.11.7, sglang 0.5.16, \
server 0.5.16):

| task | dense | tactic\\|0.9 |
| --- | ---: | ---: |
| `niah_single_1` | 99.0 [97.5, 99.5] / 1.000 / 1.000 | – |
| `niah_multikey_1` | 97.0 [95.5, 97.5] / – / – | 97.0 [95.5, 97.5] / 0.061 / 0.118<br>+0.2 [-0.8, +1.2] |

Not measured, the task does not fit: `cwe`.

"""


def test_a_table_for_each_length_says_what_the_documents_say() -> None:
    text = tables({"one": ONE, "other": OTHER}, at_least=85)
    assert text.startswith(TABLES)
    assert "difference in accuracy to dense on the same samples" in text.removeprefix(TABLES)


def test_the_bound_decides_which_tasks_are_shown() -> None:
    assert "| `vt` | 84.9" in tables({"one": ONE}, at_least=84.9)
    none = tables({"one": ONE}, at_least=99.6)
    assert "| task |" not in none
    assert "Left out, dense below 99.6 %: `niah_single_1` (99.5), `vt` (84.9)." in none


def test_results_without_policies_have_one_column() -> None:
    plain = report(row("vt", 4096, None, 90.0), options={"samples": 400, "policy": None})
    text = tables({"plain": plain}, at_least=85)
    assert "| task | no policy |" in text
    assert "difference" not in text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (report(), "b: no rows"),
        (ONE, r"b: vt at 8192 with 'dense' is in a too"),
        (report(row("vt", 4096, "tactic|0.9", 90.0)), r"b: the first policy is 'tactic\|0.9' and must be 'dense'"),
        (report(row("vt", 4096, "dense", 90.0), model="other"), "several models: needle, other"),
        (
            report(row("vt", 4096, "dense", 90.0), options={"samples": 400, "policies": {"tactic|0.9": {}}}),
            r"b: 'tactic\|0.9' is not the same policy",
        ),
    ],
)
def test_documents_that_do_not_make_one_table_are_refused(other: Report, message: str) -> None:
    with pytest.raises(TableError, match=message):
        tables({"a": ONE, "b": other}, at_least=85)


@pytest.mark.parametrize("document", ["nothing", f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_document_without_the_marks_is_refused(document: str) -> None:
    with pytest.raises(TableError, match="table: begin"):
        updated(document, "text")


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_command_prints_or_writes_the_same_tables(tmp_path: Path) -> None:
    one, other, document = tmp_path / "one.json", tmp_path / "other.json", tmp_path / "accuracy.md"
    ONE.write(one)
    OTHER.write(other)
    document.write_text(f"# Accuracy\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    printed = run(str(one), str(other))
    assert printed.exit_code == 0, printed.output
    assert printed.stdout.startswith(TABLES)
    for _ in range(2):
        assert run(str(one), str(other), "--write", str(document)).exit_code == 0
        assert document.read_text() == f"# Accuracy\n\n{BEGIN}\n\n{printed.stdout.strip()}\n\n{END}\n\nThe end.\n"


def test_the_command_names_what_it_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    one, document, wrong = tmp_path / "one.json", tmp_path / "accuracy.md", tmp_path / "wrong.json"
    ONE.write(one)
    document.write_text("no marks")
    wrong.write_text('{"rows": []}')
    for arguments, words in (
        ((str(one), "--write", str(document)), "must hold"),
        ((str(wrong),), "is no document of winnow eval: header: Field required"),
        ((str(one), str(one) + "x"), "does not exist"),
        ((str(one), "--at-least", "101"), "--at-least"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.replace("│", " ").split())
    assert document.read_text() == "no marks"
