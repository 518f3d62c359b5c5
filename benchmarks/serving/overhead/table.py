"""From the record of what the service costs to the table in the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from winnow_evaluation.writing import markdown_table

_MIB: Final = 1024 * 1024


def overhead_table(path: Path) -> str:
    """Return the record of ``benchmarks.serving.service_overhead`` as Markdown."""
    return markdown(json.loads(path.read_text()))


def markdown(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    header, found = record["header"], record["measured"]
    commit = header["commit"]["id"][:12] if header["commit"] else "unknown"
    if header["commit"] and header["commit"]["modified"]:
        commit += " with changes"
    many, memory = found["many_streams"], found["memory"]
    rows: list[tuple[str, str, str]] = []
    for caller, words in (("plain", "no policy, no limits"), ("limited", "a policy by name, a key with limits")):
        chunks = found["chunk_cost"][caller]
        what = f"CPU time for a chunk; {chunks['streams']} streams, {chunks['chunks_per_second']:,.0f} chunks a second"
        rows.append((what, words, f"{chunks['microseconds_per_chunk']:.0f} µs"))
    for caller, words in (("plain", "no policy, no limits"), ("limited", "a policy by name, a key with limits")):
        cost = found["request_cost"][caller]
        rows.append(
            ("CPU time for a request with one chunk", words, f"{cost['microseconds_per_request'] / 1e3:.1f} ms")
        )
    for ttft in found["added_ttft"]:
        beside = f"beside {ttft['beside']} streams" if ttft["beside"] else "nothing else"
        direct, through, added = (f"{ttft[name] * 1e3:.1f}" for name in ("direct", "through", "added"))
        rows.append(("added to the time to the first token, median", beside, f"{added} ms ({direct} → {through})"))
    opened = f"{many['open_at_once']:,} of {many['streams']:,} open at once, {many['finished']:,} complete"
    rows.append(("many streams", f"a chunk a second each; {many['core_share']:.0%} of the core", opened))
    grown = (many["resident_most"] - many["resident_before"]) / _MIB
    each = (many["resident_most"] - many["resident_before"]) / many["streams"] / 1024
    rows.append(("memory for them", f"{each:.0f} KiB each", f"{grown:.0f} MiB"))
    minutes, warm_up = memory["seconds"] / 60, memory["warm_up"] / 60
    last = memory["samples"][-1][1] / _MIB
    rows.append(
        (
            f"memory over {minutes:.0f} minutes, {memory['streams']:,} streams",
            f"slope after {warm_up:.0f} minutes; {last:.0f} MiB at the end",
            f"{memory['slope'] / 1024:+.1f} KiB a minute",
        )
    )
    versions = ", ".join(f"{name} {header['versions'][name]}" for name in ("fastapi", "uvicorn", "uvloop", "httpx"))
    about = (
        f"{header['cpu']}, {header['cpu_threads']} threads; the service on core {header['cores']['service']}, stand-in"
        f" and client on core {header['cores']['stand-in and client']}; {versions}; commit {commit},"
        f" {header['date'][:10]}. The runtime is a stand-in that computes nothing."
    )
    return about + "\n\n" + markdown_table(("measured", "", ""), rows).rstrip()
