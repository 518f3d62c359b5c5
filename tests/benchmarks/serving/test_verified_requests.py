"""How far verified answers are told to be those of dense attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import Record
from benchmarks.serving.tables import verified_requests_table
from benchmarks.serving.verified_requests import JSON_OBJECT, row_of


def answer(tokens: list[int], logprobs: list[float], text: str = "", ends: str = "stop", **verify: int) -> Any:
    """An answer of SGLang's, that tells of the token before each, too, which is by 0.5 less probable."""
    told = [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
    others = [[entry, [entry[0] - 0.5, entry[1] - 1, None]] for entry in told]
    meta = {"output_token_logprobs": told, "output_top_logprobs": others, "finish_reason": {"type": ends}}
    attention = {"attention": {"verify": verify}} if verify else {}
    return {"output_ids": tokens, "text": text, "meta_info": meta | attention}


def test_where_answers_part_it_is_told_by_how_much() -> None:
    dense = [answer([3, 6, 9], [-1.0, -2.0, -3.0]), answer([3], [-1.0]), answer([7, 8], [-1.0, -1.0])]
    own = [
        answer([3, 5, 1], [-1.25, -2.0, 0.0], verifications=1, accepted=3),
        answer([3], [-1.0], verifications=1, accepted=0),
        answer([7, 2], [-1.0, -1.0], verifications=2, accepted=3),
    ]
    told = row_of("logit bias", "a", own, dense, "m", 100).parameters
    assert told["equal_answers"] == 1
    assert told["leads"] == [pytest.approx(0.5), None]
    assert told["largest_error"] == pytest.approx(0.25)
    assert told["tokens_per_check"] == 1 + 6 / 4
    assert told["objects"] is None


def test_answers_of_another_length_part_where_the_shorter_one_ends() -> None:
    told = row_of("stop string", "a", [answer([3], [-1.0])], [answer([3, 6], [-1.0, -1.0])], "m", 100).parameters
    assert (told["equal_answers"], told["leads"]) == (0, [None])


def test_objects_are_those_of_the_schema(tmp_path: Path) -> None:
    whole = json.dumps({"title": "t", "words": ["a", "b", "c"], "count": 3})
    texts = [(whole, "stop"), ('{"title": "t"', "length"), ('{"title": 3}', "stop"), ("t", "stop"), ("t", "length")]
    answers = [answer([1], [-1.0], text, ends) for text, ends in texts]
    row = row_of(JSON_OBJECT, "a", answers, answers, "m", 100)
    assert row.parameters["objects"] == 2
    path = tmp_path / "record.json"
    header = {"device": "H200", "commit": {"id": "abc", "modified": False}, "texts": ["prose"]}
    Record(header, [row]).write(path)
    assert "| JSON schema | a |  | 5 of 5 |  | 0.000 | 2 of 5 |" in verified_requests_table(path)
