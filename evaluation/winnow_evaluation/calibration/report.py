"""The report on a profile: one page of HTML that needs nothing beside it, with plots as SVG."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sglang_winnow.quality_profile import Curve, Point, Profile
from winnow_evaluation.calibration.fronts import pareto_front
from winnow_evaluation.calibration.report_parts import drafts_section, scrolling, speed_section, stopping_section, table
from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.record import SWEPT
from winnow_evaluation.fidelity.table import prefill_label
from winnow_evaluation.plotting import COLORS, label_axes, save_plot, svg
from winnow_evaluation.writing import number, percent
from winnow_kernels.policies.attention_policy import AttentionPolicy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Cost = Callable[[Curve, Point], float | None]
"""Returns what a policy costs, relative to dense attention; None where that is not known."""
Lines = Mapping[str, Sequence[tuple[Curve, Point]]]
"""What a plot shows: by label, points that a line joins."""

_HEIGHT: Final = 9.0
_TIME_HEIGHT: Final = 3.6
_FRONTIER_HEIGHT: Final = 6.4
_HEADINGS: Final = ("policy", "KV read %", "time", "KL", "top-1 equal %", "true share", "on the front by")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
body { color: #1a1a1a; background: #fff; overflow-wrap: anywhere; }
td.text { text-align: left; white-space: normal; }
.wide { margin: 1rem 0; overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
""".strip()


def write_report(profile: Profile, path: Path) -> None:
    """Write the page to ``path``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    path.write_text(report(profile), encoding="utf-8")


def report(profile: Profile) -> str:
    """Return the page.

    Raises:
        ImportError: matplotlib is not installed.
    """
    title = f"What policies lose, read and take on {profile.model.name}"
    parts = [f"<h1>{escape(title)}</h1>", _about(profile)]
    for length in profile.lengths:
        parts.append(f"<h2>{length:,} tokens</h2>")
        if rows := _rows(profile, length):
            parts += [_plots(profile, length), rows]
        else:
            parts.append("<p>No policy leaves anything out of prompts as short as these.</p>")
    if profile.speed is not None:
        parts.append(speed_section(profile.speed, profile.lengths, label_of))
    if profile.early_termination is not None:
        parts.append(stopping_section(profile.early_termination, profile.lengths, label_of))
    if profile.drafts is not None:
        parts.append(drafts_section(profile.drafts, profile.lengths, label_of))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def label_of(attention: AttentionPolicy) -> str:
    """Return what a policy is called, with the parameter that says how much it reads."""
    parameters = Measured(attention).parameters()
    shown = [f"{name.replace('budget_ratio', 'ratio')} {parameters[name]:,}" for name in SWEPT if name in parameters]
    return ", ".join([" ".join([_kind(attention), *shown]), *_beside(attention)])


def _kind(attention: AttentionPolicy) -> str:
    measured = Measured(attention)
    return f"{measured.name} prefill" if measured.is_prefill else measured.name


def _beside(attention: AttentionPolicy) -> list[str]:
    more = ["early termination"] if attention.early_termination is not None else []
    if not attention.has_dense_prefill and not Measured(attention).is_prefill:
        more.append(prefill_label(attention.prefill.model_dump()))
    return more


def _about(profile: Profile) -> str:
    data = profile.data
    took = ", ".join(f"{part.replace('-', ' ')} {seconds:,.0f} s" for part, seconds in profile.seconds.items())
    facts = {
        "Model": f"{profile.model.name}, configuration {profile.model.config_sha256[:12]},"
        f" weights {profile.model.weights_sha256[:12]}",
        "Machine": f"{profile.device}, {profile.dtype}",
        "Text": f"{data.source}; {data.prompts} prompts of each length, {data.tokens} tokens predicted behind each;"
        f" SHA-256 {data.sha256[:12]}",
        "Measured": f"{profile.date}; {took}",
        "Versions": ", ".join(f"{name} {version}" for name, version in profile.versions.items()),
    }
    rows = "".join(f'<tr><td>{name}</td><td class="text">{escape(text)}</td></tr>' for name, text in facts.items())
    floor = ", ".join(f"{point.kl:.4f} at {point.length:,}" for point in profile.floor)
    return (
        f"{scrolling('What was measured', rows)}\n<p>KL is from dense attention, in nats, of the next token. Brackets"
        " hold the worse ends of 95 % intervals of means over prompts: a choice goes by these. Dense attention beside"
        f" itself has a KL of {floor}. Times are of attention in a decode step, relative to dense attention. What is on"
        " the Pareto front costs less than dense attention, and nothing that costs as little is nearer to it.</p>"
    )


def _at(profile: Profile, length: int) -> list[tuple[Curve, Point]]:
    return [(curve, point) for curve in profile.curves if (point := curve.at(length)) is not None]


def _rows(profile: Profile, length: int) -> str:
    found = sorted(
        _at(profile, length), key=lambda each: (Measured(each[0].attention).is_prefill, each[1].kv_read_ratio)
    )
    reads, times = pareto_front(_costs(found, _read)), pareto_front(_costs(found, _time(profile, length)))
    rows = []
    for curve, point in found:
        time = _time(profile, length)(curve, point)
        on = ["KV"] if (_read(curve, point), point.kl) in reads else []
        on += ["time"] if (time, point.kl) in times else []
        rows.append(
            [
                label_of(curve.attention),
                percent(point.kv_read_ratio),
                number(time, ".2f"),
                f"{point.kl:.4f} [to {point.kl_high:.4f}]",
                f"{percent(point.top1)} [from {percent(point.top1_low)}]",
                number(point.true_share),
                ", ".join(on),
            ]
        )
    return table(f"Policies at {length:,} tokens", _HEADINGS, rows) if rows else ""


def _read(curve: Curve, point: Point) -> float | None:
    """Return what a policy's decode steps read, of what dense attention reads; None of a prefill alone."""
    return None if Measured(curve.attention).is_prefill else point.kv_read_ratio


