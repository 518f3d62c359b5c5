"""The documentation's tables are what the records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fidelity.accuracy_record import ALL, NEEDLES, AccuracyRecord
from benchmarks.folders import RESULTS
from benchmarks.written_tables import DOCUMENTS, TABLES, written
from winnow_evaluation.over_http.report import Header, Report, SampleRecord, measured_row

POLICIES = {"dense": {}, "quest": {"decode": {"policy": "quest"}}}
PLACE = "before\n<!-- table one -->\nold\n<!-- end of one -->\nafter\n"


def test_the_documents_say_what_the_records_say() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        assert written(text, TABLES, RESULTS) == text


def test_only_what_lies_between_the_marks_is_written(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("{}")
    text = written(PLACE, {"one": ("one.json", lambda path: f"{path.name}\n")}, tmp_path)
    assert text == PLACE.replace("old", "one.json")


def test_a_table_without_a_record_says_so(tmp_path: Path) -> None:
    text = written(PLACE, {"one": ("one.json", lambda _: "never")}, tmp_path)
    assert text == PLACE.replace("old", "Not measured yet.")


def test_a_place_for_no_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="one"):
        written(PLACE, {}, tmp_path)


def sample(task: str, policy: str, index: int, score: float) -> SampleRecord:
    told = dict.fromkeys(("latency", "ttft", "tpot", "finish_reason", "attention", "error"))
    return SampleRecord(
        task=task,
        length=8192,
        policy=policy,
        seed=0,
        index=index,
        size=1,
        prompt_sha256="",
        prompt_tokens=None,
        completion_tokens=None,
        output="",
        references=("x",),
        score=score,
        **told,
    )


def report(task: str, scores: dict[str, list[float]]) -> Report:
    samples = {
        policy: [sample(task, policy, index, score) for index, score in enumerate(of_policy)]
        for policy, of_policy in scores.items()
    }
    rows = [
        measured_row(task, 8192, records, None if policy == "dense" else samples["dense"])
        for policy, records in samples.items()
    ]
    header = Header(
        url="",
        model="needle",
        model_max_tokens=None,
        device=None,
        server_version=None,
        versions={},
        commit=None,
        date="",
        seed=0,
        options={"policies": POLICIES},
        complete=True,
    )
    return Report(header=header, rows=tuple(rows), samples=tuple(each for of in samples.values() for each in of))


def test_tasks_on_which_dense_attention_fails_are_in_no_pool(tmp_path: Path) -> None:
    record = AccuracyRecord.of(
        [
            report("niah_single_1", {"dense": [1.0] * 10, "quest": [1.0] * 9 + [0.0]}),
            report("vt", {"dense": [1.0] * 10, "quest": [0.5] * 10}),
            report("cwe", {"dense": [0.5] * 10, "quest": [0.0] * 10}),
        ]
    )
    record.write(tmp_path / "accuracy.json")
    pools = {(pool.task, pool.policy): pool for pool in AccuracyRecord.read(tmp_path / "accuracy.json").pools}
    assert pools[ALL, "quest"].samples == 20
    assert pools[ALL, "quest"].difference == pytest.approx(-30)
    assert pools[NEEDLES, "quest"].difference == pytest.approx(-10)
    assert pools[ALL, "dense"].difference is None


def test_reports_of_different_policies_are_not_put_together() -> None:
    other = report("vt", {"dense": [1.0], "quest": [1.0]})
    header = other.header.model_copy(update={"options": {"policies": {"dense": {}}}})
    with pytest.raises(ValueError, match="same policies"):
        AccuracyRecord.of([report("vt", {"dense": [1.0], "quest": [1.0]}), other.model_copy(update={"header": header})])


def test_policies_that_reports_share_can_be_kept_alone() -> None:
    one = report("vt", {"dense": [1.0] * 4, "quest": [1.0] * 4})
    header = one.header.model_copy(update={"options": {"policies": {"dense": {}, "quest": {"decode": {}}}}})
    other = report("cwe", {"dense": [1.0] * 4, "quest": [0.0] * 4}).model_copy(update={"header": header})
    kept = AccuracyRecord.of([one, other], ["dense"])
    assert {row.policy for row in (*kept.rows, *kept.pools)} == {"dense"}
    assert kept.runs[1].options["policies"] == {"dense": {}}
    with pytest.raises(ValueError, match="same policies"):
        AccuracyRecord.of([one, other], ["dense", "quest"])
    with pytest.raises(ValueError, match="no policy called delta"):
        AccuracyRecord.of([one, other], ["dense", "delta"])


def test_the_prompts_of_several_seeds_make_one_cell() -> None:
    one = report("vt", {"dense": [1.0] * 4, "quest": [1.0, 0.0, 1.0, 1.0]})
    samples = tuple(each.model_copy(update={"seed": 1}) for each in one.samples)
    again = AccuracyRecord.of([one, one.model_copy(update={"samples": samples})])
    assert [(row.policy, row.samples, row.accuracy) for row in again.rows] == [("dense", 8, 100), ("quest", 8, 75)]
    assert again.rows[1].difference == pytest.approx(-25)
    assert [pool.samples for pool in again.pools if pool.task == ALL] == [8, 8]
