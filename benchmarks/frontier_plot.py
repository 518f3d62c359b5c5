"""The README's plot: what policies lose by what they read and by their time, out of a profile.

    python -m benchmarks.frontier_plot benchmarks/results/profile-smollm2-32k-gpu.json --length 32640

The plot of a profile's report, of one length, as a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.folders import PLOTS
from sglang_winnow.quality_profile import Profile
from winnow_evaluation.calibration.report import save_frontier


def main(
    profile: Annotated[Path, typer.Argument(help="What winnow calibrate profile wrote, with times.")],
    length: Annotated[int, typer.Option(help="One of its lengths, in tokens.")],
    folder: Annotated[Path, typer.Option(help="Where the plot goes.")] = PLOTS,
) -> None:
    """Draw the plot."""
    found = Profile.read(profile)
    path = folder / f"frontier-{found.model.name}-{length}.svg"
    try:
        save_frontier(found, length, path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(str(path))


if __name__ == "__main__":
    typer.run(main)
