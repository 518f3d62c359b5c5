"""The results of an evaluation: the JSON document, and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from winnow_evaluation.environment import Commit
from winnow_evaluation.over_http.attention_ratios import attention_ratios
from winnow_evaluation.over_http.policies import readable_label
from winnow_evaluation.tasks.scoring import Mean, mean_score, paired_difference
from winnow_evaluation.writing import write_json

_LEGEND_WIDTH = 120


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SampleRecord(_Model):
    """One sample, asked once with one policy. Times are in seconds; they and the counts are None where an error left
    none.

    Attributes:
        policy: the policy's label; None without one.
        size: the size in words that the sample was made with.
        prompt_sha256: equal in two runs that put the same prompt.
        score: the fraction of references found; 0 for an error.
    """

    task: str
    length: int
    policy: str | None = None
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
    """One task at one length with one policy. Accuracy is in percent, over all samples, an error counting 0; times are
    mean seconds over the samples without an error; ratios are of sums over them.

    Attributes:
        policy: the policy's label; None without one.
        difference: accuracy less that of the first policy on the same samples, in percentage points; None for the
            first.
        cached_tokens: mean tokens of the prompt that the server found in its cache, as its responses tell.
        estimated_share: the attention mass that the policy believes to have attended.
        terminated_ratio: part of (layer, KV head, step) that early termination stopped early.
        skipped_ratio: tiles that early termination skipped, by the tiles selected.
        smallest_tokens: for a cell that does not fit, the tokens that its smallest samples need, 0 if not known.
    """

    task: str
    length: int
    policy: str | None = None
    status: Literal["measured", "does not fit"]
    smallest_tokens: int | None = None
    samples: int = 0
    errors: int = 0
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    size: float | None = None
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    latency: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    decode_attended_ratio: float | None = None
    decode_kv_read_ratio: float | None = None
    prefill_attended_ratio: float | None = None
    prefill_kv_read_ratio: float | None = None
    estimated_share: float | None = None
    terminated_ratio: float | None = None
    skipped_ratio: float | None = None


class Header(_Model):
    """What was run, where and when (UTC).

    Attributes:
        interval: how the interval of an accuracy was made; ``difference_interval`` likewise, None where rows have none.
    """

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
    difference_interval: str | None = None
    complete: bool


class Report(_Model):
    """The whole JSON document."""

    header: Header
    rows: tuple[CellRow, ...]
    samples: tuple[SampleRecord, ...]

    def write(self, path: Path) -> None:
        """Write the document so that a reader sees the old file or the new one, never a part."""
        write_json(path, self.model_dump(mode="json"))


def measured_row(
    task: str, length: int, records: Sequence[SampleRecord], first: Sequence[SampleRecord] | None = None
) -> CellRow:
    """Summarise the records that one cell has of one policy, of which there must be at least one.

    Args:
        first: the first policy's records of the same samples in the same order; None for the first policy itself.
    """
    answered = [record for record in records if record.error is None]
    scores = [record.score for record in records]
    difference = None if first is None else paired_difference(scores, [record.score for record in first])
    ratios = attention_ratios(record.attention for record in answered if record.attention is not None)
    means = ("prompt_tokens", "latency", "ttft", "tpot")
    return CellRow(
        task=task,
        length=length,
        policy=records[0].policy,
        status="measured",
        samples=len(records),
        errors=len(records) - len(answered),
        **_in_percent("accuracy", mean_score(scores)),
        **({} if difference is None else _in_percent("difference", difference)),
        size=fmean(record.size for record in records),
        **{name: _mean([getattr(record, name) for record in answered]) for name in means},
        **({} if ratios is None else asdict(ratios)),
    )


def results_table(rows: Sequence[CellRow], *, plain: bool, policies: bool = False) -> Table:
    """The table of all cells; a column of what a response tells of its attention only where one told it.

    Args:
        plain: draw it in Markdown.
        policies: show the policies' labels.
    """
    columns = dict(_columns(rows, policies=policies))
    table = Table(box=box.MARKDOWN if plain else box.SIMPLE_HEAD)
    for title in columns:
        heading = title.replace("\n", " ") if plain else title
        table.add_column(heading, justify="left" if title in ("task", "policy") else "right", no_wrap=True)
    for row in rows:
        cells = [text(row) for text in columns.values()]
        if row.status == "does not fit":
            need = f"needs {row.smallest_tokens}" if row.smallest_tokens else "refused"
            names = 3 if policies else 2
            cells = [*cells[:names], f"does not fit: {need}", *["-"] * (len(columns) - names - 1)]
        table.add_row(*cells)
    return table


_Column = tuple[str, Callable[[CellRow], str]]
"""A title, and the text of a row's cell."""


