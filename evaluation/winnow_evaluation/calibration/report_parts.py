"""The report's tables of speed, of early termination and of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from sglang_winnow.profile_parts import DraftPoint, Drafts, Speed, StoppedPoint, Stopping
from winnow_evaluation.writing import percent
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.policies.attention_policy import AttentionPolicy

Label = Callable[[AttentionPolicy], str]
"""Returns what a policy is called."""


def table(label: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are text, and ``label`` is what the table is called."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return scrolling(label, f"<tr>{head}</tr>{body}")


def scrolling(label: str, rows: str) -> str:
    """Return a table of rows in HTML. Where it is wider than the page it scrolls, and the keyboard reaches it."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table>{rows}</table></div>'


def speed_section(speed: Speed, lengths: Sequence[int], label: Label) -> str:
    """Return how long decode steps take, and from which length on each policy is faster than dense attention."""
    dense = ["dense, ms a step", *(f"{1e3 * time.seconds:.1f}" for time in speed.dense), ""]
    rows = [dense]
    for timed in speed.policies:
        points = (timed.at(length) for length in lengths)
        shown = ("" if point is None else f"{point.ratio:.2f}" for point in points)
        rows.append(
            [label(timed.attention), *shown, "no length" if timed.faster_from is None else f"{timed.faster_from:,}"]
        )
    on = "on a GPU" if speed.threads is None else f"threads of torch: {speed.threads}"
    about = (
        "<p>Time of attention in a decode step, all layers together, relative to dense attention: medians over"
        f" {speed.steps} steps of one request, in which policies took turns; {on}. A"
        " server on this very machine runs a policy's steps dense below the length from which on it was faster.</p>"
    )
    headings = ["policy", *(f"{length:,}" for length in lengths), "faster from"]
    return f"<h2>Speed</h2>{about}{table('Speed', headings, rows)}"


def stopping_section(stopping: Stopping, lengths: Sequence[int], label: Label) -> str:
    """Return what early termination loses and reads, the thresholds to use marked."""
    kept = {each.attention.canonical(): each.early_termination for each in stopping.kept}
    rows, last = [], None
    for each in stopping.policies:
        name = label(each.attention)
        if each.attention != last:
            rows.append([name, "none", *(_read_to_the_end(each.at(length)) for length in lengths), ""])
        last = each.attention
        is_kept = kept[each.attention.canonical()] == each.early_termination
        cells = [_stopped(each.at(length)) for length in lengths]
        rows.append([name, thresholds_text(each.early_termination), *cells, "✓" if is_kept else ""])
    about = (
        "<p>KV read, and how far attention's output is from that without early termination, on the queries and keys of"
        f" dense attention: means over layers, heads and {stopping.tokens} tokens behind each of {stopping.prompts}"
        " prompts; brackets hold the error of the worst prompt. ✓: the thresholds that read least of those that keep an"
        f" error of {percent(stopping.max_error)} % on every prompt.</p>"
    )
    headings = ["policy", "scale, direction, patience", *(f"{length:,} tokens" for length in lengths), "kept"]
    return f"<h2>Early termination</h2>{about}{table('Early termination', headings, rows)}"


def _read_to_the_end(point: StoppedPoint | None) -> str:
    return "" if point is None else f"{percent(point.kv_read_ratio_to_the_end)} %"


def _stopped(point: StoppedPoint | None) -> str:
    if point is None:
        return ""
    return f"{percent(point.kv_read_ratio)} %, error {percent(point.error)} % [{percent(point.worst)}]"


def drafts_section(drafts: Drafts, lengths: Sequence[int], label: Label) -> str:
    """Return what checks come to, the number of drafts that reads least marked."""
    numbers = sorted({point.draft_tokens for policy in drafts.policies for point in policy.points})
    rows = []
    for policy in drafts.policies:
        for length in lengths:
            if points := policy.at(length):
                least = min(points, key=lambda point: point.kv_read_ratio)
                cells = [_check(policy.at(length), number, least) for number in numbers]
                rows.append([label(policy.attention), f"{length:,}", *cells])
    about = (
        f"<p>Tokens a check comes to by the number of drafts, along {drafts.tokens} tokens that dense attention answers"
        f" greedily to each of {drafts.prompts} prompts. Behind it, what drafts and checks read, of what dense decoding"
        " reads. ✓: the number that reads least.</p>"
    )
    headings = ["drafts with", "tokens", *(f"{number} drafted" for number in numbers)]
    return f"<h2>Drafts for verify</h2>{about}{table('Drafts', headings, rows)}"


def _check(points: Sequence[DraftPoint], number: int, least: DraftPoint) -> str:
    point = next((point for point in points if point.draft_tokens == number), None)
    if point is None:
        return ""
    mark = " ✓" if point is least and point.kv_read_ratio < 1 else ""
    return f"{point.tokens_per_check:.2f}, {percent(point.kv_read_ratio)} %{mark}"


def thresholds_text(thresholds: EarlyTermination) -> str:
    """Return scale, direction and patience."""
    return f"{thresholds.scale:g}, {thresholds.direction:g}, {thresholds.patience}"
