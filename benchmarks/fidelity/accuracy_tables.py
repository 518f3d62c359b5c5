"""The documentation's tables of accuracy, and of what Tactic chooses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.accuracy_record import ALL, NEEDLES, AccuracyRecord
from benchmarks.markdown_tables import commit_of, interval
from winnow_evaluation.over_http.report import CellRow
from winnow_evaluation.writing import markdown_table, number, percent


def accuracy_table(path: Path) -> str:
    """Return accuracy of pooled tasks by length and policy."""
    record = AccuracyRecord.read(path)
    rows = []
    for row in (pool for pool in record.pools if pool.task == ALL):
        [needles] = [p for p in record.pools if (p.task, p.length, p.policy) == (NEEDLES, row.length, row.policy)]
        of_needles = interval(needles.difference, needles.difference_low, needles.difference_high)
        rows.append((*_accuracy(row), of_needles, *_cost(row)))
    return markdown_table((*_ACCURACY, "needles less dense [95 %]", *_COST), rows) + _runs(record)


def cells_table(path: Path) -> str:
    """Return accuracy of each task by length and policy, beside the first policy."""
    record = AccuracyRecord.read(path)
    first = next(iter(record.runs[0].options["policies"]))
    rows = [(row.task, *_accuracy(row), *_cost(row)) for row in record.rows]
    headings = (name.replace("dense", first) for name in _ACCURACY)
    return markdown_table(("task", *headings, *_COST), rows) + _runs(record)


def tasks_table(path: Path) -> str:
    """Return dense accuracy by task and length, and what each policy differs from it."""
    record = AccuracyRecord.read(path)
    policies = _policies(record)
    tasks = sorted({row.task for row in record.rows})
    rows = []
    for length in sorted({row.length for row in record.rows}):
        for policy in policies:
            cells = {row.task: row for row in record.rows if (row.length, row.policy) == (length, policy)}
            differences = [_difference(cells.get(task), is_dense=policy == policies[0]) for task in tasks]
            rows.append((f"{length:,}", policy, *differences))
    return markdown_table(("length", "policy", *tasks), rows)


def lengths_table(path: Path) -> str:
    """Return each policy's accuracy of pooled tasks at each length, and what it differs from dense attention."""
    record = AccuracyRecord.read(path)
    pools = {(row.policy, row.length): row for row in record.pools if row.task == ALL}
    lengths = sorted({length for _, length in pools})
    rows = [
        (policy, *(_with_difference(pools.get((policy, length))) for length in lengths)) for policy in _policies(record)
    ]
    headings = [f"{length:,} ({_prompts(pools, length)} prompts)" for length in lengths]
    return markdown_table(("accuracy % (less dense [95 %])", *headings), rows) + _runs(record)


def _policies(record: AccuracyRecord) -> list[str]:
    """Return the first run's policies that have rows, in its order: a record may have dropped what others replace."""
    measured = {row.policy for row in record.rows}
    return [policy for policy in record.runs[0].options["policies"] if policy in measured]


def times_table(path: Path) -> str:
    """Return the time per token of each policy, and what it read, row by row."""
    record = AccuracyRecord.read(path)
    rows = [
        (
            f"{row.length:,}",
            row.policy or "",
            str(row.samples),
            f"{1000 * row.tpot:.1f}",
            percent(row.decode_kv_read_ratio),
        )
        for row in record.rows
        if row.tpot is not None
    ]
    return markdown_table(("length", "policy", "prompts", "time per token, ms", "KV read %"), rows) + _runs(record)


def _with_difference(row: CellRow | None) -> str:
    if row is None:
        return ""
    difference = interval(row.difference, row.difference_low, row.difference_high)
    return f"{row.accuracy:.1f}" + (f" ({difference})" if difference else "")


def _prompts(pools: Mapping[tuple[str | None, int], CellRow], length: int) -> int:
    return max(row.samples for (_, of_length), row in pools.items() if of_length == length)


_ACCURACY: Final = ("length", "policy", "prompts", "accuracy %", "less dense [95 %]")
_COST: Final = ("attended %", "KV read %", "tiles skipped %")


def _accuracy(row: CellRow) -> tuple[str, ...]:
    difference = interval(row.difference, row.difference_low, row.difference_high)
    return f"{row.length:,}", row.policy or "", str(row.samples), f"{row.accuracy:.1f}", difference


def _cost(row: CellRow) -> tuple[str, ...]:
    return tuple(map(percent, (row.decode_attended_ratio, row.decode_kv_read_ratio, row.skipped_ratio)))


def _difference(row: CellRow | None, *, is_dense: bool) -> str:
    if row is None:
        return ""
    return f"{row.accuracy:.1f}" if is_dense else number(row.difference, "+.1f")


def _runs(record: AccuracyRecord) -> str:
    about = {
        f"{run.model}, {run.device}, {commit_of(run.commit.model_dump() if run.commit else None)}"
        f"{'' if run.complete else ', stopped before its end'}"
        for run in record.runs
    }
    return f"\n{'; '.join(sorted(about))}.\n"


def divergence_table(path: Path) -> str:
    """Return KL and top-1 agreement of policies with dense attention on the same answers."""
    content = json.loads(path.read_text())
    rows = []
    for row in _pooled(content["rows"]):
        kl, top = row["kl"], row["top1_agreement"]
        rows.append(
            (
                f"{row['length']:,}",
                row["policy"],
                str(row["tokens"]),
                f"{kl['mean']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]",
                f"{100 * top['mean']:.1f}",
                percent(row["attended_ratio"]),
                percent(row["kv_read_ratio"]),
                percent(row["skipped_ratio"]),
            )
        )
    headings = ("length", "policy", "tokens", "KL to dense [95 %]", "top-1 agreement %", "attended %", "KV read %")
    return markdown_table((*headings, "tiles skipped %"), rows) + f"\n{_about(content)}\n"


def shares_table(path: Path) -> str:
    """Return Tactic's Table 3: tokens per head, and the union of a KV head, by p."""
    content = json.loads(path.read_text())
    names = ("optimal", "cluster_optimal", "ranking_optimal", "tactic")
    rows = [
        (
            share,
            *(f"{found['tokens_per_head'][name]:.0f}" for name in names),
            *(percent(found["union_ratio"][name]) for name in names),
            *_others(found),
        )
        for share, found in content["by_share"].items()
    ]
    headings = ("p", *(f"tokens, {name.replace('_', ' ')}" for name in names))
    headings = (*headings, *(f"union %, {name.replace('_', ' ')}" for name in names), "achieved share", "success %")
    return markdown_table(headings, rows) + f"\n{_about(content)}\n"


def spans_table(path: Path) -> str:
    """Return what the size of spans does to the tokens that Tactic takes."""
    content = json.loads(path.read_text())
    rows = [
        (
            span,
            f"{found['tokens_per_head']['tactic']:.0f}",
            f"{found['tokens_per_head']['cluster_optimal']:.0f}",
            percent(found["union_ratio"]["tactic"]),
            *_others(found),
        )
        for span, found in content["by_span"].items()
    ]
    headings = ("span", "tokens, tactic", "tokens, cluster optimal", "union %", "achieved share", "success %")
    return markdown_table(headings, rows) + f"\n{_about(content)}\n"


def _pooled(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield what is of all tasks together."""
    yield from (row for row in rows if row["task"] == "all")


def _others(found: Mapping[str, Any]) -> tuple[str, str]:
    return f"{found['achieved_share']:.3f}", f"{100 * found['success_rate']:.1f}"


def _about(content: Mapping[str, Any]) -> str:
    return f"{content['model']}, {content['device']}, {commit_of(content.get('commit'))}."
