"""Tables of a profile's parts: speed beside quality, early termination, drafts.

winnow calibrate profile --model smollm2 --lengths 1k,4k --policy ... --output benchmarks/results/profile-smollm2.json
"""

from __future__ import annotations

from pathlib import Path

from sglang_winnow.profile_parts import DraftPoint, StoppedPoint
from sglang_winnow.quality_profile import Profile
from winnow_evaluation.calibration.report import label_of
from winnow_evaluation.calibration.report_parts import thresholds_text
from winnow_evaluation.writing import markdown_table, number, percent


def profile_speed_table(path: Path) -> str:
    """Return what each policy loses, reads and takes, by length."""
    profile = Profile.read(path)
    if profile.speed is None:
        raise ValueError(f"{path} has no speed")
    rows = []
    for curve in profile.curves:
        timed = profile.speed.of(curve.attention)
        for point in curve.points:
            time = profile.time_at(curve.attention, point.length)
            start = None if timed is None else timed.faster_from
            rows.append(
                (
                    label_of(curve.attention),
                    f"{point.length:,}",
                    f"{point.kl:.4f}",
                    percent(point.kv_read_ratio),
                    number(None if time is None else time.ratio, ".2f"),
                    "" if start is None else f"{start:,}",
                )
            )
    dense = ", ".join(f"{1e3 * time.seconds:.1f} ms at {time.length:,}" for time in profile.speed.dense)
    took = ", ".join(f"{part.replace('-', ' ')} {seconds:,.0f} s" for part, seconds in profile.seconds.items())
    threads = "" if profile.speed.threads is None else f", threads of torch: {profile.speed.threads}"
    about = (
        f"{_about(profile)} Times are of attention in a decode step, all layers together, relative to dense attention"
        f" ({dense}); {profile.speed.steps} steps{threads}. The run took: {took}."
    )
    headings = ("policy", "tokens", "KL", "KV read %", "time", "faster from")
    return f"{markdown_table(headings, rows)}\n{about}\n"


def profile_stopping_table(path: Path) -> str:
    """Return the thresholds of early termination that keep the error, what they lose and what is read with them."""
    profile = Profile.read(path)
    stopping = profile.early_termination
    if stopping is None:
        raise ValueError(f"{path} has no early termination")
    rows = []
    for each in stopping.kept:
        thresholds = each.early_termination
        name = label_of(each.attention)
        if thresholds is None:
            rows.append((name, "none", *["" for _ in profile.lengths]))
            continue
        [measured] = [
            own for own in stopping.policies if (own.attention, own.early_termination) == (each.attention, thresholds)
        ]
        rows.append((name, thresholds_text(thresholds), *(_stopped(measured.at(length)) for length in profile.lengths)))
    about = (
        f"{_about(profile)} Error asked for: {percent(stopping.max_error)} % on each of {stopping.prompts} prompts,"
        f" {stopping.tokens} tokens behind each."
    )
    headings = ("policy", "scale, direction, patience", *(f"{length:,} tokens" for length in profile.lengths))
    return f"{markdown_table(headings, rows)}\n{about}\n"


def profile_drafts_table(path: Path) -> str:
    """Return how many tokens a check comes to, by policy, length and number of drafts."""
    profile = Profile.read(path)
    drafts = profile.drafts
    if drafts is None:
        raise ValueError(f"{path} has no drafts")
    numbers = sorted({point.draft_tokens for policy in drafts.policies for point in policy.points})
    rows = []
    for policy in drafts.policies:
        for length in profile.lengths:
            if points := {point.draft_tokens: point for point in policy.at(length)}:
                cells = (_check(points.get(number)) for number in numbers)
                rows.append((label_of(policy.attention), f"{length:,}", *cells))
    about = f"{_about(profile)} {drafts.prompts} prompts, {drafts.tokens} tokens of each greedy answer."
    headings = ("drafts with", "tokens", *(f"{number} drafted" for number in numbers))
    return f"{markdown_table(headings, rows)}\n{about}\n"


def _about(profile: Profile) -> str:
    data = profile.data
    commit = "unknown" if profile.commit is None else profile.commit[:8]
    return (
        f"{profile.model.name}, {profile.device}, {profile.dtype}, {data.prompts} prompts × {data.tokens} tokens of"
        f" {data.source}, commit {commit}."
    )


def _stopped(point: StoppedPoint | None) -> str:
    if point is None:
        return ""
    read = f"{percent(point.kv_read_ratio)} % for {percent(point.kv_read_ratio_to_the_end)} %"
    return f"{read}, error {percent(point.error)} %"


def _check(point: DraftPoint | None) -> str:
    return "" if point is None else f"{point.tokens_per_check:.2f} ({percent(point.kv_read_ratio)})"
