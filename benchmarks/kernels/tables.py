"""The documentation's tables of kernels and layers timed on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.kernels.cases import KERNEL
from benchmarks.markdown_tables import in_thousands
from benchmarks.records import Record, Row, case_of, devices_of
from winnow_evaluation.writing import markdown_table


def attention_table(path: Path) -> str:
    """Return what a layer costs with each policy."""
    return _layers_table(Record.read(path), lambda parameters: parameters.get("termination", "none") == "none")


def summary_table(path: Path) -> str:
    """Return how many times as fast as dense each policy's layer is."""
    record = Record.read(path)
    speedups: dict[str, dict[str, float]] = {}
    for row in record.rows:
        parameters = row.parameters
        unusual = row.policy == "dense" or "role" in parameters or parameters.get("termination") != "none"
        if parameters["stage"] != "layer" or row.speedup is None or unusual:
            continue
        size = (
            f"union of {parameters['union_percent']} %"
            if "union_percent" in parameters
            else f"{_tokens_of(parameters):,} tokens"
        )
        of_policy = speedups.setdefault(f"`{row.policy}`, {size}", {})
        of_policy[case_of(row)] = row.speedup
    cases = list(dict.fromkeys(case for found in speedups.values() for case in found))
    rows = [
        (policy, *(f"{found[case]:.1f}" if case in found else "" for case in cases))
        for policy, found in speedups.items()
    ]
    return markdown_table(("times as fast as dense", *cases), rows) + devices_of(record)


def _tokens_of(parameters: Mapping[str, Any]) -> int:
    return int(parameters.get("budget") or parameters["sinks"] + parameters["window"])


def stopping_table(path: Path) -> str:
    """Return what deciding about early termination costs a layer."""
    return _layers_table(Record.read(path), lambda parameters: parameters.get("termination", "none") != "none")


def _layers_table(record: Record, shown: Callable[[Mapping[str, Any]], bool]) -> str:
    rows = [
        (
            case_of(row),
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
    return markdown_table(headings, rows) + devices_of(record)


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
    return markdown_table(headings, rows) + devices_of(record)


def coded_table(path: Path) -> str:
    """Return what a layer takes with the policies that select by codes, part by part."""
    record = Record.read(path)
    stages = _coded_stages(record)
    rows = []
    for key, found in stages.items():
        layer = found["layer"]
        parameters = layer.parameters
        rows.append(
            (
                *key,
                f"{parameters['read_percent']:.1f}",
                f"{layer.dense:.0f}",
                *(f"{found[name].measured:.0f}" if name in found else "" for name in ("select", "attend", "layer")),
                f"{layer.speedup:.2f}",
                "" if layer.floor_ratio is None else f"{100 * layer.floor_ratio:.0f}",
                f"{parameters['counted_again_percent']:.1f}",
                f"{found['build'].measured:.0f}" if "build" in found else "",
            )
        )
    whole = ("read %", "dense µs", "selection µs", "attention µs", "layer µs", "times as fast", "of its byte floor %")
    headings = ("context", "policy", *whole, "counted again % of heads", "building codes, µs a layer")
    return markdown_table(headings, rows) + devices_of(record)


def kernels_table(path: Path) -> str:
    """Return what each kernel of such a layer takes, without early termination."""
    record = Record.read(path)
    rows = [
        (*key, name.removeprefix(KERNEL), f"{row.measured:.1f}")
        for key, found in _coded_stages(record).items()
        for name, row in found.items()
        if name.startswith(KERNEL) and row.parameters.get("termination", "none") == "none"
    ]
    return markdown_table(("context", "policy", "kernel", "µs"), rows) + devices_of(record)


def _coded_stages(record: Record) -> dict[tuple[str, str], dict[str, Row]]:
    """Return the rows of each case and policy that selects by codes, by their stages."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in record.rows:
        if "counted_again_percent" in row.parameters:
            found.setdefault((case_of(row), _coded_policy(row)), {})[row.parameters["stage"]] = row
    return found


def _coded_policy(row: Row) -> str:
    parameters = row.parameters
    if "union_percent" in parameters:
        asked = f"union of {parameters['union_percent']} %"
    else:
        asked = f"p {parameters['p']:g}" if "p" in parameters else f"budget {parameters['budget']:,}"
    ended = parameters.get("termination", "none")
    return ", ".join([f"`{row.policy}`", asked, *([ended] if ended != "none" else [])])


def _beside_sinks(row: Row) -> tuple[str, str, str]:
    return case_of(row), row.policy, row.parameters["termination"]


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
    return markdown_table(headings, rows) + devices_of(record)


def dram_table(path: Path) -> str:
    """Return how many bytes attention counts, and how many DRAM delivers."""
    record = Record.read(path)
    rows = [
        (
            case_of(row),
            f"{row.policy}, {row.parameters['share']:g} %",
            f"{row.parameters['counted_bytes'] / 2**20:.1f}",
            f"{row.measured / 2**20:.1f}",
            f"{row.parameters['delivered_to_counted']:.3f}",
        )
        for row in record.rows
    ]
    headings = ("context", "attended", "MiB counted", "MiB delivered", "delivered ÷ counted")
    return markdown_table(headings, rows) + devices_of(record)


def _policy_of(row: Row) -> str:
    parameters = row.parameters
    details = [parameters[name] for name in ("backend",) if row.policy == "dense"]
    details += [f"union {parameters['read_percent']} %"] if "read_percent" in parameters else []
    details += [f"budget {parameters['budget']}"] if "budget" in parameters else []
    details += [parameters["role"]] if "role" in parameters else []
    details += [parameters["termination"]] if parameters.get("termination", "none") != "none" else []
    return ", ".join([row.policy, *details])
