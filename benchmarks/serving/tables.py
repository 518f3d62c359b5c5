"""The documentation's tables of whole servers timed on GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.markdown_tables import commit_of, in_thousands
from benchmarks.records import Record, Row, case_of, devices_of, headers_of
from benchmarks.serving.ttft_growth import growths_of, name_of
from winnow_evaluation.writing import markdown_table, number, percent


def serve_table(path: Path) -> str:
    """Return what whole requests gain over HTTP."""
    record = Record.read(path)
    rows = []
    for row in record.rows:
        parameters = row.parameters
        name = f"{row.policy}, {parameters['backend']}" if row.policy == "dense" else row.policy
        ratios = ("" if row.speedup is None else f"{row.speedup:.2f}", percent(parameters["kv_read_ratio"]))
        rows.append((row.model, case_of(row), name, parameters["figure"], f"{row.measured:.2f} {row.unit}", *ratios))
    headings = ("model", "context", "policy", "figure", "measured", "times as fast as dense", "KV read %")
    return markdown_table(headings, rows) + devices_of(record)


def served_table(path: Path) -> str:
    """Return how many times as fast as dense tokens follow each other with each policy over HTTP."""
    record = Record.read(path)
    speedups: dict[str, dict[str, str]] = {}
    for row in record.rows:
        if row.parameters["figure"] == "tpot" and row.parameters["backend"] == "winnow" and row.speedup is not None:
            read = row.parameters["kv_read_ratio"]
            speedup = f"{row.speedup:.2f}" + ("" if read is None else f" (reads {percent(read)} %)")
            speedups.setdefault(row.policy, {})[case_of(row)] = speedup
    cases = list(dict.fromkeys(case for of_policy in speedups.values() for case in of_policy))
    rows = [(policy, *(of_policy.get(case, "") for case in cases)) for policy, of_policy in speedups.items()]
    return markdown_table(("time per token, times as fast as dense", *cases), rows) + devices_of(record)


def audit_table(path: Path) -> str:
    """Return what a token takes on average with each policy, and how much more than with the first sparse one."""
    record = Record.read(path)
    of_figures: dict[str, dict[tuple[str, str], float]] = {}
    for row in record.rows:
        if row.policy != "dense":
            of_figures.setdefault(row.parameters["figure"], {})[case_of(row), row.policy] = row.measured
    without: dict[str, float] = {}
    rows = []
    for (case, policy), mean in of_figures["mean tpot"].items():
        more = 100 * (mean / without.setdefault(case, mean) - 1)
        wait = of_figures["p99 between tokens"][case, policy]
        rows.append((case, policy, f"{mean:.2f}", f"{more:+.1f}", f"{wait:.2f}"))
    headings = ("context", "answers", "ms a token", "longer by %", "p99 between tokens, ms")
    return markdown_table(headings, rows) + devices_of(record)


def chosen_table(path: Path) -> str:
    """Return what a server chose by a profile, what its audits say of it, and how fast a token follows."""
    record = json.loads(path.read_text())
    header, dense = record["header"], {}
    rows = []
    for row in record["rows"]:
        place = row["acts"], row["length"]
        if row["bound"] is None:
            dense[place] = row["tpot"]
            continue
        decode = row["policy"]["decode"]
        asked = decode.get("p", decode.get("budget"))
        rows.append(
            (
                row["acts"],
                f"{row['length']:,}",
                number(row["bound"]),
                decode["policy"] if asked is None else f"{decode['policy']} {asked:,}",
                number(row["expected_kl"], ".4f"),
                number(row["kl"], ".4f"),
                percent(row["top1"]),
                percent(row["read"]),
                f"{row['tpot'] * 1e3:.2f}",
                f"{dense[place] * 1e3:.2f}",
            )
        )
    headings = (
        "policies act", "tokens", "KL asked for", "chosen", "KL expected at most", "KL of audited steps", "top-1 %",
        "KV read %", "ms a token", "dense",
    )  # fmt: skip
    return markdown_table(headings, rows) + (
        f"\n{header['model']}, {header['device']}, {commit_of(header['commit'])}."
        f" {header['prompts']} prompts of {header['text']}, test, at once, {header['tokens']} tokens each.\n"
    )


def verified_table(path: Path) -> str:
    """Return what a token of a verified answer takes, where a check comes to so many tokens as was simulated."""
    record = Record.read(path)
    runs = headers_of(record)
    mean, waits = (
        {_place(row): row for row in record.rows if row.parameters["figure"] == figure}
        for figure in ("mean tpot", "p99 between tokens")
    )
    dense: dict[tuple[int, str], float] = {}
    for (run, case, _, policy), row in mean.items():
        if policy == "dense":
            dense[run, case] = min(row.measured, dense.get((run, case), row.measured))
    rows = []
    for place, row in mean.items():
        run, case, backend, policy = place
        parameters = row.parameters
        verify = (parameters["attention"] or {}).get("verify")
        waited = waits.get(place)
        rows.append(
            (
                case,
                f"{policy}, {backend}" if policy == "dense" else policy,
                "" if verify is None else str(verify["draft_tokens"]),
                "" if verify is None else runs[run]["winnow_environment"]["SGLANG_SIMULATE_ACC_LEN"],
                f"{row.measured:.2f}",
                f"{dense[run, case] / row.measured:.2f}",
                "" if waited is None else f"{waited.measured:.0f}",
                percent(parameters["kv_read_ratio"]),
            )
        )
    headings = ("context", "answers", "drafted for a check", "tokens a check", "ms a token", "times as fast as dense")
    return markdown_table((*headings, "p99 between tokens, ms", "KV read %"), rows) + devices_of(record)


def verified_answers_table(path: Path) -> str:
    """Return what long answers of a real model took, and how many tokens are those of dense attention."""
    record = Record.read(path)
    header = record.header
    what = f"{record.rows[0].model}, {record.rows[0].context:,} tokens of context, answers of {header['tokens']} tokens"
    return f"{what}, {', '.join(header['texts'])}.\n\n{answers_markdown(record.rows)}{devices_of(record)}"


def answers_markdown(rows: Sequence[Row]) -> str:
    """Return rows of ``benchmarks.serving.verified_answers`` as Markdown."""
    cells = []
    for row in rows:
        told = row.parameters
        checks = told["tokens_per_check"]
        cells.append(
            (
                row.policy,
                "" if checks is None else f"{checks:.2f}",
                percent(told["kv_read_ratio"]),
                f"{row.measured:.1f}",
                f"{row.speedup:.2f}",
                f"{told['equal_answers']} of {row.batch}",
                f"{told['equal_tokens']:.0f}",
                # Records from before it was measured do not have it.
                "" if (lead := told.get("largest_lead")) is None else f"{lead:.3f}",
            )
        )
    headings = ("answers", "tokens a check", "KV read %", "seconds", "times as fast", "equal to dense attention's")
    return markdown_table(
        (*headings, "equal tokens at the beginning", "lead of the dense token where they part, at most"), cells
    )


def verified_requests_table(path: Path) -> str:
    """Return how far verified answers are those of dense attention, by what requests ask for."""
    record = Record.read(path)
    what = f"{record.rows[0].model}, {record.rows[0].context:,} tokens of context"
    return f"{what}, {', '.join(record.header['texts'])}.\n\n{requests_markdown(record.rows)}{devices_of(record)}"


def requests_markdown(rows: Sequence[Row]) -> str:
    """Return rows of ``benchmarks.serving.verified_requests`` as Markdown."""
    cells = []
    for row in rows:
        told = row.parameters
        checks, leads = told["tokens_per_check"], [lead for lead in told["leads"] if lead is not None]
        # What is not among the tokens that are told of leads by more.
        unknown = len(told["leads"]) - len(leads)
        cells.append(
            (
                told["request"],
                row.policy,
                "" if checks is None else f"{checks:.2f}",
                f"{told['equal_answers']} of {row.batch}",
                ", ".join(([f"{max(leads):.3f}"] if leads else []) + ([f"{unknown} not told"] if unknown else [])),
                f"{told['largest_error']:.3f}",
                "" if told["objects"] is None else f"{told['objects']} of {row.batch}",
            )
        )
    headings = ("request", "answers", "tokens a check", "equal to dense attention's")
    others = (
        "lead of the dense token where they part, at most",
        "log-probabilities differ by, at most",
        "of the schema",
    )
    return markdown_table((*headings, *others), cells)


def released_table(path: Path) -> str:
    """Return how many requests ran at once with ``release`` and without, and how fast."""
    record = Record.read(path)
    row = record.rows[0]
    what = (
        f"{row.model}, {row.batch} requests of {in_thousands(row.context)} tokens sent at once, answers of"
        f" {row.parameters['output_tokens']:,} tokens, a KV cache of {row.parameters['cache_tokens']:,}."
    )
    return f"{what}\n\n{released_markdown(record.rows)}{devices_of(record)}"


def released_markdown(rows: Sequence[Row]) -> str:
    """Return rows of ``benchmarks.serving.released_prompts`` as Markdown."""
    cells = []
    for row in rows:
        told = row.parameters
        cells.append(
            (
                row.policy,
                str(told["run_at_once"]),
                f"{told['mean_running']:.1f}",
                f"{told['held_tokens']:,.0f}",
                str(told["fit"]),
                f"{row.measured:,.0f}",
                "" if row.speedup is None else f"{row.speedup:.2f}",
                f"{told['ttft']:.1f}",
                f"{told['longest_ttft']:.1f}",
                str(told["retractions"]),
            )
        )
    headings = ("policy", "run at once", "on average", "tokens held at the end", "fit", "output tokens/s")
    return markdown_table((*headings, "times dense", "TTFT, s", "longest TTFT, s", "retractions"), cells)


def _place(row: Row) -> tuple[int, str, str, str]:
    """Return a row's run, context and requests, backend, and policy."""
    return row.parameters.get("run", 0), case_of(row), row.parameters["backend"], row.policy


