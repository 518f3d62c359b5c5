"""From the record of what the service costs on a GPU machine to the table in the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.markdown_tables import commit_of
from winnow_evaluation.writing import markdown_table

ASKED_TTFT_SECONDS = 0.003
"""Most that the service may add to the time to the first token, at the median."""
ASKED_LOST = 0.03
"""Most of the tokens a second that it may cost."""


def service_table(path: Path) -> str:
    """Return the record of ``benchmarks.serving.service_on_gpu`` as Markdown."""
    record = json.loads(path.read_text())
    ttft, throughput = record["ttft"], record["throughput"]
    added = f"{_ms(ttft['added'], '+')} [{_ms(ttft['added_low'], '+')}, {_ms(ttft['added_high'], '+')}]"
    first = throughput["service_ttft"] - throughput["bare_ttft"]
    of_round = f"{throughput['requests']} requests for {throughput['tokens']:,} tokens, {throughput['streams']} at once"
    lost = [1 - service / bare for bare, service in zip(throughput["bare"], throughput["service"], strict=True)]
    changed = f"{-throughput['lost']:+.1%} [{-max(lost):+.1%}, {-min(lost):+.1%}]"
    rows = [
        (
            f"time to the first token, ms: median of {ttft['pairs']} requests each way, one after the other [95 %]",
            _ms(ttft["bare"]),
            _ms(ttft["service"]),
            f"{added}{_missed(ttft['added'] > ASKED_TTFT_SECONDS)}",
            f"at most {_ms(ASKED_TTFT_SECONDS, '+')}",
        ),
        (
            "the same, 95th percentile",
            _ms(ttft["bare_p95"]),
            _ms(ttft["service_p95"]),
            _ms(ttft["service_p95"] - ttft["bare_p95"], "+"),
            "",
        ),
        (
            f"output tokens a second: {of_round}, {len(lost)} rounds each way [lowest, highest]",
            f"{_rate(throughput['bare']):,.0f}",
            f"{_rate(throughput['service']):,.0f}",
            f"{changed}{_missed(throughput['lost'] > ASKED_LOST)}",
            f"at most {-ASKED_LOST:+.0%}",
        ),
        (
            "time to the first token of these, ms, median",
            _ms(throughput["bare_ttft"]),
            _ms(throughput["service_ttft"]),
            _ms(first, "+"),
            "",
        ),
    ]
    if throughput["cpu_per_token"] is not None:
        rows.append(("CPU time of the service for a token, µs", "", f"{throughput['cpu_per_token'] * 1e6:.0f}", "", ""))
    headings = ("", "runtime", "with the service", "difference", "asked")
    return markdown_table(headings, rows) + f"\n{_about(record['header'])}\n"


def _about(header: dict[str, Any]) -> str:
    runtime = header["runtime"]
    sglang = f"SGLang {runtime['version']}" if "version" in runtime else "a runtime without a version"
    backend = f", attention backend {runtime['attention_backend']}" if "attention_backend" in runtime else ""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items() if name != "sglang")
    return (
        f"{header['device'] or 'no GPU'}; {header['cpu']}, {header['cpu_threads']} threads; {runtime['model']} on"
        f" {sglang}{backend}; {versions}; {commit_of(header['commit'])}, {header['date'][:10]}."
    )


def _rate(rounds: list[float]) -> float:
    # All rounds have as many tokens.
    return len(rounds) / sum(1 / each for each in rounds)


def _ms(seconds: float, sign: str = "") -> str:
    return f"{seconds * 1e3:{sign}.1f}"


def _missed(is_missed: bool) -> str:
    return " (missed)" if is_missed else ""
