"""The table on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich import box
from rich.table import Table

from winnow_evaluation.writing import number, percent

_SHARES: Final = (("reported_share", ".3f"), ("true_share", ".3f"), ("share_error", "+.3f"), ("share_error_p95", ".3f"))
_SHOWN: Final = ("p", "budget", "budget_ratio", "window", "newest")
_ORACLES: Final = {"oracle_top_p": "oracle top-p", "oracle_top_k": "oracle top-k", "oracle_pages": "oracle pages"}


def row_label(row: Mapping[str, Any]) -> str:
    """Return what a row is called: policy and parameter, such as ``tactic p 0.9, early termination``."""
    parameters = row["parameters"]
    if row["policy"] == "dense":
        return "dense, once more"
    shown = [f"{name.replace('budget_ratio', 'ratio')} {parameters[name]:,}" for name in _SHOWN if name in parameters]
    label = " ".join([_ORACLES.get(row["policy"], row["policy"]), *shown])
    if "bits" in parameters:
        label += f", {parameters['bits']} bits"
    if "early_termination" in parameters:
        label += ", early termination"
    if "prefill" in parameters:
        label += f", {prefill_label(parameters['prefill'])}"
    return f"{row['preset']}: {label}" if row["preset"] else label


def prefill_label(prefill: Mapping[str, Any]) -> str:
    """Return what a row's sparse prefill is called, such as ``quoka prefill 25 %``."""
    ratio, budget = (prefill.get(name) for name in ("budget_ratio", "budget"))
    size = f"{100 * ratio:g} %" if ratio is not None else f"{budget:,}"
    return f"{prefill['policy']} prefill {size}"


def results_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of rows of one phase."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("policy", no_wrap=True)
    for name in (
        "KL, nats [95 %]", "top-1 %", "loss", "KV read %", "attended %", "reported", "true", "error", "95th pct.",
        "reach p %", "worst layer",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        low, high = row["intervals"]["kl"]
        worst = row["worst_layer"]
        table.add_row(
            row_label(row),
            f"{row['kl']:.4f} [{low:.4f}, {high:.4f}]",
            f"{100 * row['top1']:.1f}",
            f"{row['loss_change']:+.4f}",
            *(percent(row[name]) for name in ("kv_read_ratio", "attended_ratio")),
            *(number(row[name], form) for name, form in _SHARES),
            percent(row["success"]),
            "" if worst is None else f"{worst['layer']}: {worst['true_share']:.3f}",
        )
    return table
