"""Write the tables of the model card from the evaluation's reports and the training's log.

Usage: ``python -m smollm2_training.card models/smollm2-32k``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from winnow_evaluation.model_card import accuracy_table, reports_of, write_card


def tables(folder: Path) -> str:
    """For each report in ``results/*.json``: accuracy by length, loss by position, divergence and sinks."""
    parts = [_report(report) for report in reports_of(folder)]
    log = folder / "results" / "training-log.jsonl"
    if log.exists():
        parts.append(_training([json.loads(line) for line in log.read_text().splitlines()]))
    return "\n\n".join(parts)


def _report(report: dict[str, Any]) -> str:
    header = report["header"]
    model = f"rank {header['rank']}" if header["rank"] else "the base model, without an adapter"
    samples = ", ".join(str(count) for count in sorted({row["samples"] for row in report["ruler"]}))
    lines = [
        f"**{model}** ({header['date'][:10]}, {header['device']}, torch {header['torch']}, {samples} prompts a cell):",
        "",
        *accuracy_table(report["ruler"]),
    ]
    late = [share for share in report["sinks"] if share["layer"] >= 12]
    divergence = report["divergence"]
    kept = (
        f"KL to SmolLM2 on prose up to 2,048 tokens: {divergence['kl']:.4f} nats, first choices equal in "
        f"{100 * divergence['top1_equal']:.1f} % of {divergence['tokens']:,} places."
    )
    lines += ["", "| prose at positions | loss, nats |", "| --- | ---: |"]
    lines += [f"| {bucket['from']:,} to {bucket['to']:,} | {bucket['loss']:.3f} |" for bucket in report["loss"]]
    lines += ["", kept]
    if late:
        lines.append(
            f"Token 0 holds, by head, {100 * min(s['least'] for s in late):.0f} to "
            f"{100 * max(s['most'] for s in late):.0f} % of the attention in layers 12 and later, "
            f"{100 * sum(s['mean'] for s in late) / len(late):.0f} % in the mean."
        )
    return "\n".join(lines)


def _training(lines: list[dict[str, Any]]) -> str:
    last = lines[-1]
    millions = last["tokens"] / 1e6
    return f"Trained for {last['seconds']:,.0f} seconds: {last['step']:,} steps, {millions:,.0f} million tokens."


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_card(folder, tables(folder))
