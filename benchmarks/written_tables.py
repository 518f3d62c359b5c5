"""The tables of the documentation, out of the records of the benchmarks: none of their figures is typed.

    python -m benchmarks.written_tables

writes them anew between the lines ``<!-- table NAME -->`` and ``<!-- end of NAME -->``; with ``--check`` it changes
nothing and fails if one of them is not what the records say. A table whose record does not exist says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.accuracy_record import ALL, NEEDLES, AccuracyRecord
from benchmarks.gpu_rows import REPOSITORY, RESULTS, Record, Row, headers_of

DOCUMENTS: Final = (REPOSITORY / "README.md", REPOSITORY / "docs" / "measurements.md")
_PLACE: Final = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def main(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a table is old.")] = False,
) -> None:
    """Write the tables."""
    old = []
    for document in DOCUMENTS:
        before = document.read_text()
        after = written(before, TABLES, RESULTS)
        if after != before:
            old.append(document.name)
            if not check:
                document.write_text(after)
    if check and old:
        typer.echo(f"not what the records say: {', '.join(old)}; run python -m benchmarks.written_tables", err=True)
        raise typer.Exit(1)


def written(text: str, tables: Mapping[str, tuple[str, Callable[[Path], str]]], results: Path) -> str:
    """Return ``text`` with its tables written anew.

    Args:
        text: a document.
        tables: by name, the file of its record in ``results``, and what makes Markdown of it.
        results: folder of the records.

    Raises:
        KeyError: the document has a place for a table that there is not.
    """

    def write(place: re.Match[str]) -> str:
        begin, name, end = place.groups()
        file, markdown = tables[name]
        path = results / file
        content = markdown(path) if path.exists() else "Not measured yet."
        return f"{begin}{content.rstrip()}\n{end}"

    return _PLACE.sub(write, text)


def accuracy_table(path: Path) -> str:
    """Return accuracy of pooled tasks by length and policy."""
    record = AccuracyRecord.read(path)
    headings = ("length", "policy", "prompts", "accuracy %", "less dense [95 %]", "needles less dense [95 %]")
    rows = []
    for row in (pool for pool in record.pools if pool.task == ALL):
        [needles] = [p for p in record.pools if (p.task, p.length, p.policy) == (NEEDLES, row.length, row.policy)]
        rows.append(
            (
                f"{row.length:,}",
                row.policy or "",
                str(row.samples),
                f"{row.accuracy:.1f}",
                _interval(row.difference, row.difference_low, row.difference_high),
                _interval(needles.difference, needles.difference_low, needles.difference_high),
                _percent(row.decode_attended_ratio),
                _percent(row.decode_kv_read_ratio),
                _percent(row.skipped_ratio),
            )
        )
    about = {
        f"{run.model}, {run.device}, {_commit(run.commit.model_dump() if run.commit else None)}"
        f"{'' if run.complete else ', stopped before its end'}"
        for run in record.runs
    }
    return _table((*headings, "attended %", "KV read %", "tiles skipped %"), rows) + f"\n{'; '.join(sorted(about))}.\n"


def tasks_table(path: Path) -> str:
    """Return dense accuracy by task and length, and what each policy differs from it."""
    record = AccuracyRecord.read(path)
    policies = list(record.runs[0].options["policies"])
    rows = []
    for task, length in sorted({(row.task, row.length) for row in record.rows}):
        cells = {row.policy: row for row in record.rows if (row.task, row.length) == (task, length)}
        dense = cells[policies[0]]
        differences = [_signed(cells[policy].difference) if policy in cells else "" for policy in policies[1:]]
        rows.append((task, f"{length:,}", f"{dense.accuracy:.1f}", *differences))
    return _table(("task", "length", *policies), rows)


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
                _percent(row["attended_ratio"]),
                _percent(row["kv_read_ratio"]),
                _percent(row["skipped_ratio"]),
            )
        )
    headings = ("length", "policy", "tokens", "KL to dense [95 %]", "top-1 agreement %", "attended %", "KV read %")
    return _table((*headings, "tiles skipped %"), rows) + f"\n{_about(content)}\n"


def shares_table(path: Path) -> str:
    """Return Tactic's Table 3: tokens per head, and the union of a KV head, by p."""
    content = json.loads(path.read_text())
    names = ("optimal", "cluster_optimal", "ranking_optimal", "tactic")
    rows = [
        (
            share,
            *(f"{found['tokens_per_head'][name]:.0f}" for name in names),
            *(_percent(found["union_ratio"][name]) for name in names),
            *_others(found),
        )
        for share, found in content["by_share"].items()
    ]
    headings = ("p", *(f"tokens, {name.replace('_', ' ')}" for name in names))
    headings = (*headings, *(f"union %, {name.replace('_', ' ')}" for name in names), "achieved share", "success %")
    return _table(headings, rows) + f"\n{_about(content)}\n"


def spans_table(path: Path) -> str:
    """Return what the size of spans does to the tokens that Tactic takes."""
    content = json.loads(path.read_text())
    rows = [
        (
            span,
            f"{found['tokens_per_head']['tactic']:.0f}",
            f"{found['tokens_per_head']['cluster_optimal']:.0f}",
            _percent(found["union_ratio"]["tactic"]),
            *_others(found),
        )
        for span, found in content["by_span"].items()
    ]
    headings = ("span", "tokens, tactic", "tokens, cluster optimal", "union %", "achieved share", "success %")
    return _table(headings, rows) + f"\n{_about(content)}\n"