def mixed_table(path: Path) -> str:
    """Return what tokens of a batch of several policies take beside those of batches of one policy each."""
    record = Record.read(path)
    rows = []
    for row in record.rows:
        parameters = row.parameters
        is_mixed = parameters["times_the_mean"] is not None
        rows.append(
            (
                case_of(row),
                parameters["group"],
                row.policy,
                f"{row.measured:.2f}",
                "" if row.speedup is None else f"{row.speedup:.2f}",
                percent(parameters["kv_read_ratio"]),
                f"{parameters['times_the_mean']:.2f}" if is_mixed else "",
                f"{parameters['most']:.2f}" if is_mixed else "",
            )
        )
    headings = ("context", "rows", "policy", "ms a token", "times as fast as dense", "KV read %")
    return markdown_table((*headings, "times the mean", "asked"), rows) + devices_of(record)


def ttft_table(path: Path) -> str:
    """Return what the first token of a whole request gains over HTTP, and what attention for free would gain."""
    record = Record.read(path)
    rows = []
    for row in sorted(record.rows, key=lambda row: (row.model, row.context, row.batch)):
        parameters = row.parameters
        if parameters["figure"] != "ttft":
            continue
        beyond = parameters.get("memory_beyond_dense_bytes")
        rows.append(
            (
                row.model,
                case_of(row),
                name_of(row),
                f"{row.measured / 1e3:.2f}",
                str(parameters["batches"]),
                "" if row.spread is None else percent(row.spread),
                "" if row.speedup is None else f"{row.speedup:.2f}",
                percent(parameters.get("part_of_bound")),
                "" if beyond is None else f"{beyond / 2**30:+.2f}",
            )
        )
    headings = ("model", "context", "policy", "TTFT s", "batches", "spread %", "times as fast as dense")
    return markdown_table((*headings, "of the bound %", "GiB beyond dense"), rows) + devices_of(record)


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
    return markdown_table(headings, rows) + devices_of(record)


