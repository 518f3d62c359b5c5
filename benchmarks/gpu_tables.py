"""The documentation's tables of what was timed on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows import Record, Row, headers_of
from benchmarks.markdown_tables import commit_of, in_thousands, markdown_table, percent
from benchmarks.ttft_growth import growths_of, name_of


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
        of_policy[_case_of(row)] = row.speedup
    cases = list(dict.fromkeys(case for found in speedups.values() for case in found))
    rows = [
        (policy, *(f"{found[case]:.1f}" if case in found else "" for case in cases))
        for policy, found in speedups.items()
    ]
    return markdown_table(("times as fast as dense", *cases), rows) + _devices(record)


def _tokens_of(told: Mapping[str, Any]) -> int:
    return int(told.get("budget") or told["sinks"] + told["window"])


def stopping_table(path: Path) -> str:
    """Return what deciding about early termination costs a layer."""
    return _layers_table(Record.read(path), lambda told: told.get("termination", "none") != "none")


def _layers_table(record: Record, shown: Callable[[Mapping[str, Any]], bool]) -> str:
    rows = [
        (
            _case_of(row),
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
    return markdown_table(headings, rows) + _devices(record)


def sinks_table(path: Path) -> str:
    """Return what each policy's layer takes with sinks and without, measured in one run."""
    record = Record.read(path)
    layers = [row for row in record.rows if row.policy != "dense" and row.parameters["stage"] == "layer"]
    without = {_beside_sinks(row): row.measured for row in layers if row.parameters["sinks"] == 0}
    rows = [
        (
            *_beside_sinks(row),
            str(row.parameters["sinks"]),
            f"{without[_beside_sinks(row)]:.1f}",
            f"{row.measured:.1f}",
            f"{row.measured / without[_beside_sinks(row)]:.3f}",
        )
        for row in layers
        if row.parameters["sinks"]
    ]
    headings = ("context", "policy", "early termination", "sinks", "µs with 0", "µs", "ratio")
    return markdown_table(headings, rows) + _devices(record)


def _beside_sinks(row: Row) -> tuple[str, str, str]:
    return _case_of(row), row.policy, row.parameters["termination"]


def prefill_table(path: Path) -> str:
    """Return what prefill attention costs with QUOKA."""
    record = Record.read(path)
    rows = [
        (
            in_thousands(row.context),
            f"{row.policy}, {row.parameters['backend']}" if row.policy == "dense" else row.policy,
            ", ".join(
                f"{name} {value}"
                for name, value in row.parameters.items()
                if name in ("budget", "budget_ratio", "queries")
            ),
            row.parameters["stage"],
            "" if row.dense is None else f"{row.dense / 1e3:.2f}",
            f"{row.measured / 1e3:.2f}",
            "" if row.speedup is None else f"{row.speedup:.2f}",
        )
        for row in record.rows
    ]
    headings = ("context", "policy", "budget", "stage", "dense ms", "ms", "times as fast")
    return markdown_table(headings, rows) + _devices(record)


def serve_table(path: Path) -> str:
    """Return what whole requests gain over HTTP."""
    record = Record.read(path)
    rows = []
    for row in record.rows:
        told = row.parameters
        name = f"{row.policy}, {told['backend']}" if row.policy == "dense" else row.policy
        ratios = ("" if row.speedup is None else f"{row.speedup:.2f}", percent(told["kv_read_ratio"]))
        rows.append((row.model, _case_of(row), name, told["figure"], f"{row.measured:.2f} {row.unit}", *ratios))
    headings = ("model", "context", "policy", "figure", "measured", "times as fast as dense", "KV read %")
    return markdown_table(headings, rows) + _devices(record)


def served_table(path: Path) -> str:
    """Return how many times as fast as dense tokens follow each other with each policy over HTTP."""
    record = Record.read(path)
    speedups: dict[str, dict[str, str]] = {}
    for row in record.rows:
        if row.parameters["figure"] == "tpot" and row.parameters["backend"] == "winnow" and row.speedup is not None:
            read = row.parameters["kv_read_ratio"]
            told = f"{row.speedup:.2f}" + ("" if read is None else f" (reads {percent(read)} %)")
            speedups.setdefault(row.policy, {})[_case_of(row)] = told
    cases = list(dict.fromkeys(case for of_policy in speedups.values() for case in of_policy))
    rows = [(policy, *(of_policy.get(case, "") for case in cases)) for policy, of_policy in speedups.items()]
    return markdown_table(("time per token, times as fast as dense", *cases), rows) + _devices(record)


