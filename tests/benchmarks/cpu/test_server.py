"""What the CPU benchmark makes of its measurements. It starts no server here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.command_line import numbers
from benchmarks.cpu.answer_timing import Timing, read_timing
from benchmarks.cpu.server import Collected
from benchmarks.cpu.server_figures import (
    DENSE,
    NATIVE,
    Kind,
    Series,
    cells,
    figures,
    headings,
    markdown,
    read_series,
    slower_policies,
    suggested_crossovers,
)
from benchmarks.needle_prompt import needle_prompt
from benchmarks.serving.server_plugins import NOOP, NOOP_ATTENTION
from winnow_evaluation.machine import surroundings

NEEDLE = Path("models/needle")


def event(tokens: int, reason: str | None = None, **more: Any) -> str:
    finish = None if reason is None else {"type": reason}
    meta = {"completion_tokens": tokens, "cached_tokens": 32, "finish_reason": finish, **more}
    return f"data: {json.dumps({'text': '', 'meta_info': meta})}"


def test_tokens_that_come_together_arrive_together() -> None:
    attention = {"decode": {"policy": "quest", "attended_ratio": 0.25}}
    lines = [
        (1.0, event(1)),
        (1.0, ""),
        (3.0, event(2)),
        (4.0, event(4)),
        (6.0, event(5, "length", attention=attention)),
    ]
    timing = read_timing([*lines, (6.0, "data: [DONE]")])
    assert timing == Timing([1.0, 3.0, 4.0, 4.0, 6.0], 32, 0.25)
    assert timing.ttft == 1
    assert timing.first_step == 2
    assert timing.tpot() == [pytest.approx(1)]


@pytest.mark.parametrize(
    "lines",
    [
        [event(1), 'data: {"error": {"message": "no"}}'],
        [event(1)],
        [event(1), event(2, "abort")],
        [],
    ],
)
def test_an_answer_that_fails_is_no_measurement(lines: list[str]) -> None:
    with pytest.raises(RuntimeError):
        read_timing((1.0, line) for line in lines)


def test_a_long_answer_is_cut_into_rounds() -> None:
    # A first token, a first step of 50, steps of 1, 1, 2, 2, and one that is left over.
    timing = Timing([10, 60, 61, 62, 64, 66, 99], 0, None)
    assert timing.tpot(2) == [1, 2]
    with pytest.raises(ValueError, match="answers"):
        timing.tpot(6)


def test_what_builds_an_index_is_told_apart() -> None:
    collected = Collected(Kind.DECODE, 512, "tactic", very_first_step=5.0)
    collected.add(Timing([1, 2, 4], 0, 0.5))
    collected.add(Timing([1, 2, 5], 0, 0.7))
    series = collected.series()
    assert series.seconds == [2, 3]
    assert (series.first_step, series.index_build) == (1, 4)
    assert series.attended_ratio == pytest.approx(0.6)


def series(contestant: str, seconds: Sequence[float], tokens: int = 512, kind: Kind = Kind.DECODE) -> Series:
    return Series(kind, tokens, contestant, seconds)


CELL = [
    series(NATIVE, [5.0, 5.0, 5.0]),
    series(DENSE, [4.0, 4.0, 40.0]),
    series(NOOP, [1.0, 1.0, 10.0]),
    series("tactic", [2.0, 2.0, 20.0]),
]


def test_the_faster_dense_contestant_is_the_baseline() -> None:
    found = {figure.series.contestant: figure for figure in figures(CELL)}
    tactic = found["tactic"]
    assert (tactic.baseline, tactic.times_as_fast, tactic.bound) == (DENSE, 2, 4)
    assert tactic.part_of_bound == 0.5
    assert tactic.slower_than_dense == -0.5
    assert found[DENSE].baseline == NATIVE
    assert found[DENSE].times_as_fast == 1.25
    assert found[NATIVE].baseline == DENSE
    faster = figures([series(NATIVE, [1.0]), series(DENSE, [2.0]), series("tactic", [2.0])])
    assert [figure.baseline for figure in faster] == [DENSE, NATIVE, NATIVE]
    assert faster[2].bound is None


def test_drift_from_round_to_round_is_nobodys() -> None:
    slowing = figures([series(DENSE, [1.0, 2.0, 4.0]), series("quest", [1.1, 2.2, 4.4])])
    assert slowing[1].slower_than_dense == pytest.approx(0.1)


def test_lengths_and_kinds_are_not_compared_with_each_other() -> None:
    found = figures(
        [*CELL, series(DENSE, [7.0], 8192), series("quoka", [1.0], 8192), series(DENSE, [3.0], 1, Kind.TTFT)]
    )
    assert [(figure.series.kind, figure.series.tokens) for figure in found] == [
        (Kind.TTFT, 1),
        *[(Kind.DECODE, 512)] * 4,
        *[(Kind.DECODE, 8192)] * 2,
    ]
    assert found[-1].times_as_fast == 7


def test_policies_that_are_too_slow() -> None:
    found = figures([series(DENSE, [1.0]), series(NOOP, [9.0]), series("quest", [1.04]), series("delta", [1.02])])
    assert [figure.series.contestant for figure in slower_policies(found, 0.03)] == ["quest"]
    assert (
        slower_policies(
            figures([series(DENSE, [1.0], 1, Kind.CROSSOVER), series("quest", [2.0], 1, Kind.CROSSOVER)]), 0
        )
        == []
    )


def test_suggested_crossovers() -> None:
    by_policy = {
        "always": (1.0, 0.9, 0.8),
        "from 2,048": (2.0, 1.005, 0.8),
        "from 4,096": (0.9, 2.0, 0.8),
        "never": (0.9, 0.9, 1.1),
    }
    measured = [
        series(name, [seconds[place]], tokens, Kind.CROSSOVER)
        for place, tokens in enumerate((512, 2048, 4096))
        for name, seconds in {DENSE: (1.0, 1.0, 1.0), **by_policy}.items()
    ]
    assert suggested_crossovers(figures(measured), 0.01) == {
        "always": 512,
        "from 2,048": 2048,
        "from 4,096": 4096,
        "never": None,
    }


def test_the_record_makes_the_tables() -> None:
    measured = [*CELL, series(DENSE, [3.0], 16384, Kind.TTFT), series("quoka prefill", [1.5], 16384, Kind.TTFT)]
    record = json.loads(json.dumps(surroundings() | {"model": "needle", "series": [asdict(each) for each in measured]}))
    assert read_series(record) == measured
    text = markdown(record)
    assert "| 16,384 | quoka prefill | 1.50 | dense | 2.00 |  |  |" in text
    assert "| 512 | tactic | 2000.00 | dense | 2.00 | 4.00 | 50% | -50.0% |  |  |  |" in text
    for figure in figures(measured):
        assert len(cells(figure)) == len(headings(figure.series.kind))


@pytest.mark.parametrize("length", [300, 2048])
def test_prompts_have_their_exact_length(length: int) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(NEEDLE)
    prompt, answer = needle_prompt(tokenizer, length, 0)
    assert len(prompt) == length
    assert answer
    text = tokenizer.decode(prompt)
    assert text.startswith("<|begin|><|user|>")
    assert text.endswith("<|assistant|>")
    assert needle_prompt(tokenizer, length, 0) == (prompt, answer)
    assert needle_prompt(tokenizer, length, 1)[0] != prompt
    with pytest.raises(ValueError, match="length"):
        needle_prompt(tokenizer, 16, 0)


def test_sglang_would_find_the_plugin_that_does_nothing() -> None:
    [plugin] = distributions(path=[str(NOOP_ATTENTION.folder)])
    [entry] = plugin.entry_points
    assert (entry.group, entry.value) == ("sglang.srt.plugins", "noop_attention:register")
    source = (NOOP_ATTENTION.folder / f"{entry.module}.py").read_text()
    assert f"def {entry.attr}(" in source
    assert f'"{NOOP_ATTENTION.notice}"' in source


def test_numbers() -> None:
    assert numbers("512,2048") == [512, 2048]
    assert numbers("") == []