def attention_table(path: Path) -> str:
    """Return what a layer costs with each policy."""
    return _layers_table(Record.read(path), lambda told: told.get("termination", "none") == "none")


def summary_table(path: Path) -> str:
    """Return how many times as fast as dense each policy's layer is."""
    record = Record.read(path)
    speedups: dict[str, dict[str, float]] = {}
    for row in record.rows:
        told = row.parameters
        unusual = row.policy == "dense" or "role" in told or told.get("termination") != "none"
        if told["stage"] != "layer" or row.speedup is None or unusual:
            continue
        size = f"union of {told['union_percent']} %" if "union_percent" in told else f"{_tokens_of(told):,} tokens"
        of_policy = speedups.setdefault(f"`{row.policy}`, {size}", {})
        of_policy[f"{row.context // 1024}K × {row.batch}"] = row.speedup
    cases = list(next(iter(speedups.values())))
    rows = [(policy, *(f"{found[case]:.1f}" for case in cases)) for policy, found in speedups.items()]
    return _table(("times as fast as dense", *cases), rows) + _devices(record)


def _tokens_of(told: Mapping[str, Any]) -> int:
    return int(told.get("budget") or told["sinks"] + told["window"])


def stopping_table(path: Path) -> str:
    """Return what deciding about early termination costs a layer."""
    return _layers_table(Record.read(path), lambda told: told.get("termination", "none") != "none")


def _layers_table(record: Record, shown: Callable[[Mapping[str, Any]], bool]) -> str:
    rows = [
        (
            f"{row.context // 1024}K × {row.batch}",
            _policy_of(row),
            f"{row.dense:.0f}",
            f"{row.measured:.0f}",
            f"{row.speedup:.2f}",
            "" if row.floor_ratio is None else f"{100 * row.floor_ratio:.0f}",
        )
        for row in record.rows
        if row.parameters["stage"] == "layer" and row.speedup is not None and shown(row.parameters)
    ]
    headings = ("context", "policy", "dense µs", "µs", "times as fast", "of its byte floor %")
    return _table(headings, rows) + _devices(record)


def prefill_table(path: Path) -> str:
    """Return what prefill attention costs with QUOKA."""
    record = Record.read(path)
    rows = [
        (
            f"{row.context // 1024}K",
            f"{row.policy}, {row.parameters['backend']}" if row.policy == "dense" else row.policy,
            ", ".join(
                f"{name} {value}" for name, value in row.parameters.items() if name in ("budget", "budget_ratio")
            ),
            row.parameters["stage"],
            "" if row.dense is None else f"{row.dense / 1e3:.2f}",
            f"{row.measured / 1e3:.2f}",
            "" if row.speedup is None else f"{row.speedup:.2f}",
        )
        for row in record.rows
    ]
    return _table(("context", "policy", "budget", "stage", "dense ms", "ms", "times as fast"), rows) + _devices(record)


TABLES: Final[Mapping[str, tuple[str, Callable[[Path], str]]]] = {
    "accuracy": ("accuracy.json", accuracy_table),
    "tasks": ("accuracy.json", tasks_table),
    "divergence": ("divergence.json", divergence_table),
    "tactic-shares": ("tactic-shares.json", shares_table),
    "tactic-spans": ("tactic-shares.json", spans_table),
    "attention": ("attention.json", attention_table),
    "summary": ("attention.json", summary_table),
    "stopping": ("attention.json", stopping_table),
    "prefill": ("prefill.json", prefill_table),
}
"""By name: the record's file, and what makes Markdown of it."""


def _pooled(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield what is of all tasks together."""
    yield from (row for row in rows if row["task"] == "all")


def _others(found: Mapping[str, Any]) -> tuple[str, str]:
    return f"{found['achieved_share']:.3f}", f"{100 * found['success_rate']:.1f}"


def _policy_of(row: Row) -> str:
    told = row.parameters
    details = [told[name] for name in ("backend",) if row.policy == "dense"]
    details += [f"union {told['read_percent']} %"] if "read_percent" in told else []
    details += [f"budget {told['budget']}"] if "budget" in told else []
    details += [told["role"]] if "role" in told else []
    details += [told["termination"]] if told.get("termination", "none") != "none" else []
    return ", ".join([row.policy, *details])


def _devices(record: Record) -> str:
    about = {f"{header['device']}, {_commit(header['commit'])}" for header in headers_of(record)}
    return f"\n{'; '.join(sorted(about))}.\n"


def _commit(commit: Mapping[str, Any] | None) -> str:
    if not commit:
        return "commit unknown"
    return f"commit {commit['id'][:8]}{' with changes' if commit['modified'] else ''}"


def _about(content: Mapping[str, Any]) -> str:
    return f"{content['model']}, {content['device']}, {_commit(content.get('commit'))}."


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _interval(mean: float | None, low: float | None, high: float | None) -> str:
    return "" if mean is None else f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f}"


if __name__ == "__main__":
    typer.run(main)
