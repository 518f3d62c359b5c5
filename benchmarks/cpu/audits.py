"""What audits cost on a CPU: time of a token with several shares of decode steps audited, over HTTP.

    python -m benchmarks.cpu.audits --output audits-cpu.json

One server is asked one request at a time. Answers to a prompt that is cached take turns, so that whatever else the
machine does slows all of them; the first decode step, which builds what is missing of an index, is left out.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.command_line import numbers
from benchmarks.cpu.server import Prompts, serve_winnow
from benchmarks.folders import RESULTS
from benchmarks.markdown_tables import commit_of
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import markdown_table, write_json

POLICY: Final[dict[str, Any]] = {"decode": {"policy": "lowbit_top_p", "p": 0.9}}
WAYS: Final = ((None, False), (0.0, False), (0.01, False), (0.1, False), (0.01, True), (0.1, True))
"""The share that is asked for, and whether the next token is compared, too."""

console = Console(width=150)


@dataclass(frozen=True)
class Audited:
    """Answers of which a share of steps was audited.

    Attributes:
        context: tokens of the prompt.
        share: that the request asked for; None if it did not ask.
        kl: whether it asked for the KL of the next token, too.
        seconds: of a token on average, of each answer.
    """

    context: int
    share: float | None
    kl: bool
    seconds: list[float]

    @property
    def policy(self) -> dict[str, Any]:
        """What is asked for."""
        if self.share is None:
            return POLICY
        return POLICY | {"audit": {"share": self.share, "kl": True} if self.kl else self.share}

    @property
    def label(self) -> str:
        """What the table calls it."""
        if self.share is None:
            return "not asked"
        return f"{self.share:g} with KL" if self.kl else f"{self.share:g}"


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model to serve.")] = Path("models/needle"),
    context: Annotated[str, typer.Option(help="Prompt lengths.")] = "8192,30000",
    rounds: Annotated[int, typer.Option(min=2, help="Answers with each share.")] = 4,
    tokens: Annotated[int, typer.Option(min=3, help="Of an answer.")] = 202,
    output: Annotated[Path, typer.Option(help="Where to write JSON, after each length.")] = RESULTS / "audits-cpu.json",
) -> None:
    """Measure, print a table, write JSON."""
    record = surroundings() | {"model": model.name, "policy": POLICY, "tokens": tokens, "audited": []}
    prompts = Prompts(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_winnow(model, Path(folder), WINNOW_CROSSOVER_TOKENS="0") as server,
    ):
        for length in numbers(context):
            prompt = prompts(length, 0)
            server.empty_cache()
            server.ask(prompt, 3, POLICY)
            found = [Audited(length, share, kl, []) for share, kl in WAYS]
            for number in range(rounds):
                turn = number % len(found)
                for audited in found[turn:] + found[:turn]:
                    audited.seconds.extend(server.ask(prompt, tokens, audited.policy).tpot())
            record["audited"] += [asdict(audited) for audited in found]
            write_json(output, record)
    console.print(Markdown(audits_table(output)))


def audits_table(path: Path) -> str:
    """Return what a token takes with each share, the median of answers, and how much more than if none is asked for."""
    record = json.loads(path.read_text())
    found = [Audited(**row) for row in record["audited"]]
    without = {audited.context: median(audited.seconds) for audited in found if audited.share is None}
    rows = []
    for audited in found:
        middle = median(audited.seconds)
        rows.append(
            (
                f"{audited.context:,}",
                audited.label,
                f"{1000 * middle:.1f}",
                f"{1000 * min(audited.seconds):.1f} to {1000 * max(audited.seconds):.1f}",
                f"{100 * (middle / without[audited.context] - 1):+.1f}",
            )
        )
    what = f"{record['model']}, answers of {record['tokens']} tokens, {record['cpu']}, {record['cpu_threads']} threads"
    table = markdown_table(("context", "audit", "ms a token", "of answers", "longer by %"), rows)
    return f"{table}\n\n{what}, {commit_of(record['commit'])}."


if __name__ == "__main__":
    typer.run(main)