_COUNTS_EQUAL: Final = {True: "yes", False: "no", None: "not compared"}


def ranks_table(path: Path) -> str:
    """Return how two GPUs answer beside one."""
    record = Record.read(path)
    runs = headers_of(record)
    rows = []
    for row in record.rows:
        parameters = row.parameters
        dtype = runs[parameters.get("run", 0)].get("dtype")
        rows.append(
            (
                f"{row.model}, {dtype}" if dtype else row.model,
                case_of(row),
                row.policy,
                str(parameters["gpus"]),
                f"{row.measured:.2f}",
                f"{min(parameters['equal_tokens'])} of {parameters['output_tokens']}",
                _COUNTS_EQUAL[parameters["numbers_equal"]],
                f"{parameters['largest_difference_of_ratios']:.4f}",
            )
        )
    headings = ("model", "context", "policy", "GPUs", "ms a token", "equal tokens, fewest", "counts equal")
    return markdown_table((*headings, "ratios differ by"), rows) + devices_of(record)


def cuda_answers_table(path: Path) -> str:
    """Return how far CUDA's answers are from the CPU's, by policy, and verified ones from dense ones."""
    record = json.loads(path.read_text())
    rows = []
    for row in record["answers"]:
        own, wanted = row["attended"]
        parted = "" if row["parted_at"] is None else f"{row['parted_at']} ({row['gap']:.4f})"
        rows.append((row["request"], parted, f"{row['logprob_difference']:.4f}", percent(own), percent(wanted)))
    headings = ("request", "parts at token (gap)", "log-probability off by", "attended %, CUDA", "attended %, CPU")
    header, verified = record["header"], record["verified"]
    gaps = [row["gap"] for row in verified if row["gap"] is not None]
    parting = f", at gaps up to {max(gaps):.4f}" if gaps else ""
    server = f"{header['device']}, {header['dtype']}, dense backend {header['dense_backend']}"
    return markdown_table(headings, rows) + (
        f"\n{server}, {commit_of(header['commit'])}."
        f" Of {len(verified)} answers with drafts or beside them,"
        f" {len(gaps)} part from the server's dense ones{parting}.\n"
    )
