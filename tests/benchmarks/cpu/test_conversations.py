"""What the benchmark of conversations makes of its turns. It starts no server here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.cpu.conversation_figures import Turn, markdown
from benchmarks.cpu.conversations import Conversation, hold
from winnow_evaluation.machine import surroundings


class FakeServer:
    """It answers with as many tokens as are asked for, numbered by request, and caches nothing."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def events(self, content: str) -> Iterator[tuple[float, str]]:
        body = json.loads(content)
        self.asked.append(body)
        count = body["sampling_params"]["max_new_tokens"]
        for tokens in range(1, count + 1):
            reason = {"type": "length"} if tokens == count else None
            meta = {"completion_tokens": tokens, "cached_tokens": 0, "finish_reason": reason}
            event = {"output_ids": [len(self.asked)] * tokens, "meta_info": meta}
            yield 1.0 * tokens, f"data: {json.dumps(event)}"
        yield 9.0, "data: [DONE]"


def test_a_turn_goes_on_with_the_contestants_own_answer() -> None:
    server: Any = FakeServer()
    sides = [Conversation("dense", None, "a", [5, 6]), Conversation("quest", {"keep": True}, "b", [5, 6])]
    held = hold(server, sides, turns=3, tokens=3, message=2, number=0)
    assert [(turn.turn, turn.contestant) for turn in held] == [
        (1, "dense"), (1, "quest"), (2, "quest"), (2, "dense"), (3, "dense"), (3, "quest"),
    ]  # fmt: skip
    assert [turn.prompt_tokens for turn in held] == [2, 2, 7, 7, 12, 12]
    of_dense, of_quest = ([body for body in server.asked if body["extra_key"] == key] for key in "ab")
    assert of_dense[1]["input_ids"][:5] == [5, 6, 1, 1, 1]
    assert of_quest[1]["input_ids"][:5] == [5, 6, 2, 2, 2]
    assert of_dense[1]["input_ids"][5:] == of_quest[1]["input_ids"][5:]
    assert json.loads(of_quest[0]["sampling_params"]["custom_params"]["attention"]) == {"keep": True}


def test_the_record_makes_the_table() -> None:
    turns = [
        Turn(turn, name, number, 100 * turn, 100 * turn - new, new / 100 + number)
        for turn in (1, 2)
        for name, new in (("quest", 50), ("dense", 20))
        for number in range(3)
    ]
    record = json.loads(json.dumps(surroundings() | {"model": "needle", "turns": [asdict(turn) for turn in turns]}))
    record["versions"]["sglang"] = "0.5.16"
    text = markdown(record)
    assert "| turn | prompt, tokens | dense: prefilled | first token, ms | quest: prefilled | first token, ms |" in text
    assert "| 2 | 200 | 20 | 1,200 | 50 | 1,500 |" in text


@pytest.mark.parametrize("turn", [1, 2])
def test_the_median_of_conversations_is_told(turn: int) -> None:
    held = [Turn(turn, "dense", number, 100, 0, ttft) for number, ttft in enumerate((9.0, 0.1, 0.2))]
    record = surroundings() | {"model": "needle", "turns": [asdict(each) for each in held]}
    record["versions"]["sglang"] = "0.5.16"
    assert f"| {turn} | 100 | 100 | 200 |" in markdown(record)
