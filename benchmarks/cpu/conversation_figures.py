"""From turns of conversations to a table: how long each waited for its first token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.cpu.server_figures import machine_line
from winnow_evaluation.writing import markdown_table

DENSE: Final = "dense"


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        turn: from 1 on.
        contestant: who answered it.
        conversation: its number; all contestants hold the same ones.
        prompt_tokens: all tokens before the answer.
        cached_tokens: of these, those that were in the cache.
        ttft: seconds to the answer's first token.
    """

    turn: int
    contestant: str
    conversation: int
    prompt_tokens: int
    cached_tokens: int
    ttft: float


def conversations_table(path: Path) -> str:
    """Return the record of ``benchmarks.cpu.conversations`` as Markdown."""
    return markdown(json.loads(path.read_text()))


def markdown(record: dict[str, Any]) -> str:
    """Return a record as Markdown: of each turn, by contestant, the tokens to prefill and the median wait."""
    turns = [Turn(**entry) for entry in record["turns"]]
    contestants = list(
        dict.fromkeys(turn.contestant for turn in sorted(turns, key=lambda turn: turn.contestant != DENSE))
    )
    headings = ["turn", "prompt, tokens"]
    headings += [heading for name in contestants for heading in (f"{name}: prefilled", "first token, ms")]
    rows = []
    for number in sorted({turn.turn for turn in turns}):
        of_turn = {name: [t for t in turns if (t.turn, t.contestant) == (number, name)] for name in contestants}
        row = [str(number), f"{round(median(t.prompt_tokens for t in of_turn[DENSE])):,}"]
        for held in of_turn.values():
            row.append(f"{round(median(t.prompt_tokens - t.cached_tokens for t in held)):,}")
            row.append(f"{median(t.ttft for t in held) * 1e3:,.0f}")
        rows.append(row)
    return f"{machine_line(record)}\n\n{markdown_table(headings, rows)}".rstrip()
