"""The documentation's tables of fidelity: how far policies are from dense attention on real text.

Presets change. So a row is of the preset whose policy it was measured with, whatever it was called then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.accuracy_record import ALL, AccuracyRecord
from benchmarks.fidelity.frontier import is_of
from benchmarks.markdown_tables import commit_of
from winnow_evaluation.fidelity.record import FidelityRecord, identity_of
from winnow_evaluation.fidelity.table import row_label
from winnow_evaluation.writing import markdown_table, number, percent
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_service.policies.presets import PRESETS

_CHANGED: Final = ("sinks", "observation_window", "recency_ratio", "queries", "delta_layers")
_SUMMARY: Final = {"p": 0.9, "budget": 1024, "window": 1020}
"""How much the policies read whose rows the README shows, by the field that says so."""
_NOT_IN_SUMMARY: Final = "oracle_pages"
_BITS: Final = 2
"""Of low-bit keys, unless a row is asked for by another number."""


def fidelity_table(path: Path) -> str:
    """Return all that was measured at each model's longest context, decode and then prefill."""
    record = FidelityRecord.read(path)
    rows = [
        (
            row["model"],
            f"{row['context']:,}",
            f"{row['phase']}: {row_label(row)}",
            _with_interval(row),
            f"{100 * row['top1']:.1f}",
            f"{row['loss_change']:+.3f}",
            percent(row["kv_read_ratio"]),
            percent(row["attended_ratio"]),
            *(number(row[name]) for name in ("reported_share", "true_share")),
            number(row["share_error"], "+.3f"),
            number(row["share_error_p95"]),
            percent(row["success"]),
            _worst(row),
        )
        for row in _longest(_named(record))
    ]
    headings = (
        "model", "context", "policy", "KL, nats [95 %]", "top-1 equal %", "loss", "KV read %", "attended %",
        "reported share", "true share", "error", "95th pct.", "reach p %", "worst layer",
    )  # fmt: skip
    return markdown_table(headings, rows) + _about(record.runs)


def changes_table(path: Path) -> str:
    """Return policies with the parameters that tell them apart: what a change of a default changed."""
    record = FidelityRecord.read(path)
    rows = [
        (
            f"{row['phase']}: {row_label(row)}",
            ", ".join(f"`{name}` {row['parameters'][name]}" for name in _CHANGED if name in row["parameters"]),
            _with_interval(row),
            f"{100 * row['top1']:.1f}",
            percent(row["kv_read_ratio"]),
            *(number(row[name]) for name in ("reported_share", "true_share")),
            percent(row["success"]),
        )
        for row in record.rows
        if row["policy"] != "dense"
    ]
    headings = (
        "policy", "parameters", "KL, nats [95 %]", "top-1 equal %", "KV read %", "reported share", "true share",
        "reach p %",
    )  # fmt: skip
    return markdown_table(headings, rows) + _about(record.runs)


def contexts_table(path: Path) -> str:
    """Return each policy's KL at each context of each model, and beside it what it reads."""
    record = FidelityRecord.read(path)
    named = _named(record)
    cells = list(dict.fromkeys((row["model"], row["context"]) for row in named))
    labels = dict.fromkeys(f"{row['phase']}: {row_label(row)}" for row in named)
    by_place = {(row["model"], row["context"], f"{row['phase']}: {row_label(row)}"): row for row in named}
    rows = [(label, *(_kl_and_reads(by_place.get((*cell, label))) for cell in cells)) for label in labels]
    headings = ("KL, nats (KV read %)", *(f"{model}, {context:,}" for model, context in cells))
    return markdown_table(headings, rows) + _about(record.runs)


def summary_table(path: Path) -> str:
    """Return one row of each policy, and the presets', at each model's longest context."""
    record = FidelityRecord.read(path)
    rows = [
        (
            row["model"],
            f"{row['context']:,}",
            row_label(row),
            f"{row['kl']:.4f}",
            f"{100 * row['top1']:.1f}",
            percent(row["kv_read_ratio"]),
            number(row["true_share"]),
        )
        for row in _longest(_named(record))
        if row["phase"] == "decode" and _is_summarised(row)
    ]
    headings = ("model", "context", "policy", "KL, nats", "top-1 equal %", "KV read %", "attention held")
    return markdown_table(headings, rows)


