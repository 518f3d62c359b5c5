"""The plot: KL to dense attention against what is read of the KV cache, a line for each policy over its parameter."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from winnow_evaluation.fidelity.record import SWEPT
from winnow_evaluation.fidelity.table import prefill_label
from winnow_evaluation.plotting import COLORS, label_axes, save_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT: Final = 5.6
# They tell apart what a colour does not.
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*", "p", "8")
_ORACLES: Final = {"oracle_top_p": "-", "oracle_top_k": "--", "oracle_pages": ":"}
_NAMES: Final = {
    "oracle_top_p": "oracle: best tokens that hold p",
    "oracle_top_k": "oracle: best tokens",
    "oracle_pages": "oracle: best pages of 16",
}
_BITS: Final = {2: "-", 3: "--", 4: ":"}
_TICKS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_GREY: Final = "#707070"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the plot of the decode rows of one model, text and context as SVG.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw, or the rows are of several models, texts or contexts.
    """
    about = {(row["model"], row["text"], row["context"]) for row in rows}
    if len(about) != 1:
        raise ValueError(f"a plot is of one model, text and context; the rows are of {len(about)}")
    [(model, text, context)] = about
    lines = lines_of(rows)
    if not lines:
        raise ValueError("no row of a decode policy is there to be drawn")
    title = f"{model}, {context:,} tokens of {text}: decode policies"
    save_plot(path, _HEIGHT, lambda figure: _draw_lines(figure, title, lines, floor_of(rows)))


def lines_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of each line by its label, in the order of what they read.

    A line is a policy whose parameters are alike but for the one that says how much it reads. Presets are points on
    other lines.
    """
    lines: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["phase"] == "decode" and row["policy"] != "dense" and row["preset"] is None:
            alike = {name: value for name, value in row["parameters"].items() if name not in SWEPT}
            lines[_line(row), json.dumps(alike, sort_keys=True)].append(row)
    labels = [label for label, _ in lines]
    return {
        label if labels.count(label) == 1 else f"{label} {alike}": sorted(line, key=lambda row: row["kv_read_ratio"])
        for (label, alike), line in lines.items()
    }


def floor_of(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the KL of dense attention beside itself; None if it was not measured."""
    floors = [row["kl"] for row in rows if row["phase"] == "decode" and row["policy"] == "dense"]
    return max(floors) if floors else None


def _draw_lines(
    figure: Figure, title: str, lines: Mapping[str, Sequence[Mapping[str, Any]]], floor: float | None
) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter  # noqa: PLC0415

    axes = figure.add_subplot()
    names = [name for name in dict.fromkeys(line[0]["policy"] for line in lines.values()) if name not in _ORACLES]
    looks = _looks(names)
    for label, line in lines.items():
        # On a logarithmic axis there is no zero; rounding may even leave less than that.
        points = [(row["kv_read_ratio"], row["kl"]) for row in line if row["kl"] > 0]
        if not points:
            continue
        style = _style(line[0], looks)
        axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _draw_floor(axes, floor)
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in _TICKS if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{100 * ratio:g} %"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    # Powers of ten would have exponents too small to read.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda nats, _: f"{nats:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    label_axes(axes, title, "KV cache and index read, of what dense attention reads", "KL to dense attention, nats")
    figure.legend(loc="outside right upper", frameon=False)


def _looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each policy."""
    return dict(zip(names, zip(cycle(COLORS), cycle(_MARKERS), strict=False), strict=False))


def _style(row: Mapping[str, Any], looks: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    parameters = row["parameters"]
    if row["policy"] in _ORACLES:
        marker = "+" if "newest" in parameters else "."
        line = _ORACLES[row["policy"]]
        return {"color": _GREY, "marker": marker, "linestyle": line, "linewidth": 1.4, "markersize": 7}
    color, marker = looks[row["policy"]]
    style = {"color": color, "marker": marker, "linewidth": 1.6, "markersize": 6}
    # What is added to a policy has its colour, with hollow markers.
    is_plain = not {"early_termination", "prefill"} & parameters.keys()
    line = _BITS[parameters.get("bits", 2)] if is_plain else "--"
    return style | {"linestyle": line} | ({} if line == "-" else {"markerfacecolor": "white"})


def _draw_floor(axes: Any, floor: float | None) -> None:
    bottom, top = axes.get_ylim()
    # Where both are computed in float32 it is rounding, far below everything else.
    if floor is not None and floor > bottom / 10:
        bottom = min(bottom, floor / 2)
        axes.axhspan(bottom, floor, color="#eeeeee", zorder=0, label="noise floor: dense beside itself")
    axes.set_ylim(bottom, top)


def _line(row: Mapping[str, Any]) -> str:
    parameters = row["parameters"]
    label: str = _NAMES.get(row["policy"], row["policy"])
    if "bits" in parameters:
        label += f", {parameters['bits']} bits"
    if "newest" in parameters:
        label += f", newest {parameters['newest']} kept"
    if "early_termination" in parameters:
        label += ", early termination"
    if "prefill" in parameters:
        label += f", {prefill_label(parameters['prefill'])}"
    return label
