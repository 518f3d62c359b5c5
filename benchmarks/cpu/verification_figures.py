"""From verified answers to a table: what a check comes to, and what drafts and checks read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.cpu.server_figures import machine_line
from winnow_evaluation.writing import markdown_table


@dataclass(frozen=True)
class Answer:
    """One verified answer.

    Attributes:
        text: kind of the prompt's text.
        prompt: its number.
        decode: the policy that drafts.
        draft_tokens: that are drafted for a check, at most; or ``auto``.
        equal: whether the tokens are those of dense attention.
        faster: seconds that dense attention's answer took behind its first token ÷ seconds of this one.
        steps: tokens behind the first.
        verifications, drafted, accepted: as the answer tells them.
        kv_read_ratio: bytes read in drafts and checks ÷ bytes that dense decoding of the same tokens reads.
    """

    text: str
    prompt: int
    decode: Mapping[str, Any]
    draft_tokens: int | str
    equal: bool
    faster: float
    steps: int
    verifications: int
    drafted: int
    accepted: int
    kv_read_ratio: float

    @classmethod
    def of(
        cls,
        text: str,
        prompt: int,
        decode: Mapping[str, Any],
        draft_tokens: int | str,
        equal: bool,
        faster: float,
        cost: Mapping[str, Any],
    ) -> Self:
        """Read the ``attention`` of an answer."""
        verify = cost["verify"]
        return cls(
            text,
            prompt,
            decode,
            draft_tokens,
            equal,
            faster,
            cost["decode"]["steps"],
            verify["verifications"],
            verify["drafted"],
            verify["accepted"],
            cost["decode"]["kv_read_ratio"],
        )


def verification_table(path: Path) -> str:
    """Return the record of ``benchmarks.cpu.verification`` as Markdown."""
    return markdown(json.loads(path.read_text()))


def markdown(record: dict[str, Any]) -> str:
    """Return a record as Markdown, a row for each policy and number of drafts."""
    answers = [Answer(**entry) for entry in record["answers"]]
    groups: dict[tuple[str, int | str], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((_label(answer.decode), answer.draft_tokens), []).append(answer)
    kinds = list(dict.fromkeys(answer.text for answer in answers))
    headings = [
        "drafts with",
        "drafted for a check",
        *(f"tokens a check, {kind}" for kind in kinds),
        "drafts that stand %",
    ]
    headings += ["a draft reads %", "all that is read %", "times as fast", "answers equal to dense attention's"]
    rows = []
    for (label, length), of in groups.items():
        by_kind = [tokens_of_check([answer for answer in of if answer.text == kind]) for kind in kinds]
        stand = sum(answer.accepted for answer in of) / _drafted(of)
        rows.append(
            [
                label,
                str(length),
                *(f"{tokens:.2f}" for tokens in by_kind),
                f"{stand:.1%}".rstrip("%"),
                f"{read_by_draft(of):.1%}".rstrip("%"),
                f"{_read(of):.1%}".rstrip("%"),
                f"{median(answer.faster for answer in of):.2f}",
                f"{sum(answer.equal for answer in of)} of {len(of)}",
            ]
        )
    what = f"{record['context']:,} tokens of context, answers of {record['tokens']} tokens."
    if (equal := record.get("dense_equal")) is not None:
        what += f" Of {len({(answer.text, answer.prompt) for answer in answers})} dense answers {equal} are the same"
        what += " to all prompts at once as to one at a time."
    return f"{machine_line(record)} {what}\n\n{markdown_table(headings, rows)}".rstrip()


def _label(decode: Mapping[str, Any]) -> str:
    name, *values = decode.values()
    return " ".join([f"`{name}`", *(f"{value:,}" for value in values)])


def tokens_of_check(answers: Sequence[Answer]) -> float:
    """Return how many tokens a check comes to."""
    return 1 + sum(answer.accepted for answer in answers) / max(1, sum(answer.verifications for answer in answers))


def _read(answers: Sequence[Answer]) -> float:
    return sum(answer.kv_read_ratio * answer.steps for answer in answers) / sum(answer.steps for answer in answers)


def read_by_draft(answers: Sequence[Answer]) -> float:
    """Return what share a draft reads of what a dense step does."""
    # A check reads the context once, which is as long for all tokens of an answer as makes no difference.
    drafts = sum(answer.kv_read_ratio * answer.steps - answer.verifications for answer in answers)
    return drafts / _drafted(answers)


def _drafted(answers: Sequence[Answer]) -> int:
    # Where drafts do not pay there may be none.
    return max(1, sum(answer.drafted for answer in answers))