def _time(profile: Profile, length: int) -> Cost:
    """Return what tells the time of a policy's decode steps, of dense attention's; None where it was not measured."""

    def of(curve: Curve, _point: Point) -> float | None:
        timed = profile.time_at(curve.attention, length)
        return None if timed is None else timed.ratio

    return of


def _costs(found: Iterable[tuple[Curve, Point]], cost: Cost) -> list[tuple[float, float]]:
    """Return what policies cost and their KL, as far as there is such a cost."""
    return [(own, point.kl) for curve, point in found if (own := cost(curve, point)) is not None]


def save_frontier(profile: Profile, length: int, path: Path) -> None:
    """Write to ``path`` as SVG the KL of policies by what they read and by their time, with the Pareto fronts.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the profile has no times, or not of this length.
    """
    if profile.speed is None or length not in profile.lengths:
        raise ValueError(f"length: the profile must have times at {length:,} tokens; it has {profile.lengths}")
    lines, time = _lines(_at(profile, length)), _time(profile, length)

    def draw(figure: Figure) -> None:
        by_read, by_time = figure.subplots(2, 1)
        _draw_kl(by_read, lines)
        _label_read(by_read)
        _draw_kl_by_time(by_time, lines, time)
        _add_legend(figure, by_read, by_time)

    save_plot(path, _FRONTIER_HEIGHT, draw)


def _plots(profile: Profile, length: int) -> str:
    lines = _lines(_at(profile, length))
    drawn = svg(f"{profile.model.name}-{length}", _HEIGHT, lambda figure: _draw(figure, lines))
    if profile.speed is not None:
        time = _time(profile, length)
        name = f"{profile.model.name}-{length}-time"
        drawn_time = svg(name, _TIME_HEIGHT, lambda figure: _draw_time(figure, lines, time))
        return _inline(drawn, length) + _inline(drawn_time, length)
    return _inline(drawn, length)


def _inline(drawn: str, length: int) -> str:
    # The document's own head and doctype are of a file of its own. The table says what the plot shows.
    label = f'role="img" aria-label="Policies at {length:,} tokens, as in the table below"'
    return f"<svg {label} {drawn.partition('<svg ')[2]}"