def ttft_table(path: Path) -> str:
    """Return what the first token of a whole request gains over HTTP, and what attention for free would gain."""
    record = Record.read(path)
    rows = []
    for row in sorted(record.rows, key=lambda row: (row.model, row.context, row.batch)):
        told = row.parameters
        if told["figure"] != "ttft":
            continue
        beyond = told.get("memory_beyond_dense_bytes")
        rows.append(
            (
                row.model,
                _case_of(row),
                name_of(row),
                f"{row.measured / 1e3:.2f}",
                str(told["batches"]),
                "" if row.spread is None else percent(row.spread),
                "" if row.speedup is None else f"{row.speedup:.2f}",
                percent(told.get("part_of_bound")),
                "" if beyond is None else f"{beyond / 2**30:+.2f}",
            )
        )
    headings = ("model", "context", "policy", "TTFT s", "batches", "spread %", "times as fast as dense")
    return markdown_table((*headings, "of the bound %", "GiB beyond dense"), rows) + _devices(record)


def growth_table(path: Path) -> str:
    """Return how the time to first token grows with the prompt, in runs of enough lengths."""
    record = Record.read(path)
    growths = growths_of(record)
    lengths = sorted({tokens for growth in growths for tokens in growth.seconds})
    rows = [
        (
            growth.model,
            growth.name,
            *(f"{growth.seconds[tokens]:.2f}" if tokens in growth.seconds else "" for tokens in lengths),
            f"{growth.fit.exponent:.2f}",
            f"{in_thousands(growth.fit.first)} to {in_thousands(growth.fit.last)}",
        )
        for growth in growths
    ]
    headings = ("model", "policy", *(f"{in_thousands(tokens)}, s" for tokens in lengths), "exponent", "fitted to")
    return markdown_table(headings, rows) + _devices(record)


def ranks_table(path: Path) -> str:
    """Return how two GPUs answer beside one."""
    record = Record.read(path)
    runs = headers_of(record)
    rows = []
    for row in record.rows:
        told = row.parameters
        dtype = runs[told.get("run", 0)].get("dtype")
        rows.append(
            (
                f"{row.model}, {dtype}" if dtype else row.model,
                _case_of(row),
                row.policy,
                str(told["gpus"]),
                f"{row.measured:.2f}",
                f"{min(told['equal_tokens'])} of {told['output_tokens']}",
                "yes" if told["numbers_equal"] else "no",
                f"{told['largest_difference_of_ratios']:.4f}",
            )
        )
    headings = ("model", "context", "policy", "GPUs", "ms a token", "equal tokens, fewest", "counts equal")
    return markdown_table((*headings, "ratios differ by"), rows) + _devices(record)


def dram_table(path: Path) -> str:
    """Return how many bytes attention counts, and how many DRAM delivers."""
    record = Record.read(path)
    rows = [
        (
            _case_of(row),
            f"{row.policy}, {row.parameters['share']:g} %",
            f"{row.parameters['counted_bytes'] / 2**20:.1f}",
            f"{row.measured / 2**20:.1f}",
            f"{row.parameters['delivered_to_counted']:.3f}",
        )
        for row in record.rows
    ]
    headings = ("context", "attended", "MiB counted", "MiB delivered", "delivered ÷ counted")
    return markdown_table(headings, rows) + _devices(record)


def _case_of(row: Row) -> str:
    return f"{in_thousands(row.context)} × {row.batch}"


def _policy_of(row: Row) -> str:
    told = row.parameters
    details = [told[name] for name in ("backend",) if row.policy == "dense"]
    details += [f"union {told['read_percent']} %"] if "read_percent" in told else []
    details += [f"budget {told['budget']}"] if "budget" in told else []
    details += [told["role"]] if "role" in told else []
    details += [told["termination"]] if told.get("termination", "none") != "none" else []
    return ", ".join([row.policy, *details])


def _devices(record: Record) -> str:
    about = {f"{header['device']}, {commit_of(header['commit'])}" for header in headers_of(record)}
    return f"\n{'; '.join(sorted(about))}.\n"
