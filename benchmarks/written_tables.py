"""The tables of the documentation, out of the records of the benchmarks: none of their figures is typed.

    python -m benchmarks.written_tables

writes them anew between the lines ``<!-- table NAME -->`` and ``<!-- end of NAME -->``; with ``--check`` it changes
nothing and fails if one of them is not what the records say. A table whose record does not exist says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.cpu.audits import audits_table
from benchmarks.cpu.conversation_figures import conversations_table
from benchmarks.cpu.server_figures import cpu_server_table
from benchmarks.cpu.verification_figures import verification_table
from benchmarks.fidelity import fidelity_tables
from benchmarks.fidelity.accuracy_tables import (
    accuracy_table,
    cells_table,
    divergence_table,
    lengths_table,
    shares_table,
    spans_table,
    tasks_table,
    times_table,
)
from benchmarks.fidelity.code_choice import table_of
from benchmarks.fidelity.profile_tables import profile_drafts_table, profile_speed_table, profile_stopping_table
from benchmarks.fidelity.quality import quality_table
from benchmarks.fidelity.stopping_tables import equal_loss_table, held_shares_table
from benchmarks.folders import REPOSITORY, RESULTS
from benchmarks.kernels.tables import (
    attention_table,
    coded_table,
    dram_table,
    kernels_table,
    prefill_table,
    sinks_table,
    stopping_table,
    summary_table,
)
from benchmarks.options_table import options_table
from benchmarks.policy_table import policies_table
from benchmarks.serving.overhead.beside_table import service_table
from benchmarks.serving.overhead.table import overhead_table
from benchmarks.serving.tables import (
    audit_table,
    chosen_table,
    cuda_answers_table,
    growth_table,
    mixed_table,
    ranks_table,
    released_table,
    serve_table,
    served_table,
    ttft_table,
    verified_answers_table,
    verified_requests_table,
    verified_table,
)

_DOCS: Final = REPOSITORY / "docs"
DOCUMENTS: Final = (
    REPOSITORY / "README.md",
    *(_DOCS / name for name in ("policies.md", "measurements.md", "load-tests.md", "running.md")),
)
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


TABLES: Final[Mapping[str, tuple[str, Callable[[Path], str]]]] = {
    "accuracy": ("accuracy.json", accuracy_table),
    "tasks": ("accuracy.json", tasks_table),
    "cuda-answers-full": ("cuda-answers-full.json", cuda_answers_table),
    "cuda-answers-windows": ("cuda-answers-windows.json", cuda_answers_table),
    "cuda-answers-8-bit": ("cuda-answers-8-bit.json", cuda_answers_table),
    "cuda-answers-caps": ("cuda-answers-caps.json", cuda_answers_table),
    "cuda-answers-caps-8-bit": ("cuda-answers-caps-8-bit.json", cuda_answers_table),
    "cuda-answers-sinks": ("cuda-answers-sinks.json", cuda_answers_table),
    "cuda-answers-sinks-8-bit": ("cuda-answers-sinks-8-bit.json", cuda_answers_table),
    "cuda-answers-windows-fa3": ("cuda-answers-windows-fa3-bfloat16.json", cuda_answers_table),
    "cuda-answers-caps-fa3": ("cuda-answers-caps-fa3-bfloat16.json", cuda_answers_table),
    "cuda-answers-sinks-fa3": ("cuda-answers-sinks-fa3.json", cuda_answers_table),
    "accuracy-lowbit": ("accuracy-lowbit-needle.json", accuracy_table),
    "accuracy-lowbit-ruler": ("accuracy-lowbit-ruler.json", accuracy_table),
    "tasks-lowbit-ruler": ("accuracy-lowbit-ruler.json", tasks_table),
    "accuracy-32k": ("accuracy-smollm2-32k.json", accuracy_table),
    "tasks-32k": ("accuracy-smollm2-32k.json", tasks_table),
    "preset-times": ("preset-times-smollm2-32k.json", times_table),
    "delta-layers": ("accuracy-delta-layers.json", cells_table),
    "ruler": ("accuracy-smollm2-32k.json", lengths_table),
    "presets-32k": ("accuracy-presets-smollm2-32k.json", accuracy_table),
    "presets-tasks-32k": ("accuracy-presets-smollm2-32k.json", tasks_table),
    "min-tokens-32k": ("accuracy-min-tokens-smollm2-32k.json", accuracy_table),
    "min-tokens-tasks-32k": ("accuracy-min-tokens-smollm2-32k.json", tasks_table),
    "accuracy-prefill": ("accuracy-prefill.json", accuracy_table),
    "tasks-prefill": ("accuracy-prefill.json", tasks_table),
    "accuracy-blocks": ("accuracy-blocks.json", accuracy_table),
    "tasks-blocks": ("accuracy-blocks.json", tasks_table),
    "accuracy-blocks-2048": ("accuracy-blocks-2048.json", accuracy_table),
    "accuracy-termination": ("accuracy-termination.json", accuracy_table),
    "termination-thresholds": ("accuracy-termination-cpu.json", cells_table),
    "divergence": ("divergence.json", divergence_table),
    "divergence-16k": ("divergence-16k.json", divergence_table),
    "divergence-32k": ("divergence-32k.json", divergence_table),
    "termination": ("termination.json", divergence_table),
    "fidelity": ("fidelity.json", fidelity_tables.fidelity_table),
    "fidelity-contexts": ("fidelity.json", fidelity_tables.contexts_table),
    "fidelity-delta-layers": ("fidelity-delta-layers.json", fidelity_tables.changes_table),
    "fidelity-delta-layers-needle": ("fidelity-delta-layers-needle.json", fidelity_tables.changes_table),
    "fidelity-changes": ("fidelity-changes.json", fidelity_tables.changes_table),
    "fidelity-changes-7680": ("fidelity-changes-7680.json", fidelity_tables.changes_table),
    "fidelity-gemma": ("fidelity-gemma.json", fidelity_tables.contexts_table),
    "fidelity-fp8": ("fidelity-fp8.json", fidelity_tables.fidelity_table),
    **{f"code-choice-{model}": ("code-choice.json", table_of(model)) for model in ("smollm2", "smollm2-32k", "needle")},
    "stopping-rules": ("stopping-rules.json", equal_loss_table),
    "stopping-rules-shares": ("stopping-rules.json", held_shares_table),
    "quality": ("quality.json", quality_table),
    "quality-needle": ("quality-needle.json", quality_table),
    "quality-smollm2": ("quality-smollm2.json", quality_table),
    "quality-smollm2-32k": ("quality-smollm2-32k.json", quality_table),
    "chosen-answers": ("chosen-answers.json", chosen_table),
    "profile-speed-gpu": ("profile-smollm2-32k-gpu.json", profile_speed_table),
    "profile-stopping-gpu": ("profile-smollm2-32k-gpu.json", profile_stopping_table),
    "profile-drafts-gpu": ("profile-smollm2-32k-gpu.json", profile_drafts_table),
    "profile-speed": ("profile-needle.json", profile_speed_table),
    "profile-stopping": ("profile-needle.json", profile_stopping_table),
    "profile-drafts": ("profile-needle.json", profile_drafts_table),
    "profile-speed-smollm2": ("profile-smollm2.json", profile_speed_table),
    "profile-stopping-smollm2": ("profile-smollm2.json", profile_stopping_table),
    "profile-drafts-smollm2": ("profile-smollm2.json", profile_drafts_table),
    "fidelity-summary": ("fidelity.json", fidelity_tables.summary_table),
    "policies": ("../../docs/policy.schema.json", policies_table),
    "options": ("../../sglang_ext/sglang_winnow/server_options.py", options_table),
    "overview": ("fidelity.json", fidelity_tables.overview_table),
    "tactic-shares": ("tactic-shares.json", shares_table),
    "tactic-spans": ("tactic-shares.json", spans_table),
    "tactic-unions": ("tactic-unions.json", fidelity_tables.unions_table),
    "attention": ("attention.json", attention_table),
    "summary": ("attention.json", summary_table),
    "attention-cuda": ("attention-attend-cuda.json", attention_table),
    "stopping": ("attention.json", stopping_table),
    "sinks": ("sinks.json", sinks_table),
    "coded": ("attention-lowbit.json", coded_table),
    "coded-kernels": ("attention-lowbit.json", kernels_table),
    "coded-cuda": ("attention-lowbit-cuda.json", coded_table),
    "coded-joined": ("attention-lowbit-joined.json", coded_table),
    "coded-joined-kernels": ("attention-lowbit-joined.json", kernels_table),
    "coded-captured": ("attention-captured.json", coded_table),
    "prefill": ("prefill.json", prefill_table),
    "prefill-queries": ("prefill-queries.json", prefill_table),
    "ttft": ("ttft.json", ttft_table),
    "ttft-growth": ("ttft.json", growth_table),
    "records": ("records.json", cells_table),
    "short": ("attention-short.json", attention_table),
    "serve": ("serve.json", serve_table),
    "served": ("serve.json", served_table),
    "serve-flashinfer": ("serve-flashinfer.json", serve_table),
    "serve-lowbit": ("serve-lowbit.json", serve_table),
    "serve-lowbit-joined": ("serve-lowbit-joined.json", serve_table),
    "serve-termination": ("serve-termination.json", serve_table),
    "batches": ("serve-batches.json", serve_table),
    "serve-verified": ("serve-verified.json", verified_table),
    "audit": ("audit-tpot.json", audit_table),
    "audits-cpu": ("audits-cpu.json", audits_table),
    "layer-8-bit": ("attention-fp8.json", summary_table),
    "serve-8-bit": ("serve-fp8.json", served_table),
    "released-prompts": ("released-prompts.json", released_table),
    "mixed": ("mixed.json", mixed_table),
    "mixed-two-gpus": ("mixed-two-gpus.json", mixed_table),
    "ranks": ("tp.json", ranks_table),
    "ranks-verified": ("tp-verified.json", ranks_table),
    "dram": ("dram.json", dram_table),
    "service-overhead": ("service-overhead.json", overhead_table),
    "verification": ("verification.json", verification_table),
    "verification-32k": ("verification-32k.json", verification_table),
    "verification-32k-gpu": ("verification-32k-gpu.json", verification_table),
    "verification-pages": ("verification-pages.json", verification_table),
    "verification-records": ("verification-records.json", verification_table),
    "verified-answers": ("verified-answers.json", verified_answers_table),
    "verified-answers-auto": ("verified-answers-auto.json", verified_answers_table),
    "verified-requests": ("verified-requests.json", verified_requests_table),
    "cpu-server": ("cpu-server.json", cpu_server_table),
    "cpu-conversations": ("cpu-conversations.json", conversations_table),
    "service": ("service.json", service_table),
}
"""By name: the record's file, and what makes Markdown of it."""


if __name__ == "__main__":
    typer.run(main)