def overview_table(path: Path) -> str:
    """Return what policies read and lose on the model that RULER's tasks were asked of: fidelity, and these tasks.

    Presets come first, those that RULER's tasks were not asked with, too.

    Args:
        path: the record of fidelity; those of RULER's tasks, ``accuracy-MODEL.json`` and
            ``accuracy-presets-MODEL.json``, lie beside it. A length that was not asked about with all tasks is left
            out.
    """
    record = FidelityRecord.read(path)
    asked_over_http = [row for row in record.rows if path.with_name(f"accuracy-{row['model']}.json").is_file()]
    model = max(asked_over_http, key=lambda row: int(row["context"]))["model"]
    rows = [row for row in _longest(_named(record)) if row["model"] == model]
    before, now = (AccuracyRecord.read(path.with_name(f"accuracy-{name}{model}.json")) for name in ("", "presets-"))
    # What was asked once more is not what it was before.
    lost = {
        (pool.policy, pool.length): pool.difference
        for ruler in (before, now)
        for pool in ruler.pools
        if pool.task == ALL
        and pool.length in _complete_lengths(ruler)
        and (ruler is now or pool.policy not in _asked(now))
    }
    lengths = sorted({length for _, length in lost})
    asked = {name: _policy(given) for ruler in (before, now) for name, given in _asked(ruler).items()}
    table = []
    for name, policy in ({"dense": AttentionPolicy()} | _sparse_presets() | asked).items():
        row = next((row for row in rows if is_of(row, policy)), None)
        if row is None:
            continue
        kl, reads = f"{row['kl']:.4f}", percent(row["kv_read_ratio"])
        table.append((name, reads, kl, *(number(lost.get((name, length)), "+.1f") for length in lengths)))
    headings = ("", "KV read %", "KL, nats", *(f"RULER {length // 1024}K, points" for length in lengths))
    return markdown_table(headings, table)


def _asked(ruler: AccuracyRecord) -> Mapping[str, Any]:
    policies: Mapping[str, Any] = ruler.runs[0].options["policies"]
    return policies


def unions_table(path: Path) -> str:
    """Return what ``tactic`` reads beside the fewest of its clusters that would do (``cluster_optimal``)."""
    runs = json.loads(path.read_text())["runs"]
    rows = [
        (
            run["model"],
            f"{run['context']:,}",
            f"{row['p']:g}",
            *(f"{row['tokens_per_head'][name]:,.0f}" for name in ("by_mass", "by_mass_per_token", "tactic")),
            *(f"{row['union'][name]:,.0f}" for name in ("by_mass", "by_mass_per_token", "tactic", "tactic_read")),
            f"{row['union']['tactic_read'] / row['union']['by_mass']:.2f}",
            f"{row['union_ratio']:.2f}",
            f"{row['taken_ratio']:.2f}",
            number(row["true_share"][row["optimal_order"]]),
            number(row["true_share"]["tactic_read"]),
            percent(row["success"]),
        )
        for run in runs
        for row in run["rows"]
    ]
    headings = (
        "model", "context", "p", "tokens a head, by mass", "by mass per token", "tactic", "union, by mass",
        "by mass per token", "tactic takes", "tactic reads", "reads ÷ by mass", "reads ÷ optimal", "takes ÷ optimal",
        "true share, optimal", "tactic", "reach p %",
    )  # fmt: skip
    return markdown_table(headings, rows) + _about(runs)


def _complete_lengths(ruler: AccuracyRecord) -> set[int]:
    return {length for run in ruler.runs if run.complete for length in run.options["lengths"]}


def _sparse_presets() -> dict[str, AttentionPolicy]:
    return {name: preset.attention for name, preset in PRESETS.items() if not preset.attention.answers_densely}


def _policy(asked: Mapping[str, Any] | str) -> AttentionPolicy:
    """Return a policy that was asked for by a preset's name, or as a request gives it."""
    return PRESETS[asked].attention if isinstance(asked, str) else parse_policy(asked)


def _named(record: FidelityRecord) -> list[Mapping[str, Any]]:
    """Return each row once, however it was asked for, with the name of its preset."""
    rows: dict[str, Mapping[str, Any]] = {}
    for row in record.rows:
        preset = next((name for name, policy in _sparse_presets().items() if is_of(row, policy)), None)
        named = row | {"preset": preset}
        rows[identity_of(named)] = named
    return list(rows.values())


def _has(parameters: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether the parameters are those asked for, of one phase alone and read to the end."""
    if {"early_termination", "prefill", "newest"} & parameters.keys():
        return False
    if parameters.get("bits", _BITS) != asked.get("bits", _BITS):
        return False
    return all(parameters.get(name) == value for name, value in asked.items())


def _longest(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    longest: dict[str, int] = {}
    for row in rows:
        longest[row["model"]] = max(row["context"], longest.get(row["model"], 0))
    yield from (row for row in rows if row["context"] == longest[row["model"]])


def _is_summarised(row: Mapping[str, Any]) -> bool:
    if row["preset"] is not None or row["policy"] == "dense":
        return True
    asked = {name: value for name, value in _SUMMARY.items() if name in row["parameters"]}
    return bool(asked) and row["policy"] != _NOT_IN_SUMMARY and _has(row["parameters"], asked)


def _with_interval(row: Mapping[str, Any]) -> str:
    low, high = row["intervals"]["kl"]
    return f"{row['kl']:.4f} [{low:.4f}, {high:.4f}]"


def _kl_and_reads(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['kl']:.4f} ({percent(row['kv_read_ratio'])})"


def _worst(row: Mapping[str, Any]) -> str:
    worst = row["worst_layer"]
    return "" if worst is None else f"{worst['layer']} ({worst['true_share']:.3f})"


def _about(runs: Sequence[Mapping[str, Any]]) -> str:
    about = dict.fromkeys(
        f"{run['model']}, {run['prompts']} prompts × {run['tokens_each']} tokens of {run['text']}, {run['device']},"
        f" {run['dtype']}, {commit_of(run['commit'])}"
        for run in runs
    )
    return f"\n{'; '.join(about)}.\n"
