"""What a server chooses by a profile on a GPU: what its audits say of the answers, and how fast they come.

    python -m benchmarks.serving.chosen_answers ~/.cache/winnow/models/smollm2-32k profile.json --output chosen.json

Prompts are cut out of the real text to test with, as for ``winnow fidelity``; the profile was measured on the text to
choose by. Of each length all prompts are answered at once: densely, and with each bound on KL. Answers whose every step
is audited tell the KL of the next token; others, behind cached prompts, are timed. One server is asked as the profile's
times tell it, so that steps run dense where no policy was faster. A second one lets policies act at every length.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console

from benchmarks.command_line import numbers
from benchmarks.cpu.verification import prompts_of
from benchmarks.folders import RESULTS
from benchmarks.records import header_from_outside
from benchmarks.serving.batch_timing import BatchServer, timing_of
from benchmarks.serving.verified_answers import ask_all
from sglang_winnow import audit_share, crossover, profile_settings
from sglang_winnow.backend_name import NAME
from sglang_winnow.quality_profile import Profile
from tests.runtime import runtime_server
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.writing import write_json
from winnow_kernels.policies.registry import POLICIES_SETTING

BOUNDS: Final = (0.005, 0.02, 0.05)
"""On KL, in nats."""
BY_TIMES: Final = "by the profile's times"
ALWAYS: Final = "at every length"
_OUTPUT: Final = RESULTS / "chosen-answers.json"
_SPARE_TOKENS: Final = 128

console = Console(width=150)


@dataclass(frozen=True)
class Chosen:
    """The answers to all prompts of one length, with one bound.

    Attributes:
        acts: which server.
        length: tokens of a prompt.
        bound: on KL, in nats; None for dense answers.
        policy: that was chosen; None for dense answers.
        expected_kl, expected_read: what the profile says of it.
        kl, top1, true_share: what audits of every step say; None if no step was sparse.
        read: the KV read ratio of audited answers.
        dense_steps: the share of their decode steps that ran dense.
        tpot: of answers that are not audited, all at once, seconds.
    """

    acts: str
    length: int
    bound: float | None
    policy: dict[str, Any] | None
    expected_kl: float | None
    expected_read: float | None
    kl: float | None
    top1: float | None
    true_share: float | None
    read: float
    dense_steps: float
    tpot: float


def measure(
    server: BatchServer, acts: str, length: int, prompts: Sequence[Sequence[int]], tokens: int
) -> Iterator[Chosen]:
    """Yield what dense answers and those with each bound come to.

    Raises:
        httpx.HTTPError: the server refuses.
        RuntimeError: it fails.
    """
    for bound in (None, *BOUNDS):
        attention: dict[str, Any] = {} if bound is None else {"quality": {"kl": bound}}
        audit = {} if bound is None else {"audit": {"share": 1.0, "kl": True}}
        told = ask_all(server, prompts, tokens, attention | audit, len(prompts)).cost
        # Once more beforehand: the prompts are cached then, and no kernel is compiled.
        for _ in range(2):
            streams = server.ask(prompts, tokens, [attention or None] * len(prompts))
        yield chosen_of(acts, length, bound, told, timing_of(streams).tpot)


def chosen_of(acts: str, length: int, bound: float | None, told: Sequence[Any], tpot: float) -> Chosen:
    """Return what answers tell of themselves; ``told`` are their ``attention`` objects."""
    quality = told[0].get("quality") if bound is not None else None
    audits = [answer["audit"] for answer in told if answer["audit"] and answer["audit"]["steps"]]
    decodes = [answer["decode"] for answer in told]

    def mean(name: str) -> float | None:
        values = [audit[name] for audit in audits if audit[name] is not None]
        return fmean(values) if values else None

    return Chosen(
        acts,
        length,
        bound,
        None if quality is None else quality["chosen"],
        None if quality is None else quality["expected"]["kl"],
        None if quality is None else quality["expected"]["kv_read_ratio"],
        mean("next_token_kl"),
        mean("top1"),
        mean("true_share"),
        fmean(decode["kv_read_ratio"] or 1.0 for decode in decodes),
        sum(decode["dense_steps"] for decode in decodes) / max(1, sum(decode["steps"] for decode in decodes)),
        tpot,
    )


def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    profile: Annotated[Path, typer.Argument(help="What winnow calibrate profile wrote of it.")],
    context: Annotated[str, typer.Option(help="Tokens of a prompt, with commas between.")] = "8192,16384,32000",
    prompts: Annotated[int, typer.Option(help="Of each length, all asked at once.")] = 4,
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    text: Annotated[str, typer.Option(help="Kind of text.")] = "prose",
    server_arguments: Annotated[str, typer.Option(help="Beside the benchmark's own.")] = "",
    output: Annotated[Path, typer.Option(help="Where to write.")] = _OUTPUT,
) -> None:
    """Measure what a server chooses by a profile."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU: on a CPU, benchmarks.fidelity.quality sets the choice beside other text")
    lengths = numbers(context)
    offline = OfflineModel(model, torch.device("cpu"))
    known = {length: [one.tokens for one in prompts_of(offline, text, length, tokens, prompts)] for length in lengths}
    curves = Profile.read(profile).curves
    kinds = sorted({curve.attention.decode.policy for curve in curves} - {"dense"})
    settings = {profile_settings.PROFILE: str(profile.resolve()), audit_share.ENVIRONMENT: "0"}
    settings[POLICIES_SETTING] = ",".join(kinds)
    arguments = [
        *("--attention-backend", NAME, "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--context-length", str(max(lengths) + tokens + _SPARE_TOKENS), "--cuda-graph-max-bs", str(prompts)),
        *server_arguments.split(),
    ]
    about = header_from_outside() | {
        "model": model.name, "profile_device": Profile.read(profile).device, "server_arguments": server_arguments,
        "prompts": prompts, "tokens": tokens, "text": text,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for acts in (BY_TIMES, ALWAYS):
        own = settings | ({crossover.ENVIRONMENT: "0"} if acts == ALWAYS else {})
        with (
            tempfile.TemporaryDirectory() as scratch,
            runtime_server(model, *arguments, log=Path(scratch) / "log", **own) as runtime,
            BatchServer(runtime.url, prompts) as server,
        ):
            for length, of_length in known.items():
                for found in measure(server, acts, length, of_length, tokens):
                    console.print(found)
                    rows.append(asdict(found))
                    write_json(output, {"header": about, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
