"""A plot of verified answers: tokens a check over what a draft reads.

python -m benchmarks.cpu.verification_plot benchmarks/results/verification.json --drafts 4
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchmarks.cpu.verification_figures import Answer, read_by_draft, tokens_of_check
from benchmarks.folders import PLOTS
from winnow_evaluation.plotting import COLORS, label_axes, save_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES: Final = 4.2
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


def main(
    records: Annotated[list[Path], typer.Argument(help="What benchmarks.cpu.verification wrote, of one model.")],
    drafts: Annotated[int, typer.Option(help="Tokens drafted for a check.")] = 4,
    folder: Annotated[Path, typer.Option(help="Where the plot goes.")] = PLOTS,
) -> None:
    """Draw the plot, all kinds of text together."""
    typer.echo(str(draw([json.loads(path.read_text()) for path in records], drafts, folder)))


def draw(records: Sequence[dict[str, object]], drafts: int, folder: Path) -> Path:
    """Write the plot of several records of one model and context; return its path.

    Raises:
        ValueError: they are of several, or none has answers with so many drafts.
    """
    kinds = {(str(record["model"]), int(str(record["context"]))) for record in records}
    if len(kinds) != 1:
        raise ValueError(f"the records are of {len(kinds)} models or contexts; one is needed")
    [(model, context)] = kinds
    answers = [Answer(**entry) for record in records for entry in record["answers"]]  # type: ignore[attr-defined]
    points = points_of([answer for answer in answers if answer.draft_tokens == drafts])
    if not points:
        raise ValueError(f"no answer has {drafts} drafts for a check")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"verification-{model}-{context}.svg"
    title = f"{drafts} drafts for a check: {model}, {context:,} tokens"
    save_plot(path, _INCHES, partial(_draw, title=title, points=points, most=drafts + 1))
    return path


def points_of(answers: Sequence[Answer]) -> dict[str, list[tuple[float, float]]]:
    """Return for each policy what a draft reads, in per cent, and tokens a check, ascending; one for each budget."""
    groups: defaultdict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.decode["policy"], json.dumps(answer.decode)].append(answer)
    points: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for (policy, _), of in groups.items():
        points[policy].append((100 * read_by_draft(of), tokens_of_check(of)))
    return {policy: sorted(own) for policy, own in points.items()}


def _draw(figure: Figure, title: str, points: dict[str, list[tuple[float, float]]], most: int) -> None:
    axes: Axes = figure.add_subplot()
    for number, (policy, own) in enumerate(sorted(points.items())):
        shares, tokens = zip(*own, strict=True)
        color, marker = COLORS[number % len(COLORS)], _MARKERS[number // len(COLORS) + number % 3]
        axes.plot(shares, tokens, label=policy, color=color, marker=marker, markersize=6, linewidth=1.4)
    axes.axhline(most, color="#999999", linewidth=1, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_ylim(1, most + 0.2)
    label_axes(axes, title, "a draft reads, % of the KV", "tokens a check")
    axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    typer.run(main)
