"""The report on a profile: one page of HTML that needs nothing beside it, with plots as SVG."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sglang_winnow.quality_profile import Curve, Point, Profile
from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.record import SWEPT
from winnow_evaluation.fidelity.table import prefill_label
from winnow_evaluation.plotting import COLORS, label_axes, svg
from winnow_evaluation.writing import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT: Final = 9.0
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
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
    title = f"What policies lose and read on {profile.model.name}"
    parts = [f"<h1>{escape(title)}</h1>", _about(profile)]
    for length in profile.lengths:
        parts.append(f"<h2>{length:,} tokens</h2>")
        if rows := _rows(profile, length):
            parts += [_plot(profile, length), rows]
        else:
            parts.append("<p>No policy leaves anything out of prompts as short as these.</p>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def label_of(curve: Curve) -> str:
    """Return what a curve's policy is called, with the parameter that says how much it reads."""
    measured = Measured(curve.attention)
    parameters = measured.parameters()
    shown = [f"{name.replace('budget_ratio', 'ratio')} {parameters[name]:,}" for name in SWEPT if name in parameters]
    return ", ".join([" ".join([_kind(curve), *shown]), *_beside(curve)])


def _kind(curve: Curve) -> str:
    measured = Measured(curve.attention)
    return f"{measured.name} prefill" if measured.is_prefill else measured.name


def _beside(curve: Curve) -> list[str]:
    attention, measured = curve.attention, Measured(curve.attention)
    more = ["early termination"] if attention.early_termination is not None else []
    if not attention.has_dense_prefill and not measured.is_prefill:
        more.append(prefill_label(attention.prefill.model_dump()))
    return more


def _about(profile: Profile) -> str:
    data = profile.data
    facts = {
        "Model": f"{profile.model.name}, configuration {profile.model.config_sha256[:12]},"
        f" weights {profile.model.weights_sha256[:12]}",
        "Machine": f"{profile.device}, {profile.dtype}",
        "Text": f"{data.source}; {data.prompts} prompts of each length, {data.tokens} tokens predicted behind each;"
        f" SHA-256 {data.sha256[:12]}",
        "Measured": f"{profile.date}, {profile.seconds:,.0f} s",
        "Versions": ", ".join(f"{name} {version}" for name, version in profile.versions.items()),
    }
    rows = "".join(f'<tr><td>{name}</td><td class="text">{escape(text)}</td></tr>' for name, text in facts.items())
    floor = ", ".join(f"{point.kl:.4f} at {point.length:,}" for point in profile.floor)
    return (
        f"{_table('What was measured', rows)}\n<p>KL is from dense attention, in nats, of the next token. Brackets hold"
        " the worse ends of 95 % intervals of means over prompts: a choice goes by these. Dense attention beside itself"
        f" has a KL of {floor}.</p>"
    )


def _at(profile: Profile, length: int) -> list[tuple[Curve, Point]]:
    return [(curve, point) for curve in profile.curves if (point := curve.at(length)) is not None]


def _rows(profile: Profile, length: int) -> str:
    found = sorted(
        _at(profile, length), key=lambda each: (Measured(each[0].attention).is_prefill, each[1].kv_read_ratio)
    )
    rows = [
        f"<tr><td>{escape(label_of(curve))}</td><td>{percent(point.kv_read_ratio)}</td>"
        f"<td>{point.kl:.4f} [to {point.kl_high:.4f}]</td>"
        f"<td>{percent(point.top1)} [from {percent(point.top1_low)}]</td><td>{number(point.true_share)}</td></tr>"
        for curve, point in found
    ]
    head = "<tr><th>policy</th><th>KV read %</th><th>KL</th><th>top-1 equal %</th><th>true share</th></tr>"
    return _table(f"Policies at {length:,} tokens", head + "".join(rows)) if rows else ""


def _table(label: str, rows: str) -> str:
    """Return a table. Where it is wider than the page it scrolls by itself, and the keyboard reaches it."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table>{rows}</table></div>'


def _plot(profile: Profile, length: int) -> str:
    lines = _lines(_at(profile, length))
    drawn = svg(f"{profile.model.name}-{length}", _HEIGHT, lambda figure: _draw(figure, lines))
    # The document's own head and doctype are of a file of its own. The table says what the plot shows.
    label = f'role="img" aria-label="Policies at {length:,} tokens, as in the table below"'
    return f"<svg {label} {drawn.partition('<svg ')[2]}"


def _lines(found: Sequence[tuple[Curve, Point]]) -> Mapping[str, list[Point]]:
    """Return points by line: policies that are alike but for the parameter that says how much they read."""
    lines: defaultdict[tuple[str, str], list[Point]] = defaultdict(list)
    for curve, point in found:
        parameters = Measured(curve.attention).parameters()
        alike = {name: value for name, value in parameters.items() if name not in SWEPT}
        lines[", ".join([_kind(curve), *_beside(curve)]), json.dumps(alike, sort_keys=True)].append(point)
    labels = [label for label, _ in lines]
    return {
        label if labels.count(label) == 1 else f"{label} {alike}": sorted(points, key=lambda point: point.kv_read_ratio)
        for (label, alike), points in lines.items()
    }


def _draw(figure: Figure, lines: Mapping[str, Sequence[Point]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter  # noqa: PLC0415

    axes: Sequence[Axes] = figure.subplots(3, 1, sharex=True)
    plots: tuple[tuple[str, str, Any], ...] = (
        ("KL to dense attention", "nats", lambda point: point.kl if point.kl > 0 else None),
        ("Next token equal to dense attention's", "share", lambda point: point.top1),
        ("Attention mass of what is read", "share", lambda point: point.true_share),
    )
    for own, (title, unit, value) in zip(axes, plots, strict=True):
        for place, (label, points) in enumerate(lines.items()):
            shown = [(point.kv_read_ratio, value(point)) for point in points if value(point) is not None]
            if shown:
                style: dict[str, Any] = {
                    "color": COLORS[place % len(COLORS)],
                    "marker": _MARKERS[place % len(_MARKERS)],
                }
                own.plot(*zip(*shown, strict=True), label=label, linewidth=1.6, markersize=6, **style)
        label_axes(own, title, "", unit)
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda nats, _: f"{nats:g}"))
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[-1].set_xlabel("KV cache and index read, of what dense attention reads")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{100 * ratio:g} %"))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
