"""The tables of what stopping early skips and loses (``stopping_rules``).

Two rules compare where they lose the same. Between two settings of a rule, what it skips is taken for a straight line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.stopping_rules import HELD, SETTLED, SMALLER, WHOLE
from benchmarks.fidelity.tile_stops import AS_READ, BY_MASS
from benchmarks.markdown_tables import commit_of
from winnow_evaluation.writing import markdown_table, percent
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_service.policies.presets import MIN_TOKENS

_SHOWN: Final = (0.8, 0.9, 0.95)
Rows = Sequence[Mapping[str, Any]]


def equal_loss_table(path: Path) -> str:
    """Return what each rule skips where it loses as much as ART's does with some of its settings.

    The settings are those that ``winnow calibrate`` tries, and the defaults with less patience.
    """
    rows = []
    for run, policy, by_rule in _policies(path):
        held, by_mass, smaller = by_rule[HELD, AS_READ], by_rule[HELD, BY_MASS], by_rule[SMALLER, ""]
        beside = (
            ("error", held), ("error", by_mass), ("error", smaller),
            ("error_p95", held), ("error_p95", smaller),
            ("share_lost", held), ("share_lost", smaller),
        )  # fmt: skip
        for own in by_rule[SETTLED, AS_READ]:
            scale, direction, patience = (own["setting"][name] for name in ("scale", "direction", "patience"))
            default = EarlyTermination()
            if patience != default.patience and (scale, direction) != (default.scale, default.direction):
                continue
            losses = (f"{100 * own[loss]:.2f}" for loss in ("error", "error_p95", "share_lost"))
            skipped = (own["skipped"], *(skipped_at(other, loss, own[loss]) for loss, other in beside))
            rows.append(
                (run["model"], policy, f"{scale:g}, {direction:g}, {patience}", *losses, *map(percent, skipped))
            )
    headings = (
        "model", "policy", "scale, direction, patience", "error %", "95th pct.", "share lost %", "skipped %",
        "held, same error", "by mass, same error", "less asked, same error", "held, same 95th pct.",
        "less asked, same 95th pct.", "held, same share lost", "less asked, same share lost",
    )  # fmt: skip
    return f"{markdown_table(headings, rows)}\n{_about(path)}\n"


def held_shares_table(path: Path) -> str:
    """Return what stopping by the share comes to, beside ART's defaults."""
    rows = []
    for run, policy, by_rule in _policies(path):
        [default] = (own for own in by_rule[SETTLED, AS_READ] if own["setting"] == EarlyTermination().model_dump())
        held = {own["setting"]["share"]: own for own in by_rule[HELD, AS_READ]}
        named = {WHOLE: by_rule[WHOLE, ""][0], SETTLED: default}
        for name, own in (named | {f"share held, {share}": held[share] for share in _SHOWN}).items():
            errors = (own[name] for name in ("error", "error_p95", "dense_error", "dense_error_p95"))
            parts = (own[name] for name in ("skipped", "kv_read", "stopped", "below_least"))
            rows.append((run["model"], policy, name, *map(percent, (*parts, *errors)), f"{own['true_share']:.3f}"))
    headings = (
        "model", "policy", "stops", "skipped %", "KV read %", "heads stopped %", f"heads below {MIN_TOKENS} %",
        "error %", "95th pct.", "error to dense %", "95th pct. ", "true share",
    )  # fmt: skip
    return f"{markdown_table(headings, rows)}\n{_about(path)}\n"


def skipped_at(rows: Rows, loss: str, most: float) -> float | None:
    """Return what a rule skips where it loses ``most``; None if none of its settings loses as much.

    Args:
        rows: figures of its settings.
        loss: which of them is the loss.
        most: that it may lose.
    """
    before, skipped_before = 0.0, 0.0
    for own, skipped in sorted((float(row[loss]), float(row["skipped"])) for row in rows):
        # What loses more and skips less is nobody's choice.
        best = max(skipped, skipped_before)
        if own >= most:
            part = (most - before) / (own - before) if own > before else 1.0
            return skipped_before + part * (best - skipped_before)
        before, skipped_before = own, best
    return None


def _policies(path: Path) -> Iterator[tuple[Mapping[str, Any], str, Mapping[tuple[str, str], Rows]]]:
    """Yield each run's policies: the run, the policy's name, and its rows by rule and order."""
    for run in json.loads(path.read_text())["runs"]:
        for policy in run["policies"]:
            by_rule: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
            for row in policy["rows"]:
                by_rule.setdefault((row["rule"], row["order"]), []).append(row)
            decode = policy["decode"]
            asked = f"p {decode['p']}" if "p" in decode else str(decode["budget"])
            yield run, f"{decode['policy']} {asked}", by_rule


def _about(path: Path) -> str:
    runs = json.loads(path.read_text())["runs"]
    models = "; ".join(
        f"{run['model']}, {run['prompts']} prompt{'s' * (run['prompts'] > 1)} of {run['context']:,} tokens"
        f" ({run['text']})"
        for run in runs
    )
    [own] = {(run["queries_each"], run["device"], run["dtype"], commit_of(run["commit"])) for run in runs}
    return f"{models}; {own[0]} queries each, all layers, {own[1]}, {own[2]}, {own[3]}."
