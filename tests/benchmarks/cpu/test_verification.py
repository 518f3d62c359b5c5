"""What the benchmark of verified answers makes of them. It starts no server here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu.verification_figures import Answer, markdown
from benchmarks.cpu.verification_plot import draw, points_of
from tests.plots import assert_readable
from winnow_evaluation.machine import surroundings

OTHER = {"policy": "quest", "budget": 512}
DECODE = {"policy": "lowbit_top_k", "budget": 1024}


def cost(verifications: int, drafted: int, accepted: int, read: float) -> dict[str, Any]:
    verify = {"verifications": verifications, "drafted": drafted, "accepted": accepted}
    return {"decode": {"steps": 20, "kv_read_ratio": read}, "verify": verify}


def table(*answers: Answer, **more: Any) -> str:
    own = {"model": "smollm2", "context": 7680, "tokens": 21, "answers": [asdict(answer) for answer in answers]}
    record = json.loads(json.dumps(surroundings() | own | more))
    record["versions"]["sglang"] = "0.5.16"
    return markdown(record)


def test_a_row_tells_what_checks_come_to_and_what_is_read() -> None:
    # 5 checks and 16 drafts that read a tenth each are 6.6 contexts for 20 tokens.
    prose = Answer.of("prose", 0, DECODE, 4, True, 1.5, cost(5, 16, 15, 6.6 / 20))
    code = Answer.of("code", 0, DECODE, 4, False, 0.5, cost(4, 16, 16, 5.6 / 20))
    assert "| `lowbit_top_k` 1,024 | 4 | 4.00 | 5.00 | 96.9 | 10.0 | 30.5 | 1.00 | 1 of 2 |" in table(prose, code)
    beside = "Of 2 dense answers 1 are the same to all prompts at once as to one at a time."
    assert beside in table(prose, code, dense_equal=1)
    assert beside not in table(prose, code)


@pytest.mark.parametrize("drafts", [4, "auto"])
def test_answers_without_drafts_have_a_row(drafts: int | str) -> None:
    answer = Answer.of("prose", 0, DECODE, drafts, True, 1.0, cost(0, 0, 0, 1.0))
    assert f"| {drafts} | 1.00 | 0.0 |" in table(answer)


def test_the_plot_has_a_point_for_each_budget_and_a_line_for_each_policy(tmp_path: Path) -> None:
    smaller = DECODE | {"budget": 256}
    answers = [
        Answer.of("prose", 0, DECODE, 4, True, 1.0, cost(5, 16, 15, 6.6 / 20)),
        Answer.of("code", 0, DECODE, 4, True, 1.0, cost(4, 16, 16, 5.6 / 20)),
        Answer.of("prose", 0, smaller, 4, True, 1.0, cost(10, 40, 10, 12 / 20)),
        Answer.of("prose", 0, OTHER, 4, True, 1.0, cost(10, 40, 10, 14 / 20)),
    ]
    points = points_of(answers)
    assert points == {
        "lowbit_top_k": [(pytest.approx(5.0), 2.0), (pytest.approx(10.0), pytest.approx(40 / 9))],
        "quest": [(pytest.approx(10.0), 2.0)],
    }
    record = {"model": "smollm2", "context": 7680, "answers": [asdict(answer) for answer in answers]}
    path = draw([record], 4, tmp_path)
    assert path.name == "verification-smollm2-7680.svg"
    assert_readable(path)
    with pytest.raises(ValueError, match="no answer has 8 drafts"):
        draw([record], 8, tmp_path)
    with pytest.raises(ValueError, match="2 models or contexts"):
        draw([record, record | {"context": 32600}], 4, tmp_path)
