"""Whether what a server chooses by a profile keeps its quality on other text, and what it reads for it.

    winnow calibrate profile --model smollm2 --lengths 512,1k --policy ... --output profile.json
    winnow fidelity --model smollm2 --context 512,768,1k --policy ... --output heldout.json
    python -m benchmarks.fidelity.quality profile.json heldout.json --output benchmarks/results/quality.json

The record has the policies of the profile; others in it, and other models, are left out. The profile is measured on
the text that is there to choose by, the record of ``winnow fidelity`` on that to test with, at the lengths of the
profile and between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.markdown_tables import commit_of
from sglang_winnow.profile_settings import DEFAULT_KL
from sglang_winnow.quality_choice import choose
from sglang_winnow.quality_profile import Profile
from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.record import FidelityRecord, merged
from winnow_evaluation.fidelity.table import row_label
from winnow_evaluation.writing import markdown_table, number, percent, write_json
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.quality import Quality

BOUNDS: Final = (0.005, DEFAULT_KL, 0.05)
"""On KL, in nats."""
_DENSE: Final = "dense"


@dataclass(frozen=True)
class Held:
    """What was chosen for one bound at one length, and what other text says of it.

    Attributes:
        bound: on KL, in nats.
        chosen: the policy.
        expected_kl, expected_read: what the profile says of it.
        kl, kl_interval, read: what the other text says.
        best: the policy that reads least of those within the bound on the other text, chosen by hand.
        best_kl, best_read: what the other text says of that.
    """

    model: str
    length: int
    bound: float
    chosen: str
    expected_kl: float
    expected_read: float
    kl: float
    kl_interval: Sequence[float]
    read: float
    best: str
    best_kl: float
    best_read: float


def main(
    profile: Annotated[Path, typer.Argument(help="What winnow calibrate profile wrote.")],
    record: Annotated[Path, typer.Argument(help="What winnow fidelity wrote, of the same policies.")],
    output: Annotated[Path, typer.Option(help="Where to write.")],
) -> None:
    """Set the choice by a profile beside what was measured on other text."""
    measured = Profile.read(profile)
    other = of_profile(measured, FidelityRecord.read(record))
    if not other.rows:
        raise typer.BadParameter(f"has no policy of the profile at its lengths with {measured.model.name}")
    rows = [asdict(row) for row in compared(measured, other)]
    write_json(output, {"profile": about_profile(measured), "runs": list(other.runs), "rows": rows})


def of_profile(profile: Profile, record: FidelityRecord) -> FidelityRecord:
    """Return the rows that are of the profile's model, policies and range of lengths, and of no preset."""
    asked = [Measured(curve.attention) for curve in profile.curves]
    rows = [
        row
        for row in record.rows
        if (row["model"], row["phase"], row["preset"]) == (profile.model.name, "decode", None)
        and profile.lengths[0] <= row["context"] <= profile.lengths[-1]
        and any((row["policy"], row["parameters"]) == (each.name, each.parameters()) for each in asked)
    ]
    return merged([replace(record, rows=rows)])


def about_profile(profile: Profile) -> dict[str, Any]:
    """Return what a record has of the profile: with what it was measured, and the seconds that its quality took."""
    parts = {"curves", "floor", "speed", "early_termination", "drafts"}
    return profile.model_dump(mode="json", exclude=parts) | {"seconds": profile.seconds["quality"]}


def compared(profile: Profile, record: FidelityRecord) -> Iterator[Held]:
    """Yield the choice for each bound at each length that the record has, ascending."""
    for length in sorted({row["context"] for row in record.rows}):
        rows = [row for row in record.rows if row["context"] == length]
        for bound in BOUNDS:
            choice = choose(
                Quality(kl=bound),
                length,
                profile.curves,
                profile.lengths,
                default_kl=bound,
                cached=lambda _: 0,
                dense_until=lambda _: 0,
            )
            found = _row_of(rows, choice.policy)
            best = min((row for row in rows if row["kl"] <= bound), key=lambda row: row["kv_read_ratio"], default=None)
            yield Held(
                model=profile.model.name,
                length=length,
                bound=bound,
                chosen=_label(found),
                expected_kl=choice.expected.kl,
                expected_read=choice.expected.kv_read_ratio,
                kl=0.0 if found is None else found["kl"],
                kl_interval=[0.0, 0.0] if found is None else found["intervals"]["kl"],
                read=1.0 if found is None else found["kv_read_ratio"],
                best=_label(best),
                best_kl=0.0 if best is None else best["kl"],
                best_read=1.0 if best is None else best["kv_read_ratio"],
            )


def quality_table(path: Path) -> str:
    """Return the choice for each bound and length beside what was measured on other text."""
    record = json.loads(path.read_text())
    rows = [
        (
            f"{row['length']:,}",
            number(row["bound"]),
            row["chosen"],
            number(row["expected_kl"], ".4f"),
            f"{row['kl']:.4f} [{row['kl_interval'][0]:.4f}, {row['kl_interval'][1]:.4f}]",
            percent(row["read"]),
            row["best"],
            percent(row["best_read"]),
            number(row["read"] / row["best_read"], ".2f"),
        )
        for row in record["rows"]
    ]
    headings = (
        "tokens", "KL asked for", "chosen", "KL expected at most", "KL on other text [95 %]", "KV read %",
        "best by hand", "KV read %", "times as much",
    )  # fmt: skip
    profile, runs = record["profile"], record["runs"]
    data = profile["data"]
    measured = f"{data['prompts']} prompts × {data['tokens']} tokens of {data['source']}"
    other = "; ".join(
        dict.fromkeys(
            f"{run['prompts']} prompts × {run['tokens_each']} tokens of {run['text']}, test, {commit_of(run['commit'])}"
            for run in runs
        )
    )
    about = (
        f"{profile['model']['name']}, {profile['device']}, {profile['dtype']}. Profile: {measured},"
        f" {profile['seconds']:,.0f} s. Other text: {other}."
    )
    return f"{markdown_table(headings, rows)}\n{about}\n"


def _row_of(rows: Sequence[Mapping[str, Any]], policy: AttentionPolicy) -> Mapping[str, Any] | None:
    if policy.is_dense:
        return None
    measured = Measured(policy)
    [found] = [row for row in rows if (row["policy"], row["parameters"]) == (measured.name, measured.parameters())]
    return found


def _label(row: Mapping[str, Any] | None) -> str:
    return _DENSE if row is None else row_label(row).removesuffix(", 2 bits")


if __name__ == "__main__":
    typer.run(main)
