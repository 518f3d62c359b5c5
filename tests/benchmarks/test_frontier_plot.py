"""The README's plot comes from the profile that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from benchmarks.folders import PLOTS, REPOSITORY, RESULTS
from benchmarks.frontier_plot import main

PROFILE = RESULTS / "profile-smollm2-32k-gpu.json"
NAME = "frontier-smollm2-32k-32640.svg"


def test_the_readmes_only_plot_is_drawn_from_the_profile(tmp_path: Path) -> None:
    main(PROFILE, 32_640, tmp_path)
    assert (tmp_path / NAME).read_bytes() == (PLOTS / NAME).read_bytes()
    readme = (REPOSITORY / "README.md").read_text()
    assert readme.count("![") == 1
    assert f"(docs/benchmarks/{NAME})" in readme


def test_the_plot_has_both_costs_and_both_fronts() -> None:
    drawn = (PLOTS / NAME).read_text()
    for text in ("KL to dense attention", "KL to dense attention, by time", "lowbit_top_p", "lowbit_top_k"):
        assert f">{text}" in drawn
    assert drawn.count(">Pareto front<") == 1


def test_a_length_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="must have times at 4,096 tokens"):
        main(PROFILE, 4096, tmp_path)