def _columns(rows: Sequence[CellRow], *, policies: bool) -> Iterator[_Column]:
    def reported(title: str, field: str, digits: int) -> Iterator[_Column]:
        if any(getattr(row, field) is not None for row in rows):
            yield (title, lambda row: _cell(getattr(row, field), digits))

    yield ("task", lambda row: row.task)
    yield ("length", lambda row: str(row.length))
    if policies:
        yield ("policy", lambda row: escape(row.policy or "-"))
    yield ("accuracy\n% [95 %]", lambda row: _with_interval(row, "accuracy", ".1f"))
    if any(row.difference is not None for row in rows):
        yield ("difference\npoints [95 %]", lambda row: _with_interval(row, "difference", "+.1f"))
    yield ("samples", lambda row: str(row.samples))
    yield ("errors", lambda row: f"[bold red]{row.errors}[/]" if row.errors else "0")
    yield ("prompt\ntokens", lambda row: _cell(row.prompt_tokens, 0))
    if policies:
        yield from reported("cached\ntokens", "cached_tokens", 0)
    yield ("latency\ns", lambda row: _cell(row.latency, 3))
    yield ("TTFT\ns", lambda row: _cell(row.ttft, 3))
    yield ("TPOT\nms", lambda row: _cell(row.tpot, 2, scale=1000))
    for phase in ("decode", "prefill"):
        yield from reported(f"{phase}\nattended", f"{phase}_attended_ratio", 4)
        yield from reported(f"{phase}\nKV read", f"{phase}_kv_read_ratio", 4)
    yield from reported("estimated\nshare", "estimated_share", 4)
    yield from reported("terminated\nratio", "terminated_ratio", 4)
    yield from reported("skipped\nratio", "skipped_ratio", 4)


def print_results(console: Console, report: Report) -> None:
    """Print the table and, below it, what the reader must know of it."""
    asked: Mapping[str, Any] = report.header.options.get("policies") or {}
    several = len(asked) > 1
    named = any(label != readable_label(attention) for label, attention in asked.items())
    console.print(results_table(report.rows, plain=not console.is_terminal, policies=several or named))
    for paragraph in _legend(report, tuple(asked)):
        console.print(paragraph, style="dim", markup=False, highlight=False, width=min(console.width, _LEGEND_WIDTH))
    errors = Counter(record.error for record in report.samples if record.error is not None)
    for error, count in errors.most_common():
        console.print(f"{count} x error: {error}", style="red", markup=False)
    if asked and report.samples and not any(record.attention for record in report.samples):
        console.print("No response told its attention: the server may have ignored --policy.", style="yellow")


def _legend(report: Report, labels: Sequence[str]) -> Iterator[str]:
    yield (
        "Accuracy: mean fraction of references found (RULER, string match), an error counting 0, with its "
        f"{report.header.interval}. Other columns: means without errors."
    )
    if len(labels) > 1:
        yield (
            f"Difference: accuracy less that of {labels[0]}, in percentage points, on the same samples "
            f"({report.header.difference_interval}). Each sample is asked with {labels[0]} first, then with the "
            f"others at once: latency and TTFT of {labels[0]} are with a prompt that was not asked before; those of "
            "the others are with a prompt that the server may have cached, and cannot be compared with them."
        )
    if any(row.estimated_share is not None or row.terminated_ratio is not None for row in report.rows):
        yield "Estimated share, terminated and skipped ratio: means weighted by the tokens in context of all steps."


def _in_percent(name: str, mean: Mean) -> dict[str, float]:
    return {name: 100 * mean.mean, f"{name}_low": 100 * mean.low, f"{name}_high": 100 * mean.high}


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return fmean(known) if known else None


def _with_interval(row: CellRow, field: str, form: str) -> str:
    numbers = [getattr(row, name) for name in (field, f"{field}_low", f"{field}_high")]
    if None in numbers:
        return "-"
    mean, low, high = (format(number, form) for number in numbers)
    return f"{mean} [{low}, {high}]"


def _cell(number: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if number is None else f"{number * scale:.{digits}f}"
