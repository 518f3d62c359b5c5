"""The results of an evaluation: the JSON document, and the table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from rich import box
from rich.console import Console
from rich.table import Table

from winnow_service.evaluation.attended import attention_ratios
from winnow_service.evaluation.scoring import mean_score


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SampleRecord(_Model):
    """One sample, asked once. Times are in seconds; they and the counts are None where an error left none.

    Attributes:
        size: the size in words that the sample was made with.
        prompt_sha256: equal in two runs that put the same prompt.
        score: the fraction of references found; 0 for an error.
    """

    task: str
    length: int
    seed: int
    index: int
    size: int
    prompt_sha256: str
    prompt_tokens: int | None
    completion_tokens: int | None
    output: str
    references: tuple[str, ...]
    score: float
    latency: float | None
    ttft: float | None
    tpot: float | None
    finish_reason: str | None
    attention: dict[str, Any] | None
    error: str | None


class CellRow(_Model):
    """One task at one length. Accuracy is in percent, over all samples, an error counting 0; times are mean seconds
    over the samples without an error; ratios are of sums over them.

    Attributes:
        smallest_tokens: for a cell that does not fit, the tokens that its smallest samples need, 0 if not known.
    """

    task: str
    length: int
    status: Literal["measured", "does not fit"]
    smallest_tokens: int | None = None
    samples: int = 0
    errors: int = 0
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    size: float | None = None
    prompt_tokens: float | None = None
    latency: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    decode_attended_ratio: float | None = None
    decode_kv_read_ratio: float | None = None
    prefill_attended_ratio: float | None = None
    prefill_kv_read_ratio: float | None = None


class Commit(_Model):
    """The commit of the checkout that ran; ``modified`` if tracked files differed from it."""

    id: str
    modified: bool


class Header(_Model):
    """What was run, where and when (UTC)."""

    url: str
    model: str
    model_max_tokens: int | None
    device: str | None
    server_version: str | None
    versions: dict[str, str]
    commit: Commit | None
    date: str
    seed: int
    options: dict[str, Any]
    interval: str = "95 % Wilson score interval"
    complete: bool


class Report(_Model):
    """The whole JSON document."""

    header: Header
    rows: tuple[CellRow, ...]
    samples: tuple[SampleRecord, ...]

    def write(self, path: Path) -> None:
        """Write the document so that a reader sees the old file or the new one, never a part."""
        draft = path.with_name(f"{path.name}.{os.getpid()}.part")
        draft.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        draft.replace(path)


def unfitting_row(task: str, length: int, smallest_tokens: int) -> CellRow:
    """The row of a cell whose smallest sample is longer than its length."""
    return CellRow(task=task, length=length, status="does not fit", smallest_tokens=smallest_tokens)


def measured_row(task: str, length: int, records: Sequence[SampleRecord]) -> CellRow:
    """Summarise the records of one cell, of which there must be at least one."""
    answered = [record for record in records if record.error is None]
    score = mean_score([record.score for record in records])
    ratios = attention_ratios(record.attention for record in answered if record.attention is not None)
    return CellRow(
        task=task,
        length=length,
        status="measured",
        samples=len(records),
        errors=len(records) - len(answered),
        accuracy=100 * score.mean,
        accuracy_low=100 * score.low,
        accuracy_high=100 * score.high,
        size=fmean(record.size for record in records),
        prompt_tokens=_mean([record.prompt_tokens for record in answered]),
        latency=_mean([record.latency for record in answered]),
        ttft=_mean([record.ttft for record in answered]),
        tpot=_mean([record.tpot for record in answered]),
        decode_attended_ratio=ratios and ratios.decode.attended,
        decode_kv_read_ratio=ratios and ratios.decode.kv_read,
        prefill_attended_ratio=ratios and ratios.prefill.attended,
        prefill_kv_read_ratio=ratios and ratios.prefill.kv_read,
    )


def error_counts(records: Sequence[SampleRecord]) -> list[tuple[str, int]]:
    """The distinct errors, the most frequent first."""
    return Counter(record.error for record in records if record.error is not None).most_common()


def results_table(rows: Sequence[CellRow], *, plain: bool) -> Table:
    """The table of all cells; a column of ratios only where a response told them.

    Args:
        plain: draw it in Markdown.
    """
    ratios = [
        (f"{phase}\n{short}", f"{phase}_{kind}_ratio")
        for phase in ("decode", "prefill")
        for short, kind in (("attended", "attended"), ("KV read", "kv_read"))
    ]
    shown = [(title, name) for title, name in ratios if any(getattr(row, name) is not None for row in rows)]
    table = Table(box=box.MARKDOWN if plain else box.SIMPLE_HEAD)
    titles = ["task", "length", "accuracy\n% [95 %]", "samples", "errors", "prompt\ntokens"]
    titles += ["latency\ns", "TTFT\ns", "TPOT\nms", *(title for title, _ in shown)]
    for title in titles:
        heading = title.replace("\n", " ") if plain else title
        table.add_column(heading, justify="left" if title == "task" else "right", no_wrap=True)
    for row in rows:
        if row.status == "does not fit":
            need = f"needs {row.smallest_tokens}" if row.smallest_tokens else "refused"
            table.add_row(row.task, str(row.length), f"does not fit: {need}", *["-"] * (len(titles) - 3))
            continue
        table.add_row(
            row.task,
            str(row.length),
            f"{row.accuracy:.1f} [{row.accuracy_low:.1f}, {row.accuracy_high:.1f}]",
            str(row.samples),
            f"[bold red]{row.errors}[/]" if row.errors else "0",
            _cell(row.prompt_tokens, 0),
            _cell(row.latency, 3),
            _cell(row.ttft, 3),
            _cell(row.tpot, 2, scale=1000),
            *(_cell(getattr(row, name), 4) for _, name in shown),
        )
    return table


def print_results(console: Console, report: Report) -> None:
    """Print the table and, below it, what the reader must know of it."""
    console.print(results_table(report.rows, plain=not console.is_terminal))
    console.print(
        "Accuracy: mean fraction of references found (RULER, string match), an error counting 0, with its 95 % Wilson "
        "score interval. Other columns: means without errors.",
        style="dim",
    )
    for error, count in error_counts(report.samples):
        console.print(f"{count} x error: {error}", style="red", markup=False)
    asked_for_policy = report.header.options.get("policy") is not None
    if asked_for_policy and report.samples and not any(record.attention for record in report.samples):
        console.print("No response told its attention: the server may have ignored --policy.", style="yellow")


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return fmean(known) if known else None


def _cell(number: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if number is None else f"{number * scale:.{digits}f}"
