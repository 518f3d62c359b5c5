"""How answers of a server on CUDA are set beside those of one on the CPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serving.cuda_answers import Answer, compare
from benchmarks.serving.tables import cuda_answers_table
from tests.sglang_ext.answers import Step
from winnow_evaluation.writing import write_json


def answer(*tokens: int, shift: float = 0.0, attended: float = 0.5) -> Answer:
    steps = [Step(token, -1.0 - shift, 0.25) for token in tokens]
    return Answer("quest", steps, {"decode": {"attended_ratio": attended}})


def test_answers_are_compared_up_to_where_they_part() -> None:
    row = compare(answer(3, 4, 5, shift=0.125), answer(3, 4, 6, attended=0.25))
    assert (row.parted_at, row.gap, row.logprob_difference) == (2, 0.25, 0.125)
    assert row.attended == (0.5, 0.25)


def test_equal_answers_part_nowhere() -> None:
    row = compare(answer(3, 4), answer(3, 4))
    assert (row.parted_at, row.gap, row.logprob_difference) == (None, None, 0.0)


def test_the_table_tells_how_many_verified_answers_part(tmp_path: Path) -> None:
    rows = [vars(compare(answer(3, 4), answer(3, 4))), vars(compare(answer(3, 5), answer(3, 4)))]
    header = {"device": "a GPU", "dtype": "float32", "dense_backend": "triton", "commit": None}
    write_json(tmp_path / "record.json", {"header": header, "answers": rows, "verified": rows})
    table = cuda_answers_table(tmp_path / "record.json")
    assert "| quest |  | 0.0000 | 50.0 | 50.0 |" in table
    assert "| quest | 1 (0.2500) | 0.0000 | 50.0 | 50.0 |" in table
    told = "Of 2 answers with drafts or beside them, 1 part from the server's dense ones"
    assert f"{told}, at gaps up to 0.2500." in table