def _lines(found: Sequence[tuple[Curve, Point]]) -> Lines:
    """Return points by line: policies that are alike but for the parameter that says how much they read."""
    lines: defaultdict[tuple[str, str], list[tuple[Curve, Point]]] = defaultdict(list)
    for curve, point in found:
        parameters = Measured(curve.attention).parameters()
        alike = {name: value for name, value in parameters.items() if name not in SWEPT}
        name = ", ".join([_kind(curve.attention), *_beside(curve.attention)])
        lines[name, json.dumps(alike, sort_keys=True)].append((curve, point))
    labels = [label for label, _ in lines]
    return {
        label if labels.count(label) == 1 else f"{label} {alike}": sorted(own, key=lambda each: each[1].kv_read_ratio)
        for (label, alike), own in lines.items()
    }


def _draw(figure: Figure, lines: Lines) -> None:
    axes: Sequence[Axes] = figure.subplots(3, 1, sharex=True)
    _draw_kl(axes[0], lines)
    _draw_by_read(axes[1], lines, "Next token equal to dense attention's", "share", lambda point: point.top1)
    _draw_by_read(axes[2], lines, "Attention mass of what is read", "share", lambda point: point.true_share)
    _label_read(axes[-1])
    _add_legend(figure, axes[0])


def _draw_time(figure: Figure, lines: Lines, time: Cost) -> None:
    axes: Axes = figure.subplots()
    _draw_kl_by_time(axes, lines, time)
    _add_legend(figure, axes)


def _draw_by_read(axes: Axes, lines: Lines, title: str, unit: str, value: Callable[[Point], float | None]) -> None:
    for place, (label, points) in enumerate(lines.items()):
        shown = [(point.kv_read_ratio, own) for _, point in points if (own := value(point)) is not None]
        _draw_line(axes, place, label, shown)
    label_axes(axes, title, "", unit)


def _draw_kl(axes: Axes, lines: Lines) -> None:
    _draw_by_read(axes, lines, "KL to dense attention", "nats", lambda point: point.kl if point.kl > 0 else None)
    _draw_front(axes, _costs((each for own in lines.values() for each in own), _read))
    _label_kl(axes)


def _label_read(axes: Axes) -> None:
    axes.set_xlabel("KV cache and index read, of what dense attention reads")
    axes.xaxis.set_major_formatter(lambda ratio, _: f"{100 * ratio:g} %")


def _draw_kl_by_time(axes: Axes, lines: Lines, time: Cost) -> None:
    for place, (label, points) in enumerate(lines.items()):
        shown = [(own, point.kl) for curve, point in points if (own := time(curve, point)) is not None and point.kl > 0]
        _draw_line(axes, place, label, shown)
    label_axes(
        axes, "KL to dense attention, by time", "Time of attention in a decode step, of dense attention's", "nats"
    )
    axes.axvline(1, color="#666666", linewidth=1, linestyle=":", label="dense attention's time")
    _draw_front(axes, _costs((each for own in lines.values() for each in own), time))
    _label_kl(axes)
    axes.set_xscale("log")
    _plain_logarithms(axes.xaxis)


def _draw_line(axes: Axes, place: int, label: str, points: Sequence[tuple[float, float]]) -> None:
    if points:
        color, marker = COLORS[place % len(COLORS)], _MARKERS[place % len(_MARKERS)]
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.6, markersize=6, color=color, marker=marker)


def _draw_front(axes: Axes, costs: Iterable[tuple[float, float]]) -> None:
    if front := [point for point in pareto_front(costs) if point[1] > 0]:
        style: dict[str, Any] = {
            "color": "#999999",
            "linewidth": 5.0,
            "marker": "o",
            "markersize": 13,
            "alpha": 0.4,
            "zorder": 0,
        }
        axes.plot(*zip(*front, strict=True), label="Pareto front", drawstyle="steps-post", **style)


def _label_kl(axes: Axes) -> None:
    axes.set_yscale("log")
    _plain_logarithms(axes.yaxis)


def _plain_logarithms(axis: Axis) -> None:
    """Write 0.01 where matplotlib would write a power of ten, and few numbers in between."""
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _add_legend(figure: Figure, *plots: Axes) -> None:
    handles: dict[str, Any] = {}
    for axes in plots:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
