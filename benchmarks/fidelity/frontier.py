"""The frontier of fidelity: which rows of the record no other policy beats, in what they lose and in what they read.

``lowbit_top_p`` and ``lowbit_top_k`` choose by the same scores. They differ in where they stop, at a share or at a
number, and for any one context a number can be found that suits it as well as the share does. So at one context the two
count as one policy (``better``); over all contexts together they are told apart (``dominating``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.record import FidelityRecord
from winnow_kernels.policies.attention_policy import AttentionPolicy

_DENSE: Final = "dense"
_ORACLE: Final = "oracle_"
_DELTA_LAYERS: Final = "delta_layers"
_PLACE: Final = ("model", "text", "context", "phase")
_BY_LOW_BITS: Final = ("lowbit_top_p", "lowbit_top_k")


def rows_of(record: FidelityRecord, policy: AttentionPolicy) -> list[Mapping[str, Any]]:
    """Return the rows of a policy as a server runs it by default, whether it was measured by a preset's name or not."""
    return [row for row in record.rows if is_of(row, policy)]


def is_of(row: Mapping[str, Any], policy: AttentionPolicy) -> bool:
    """Return whether a row is of a policy as a server runs it by default, with the Δ-layers of the model's profile."""
    measured = Measured(policy)
    phase = "prefill" if measured.is_prefill else "decode"
    if (row["phase"], row["policy"]) != (phase, measured.name):
        return False
    asked = measured.parameters()
    from_profile = {_DELTA_LAYERS} - asked.keys()
    own = {name: value for name, value in row["parameters"].items() if name not in from_profile}
    return measured.name == _DENSE or own == asked


def better(record: FidelityRecord, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of other policies that read no more than a row's, and lose less by more than noise.

    Noise is the floor, dense attention against itself, and what a row's loss may be with other prompts: they lose less
    than the lower end of its interval.

    They are of the same model, text and context, and decode after the same prefill.

    Raises:
        ValueError: the floor was not measured there.
    """
    floor = _floor(record, row)
    for other in _policies(_beside(record, row)):
        if _scores(other) != _scores(row) and _beats(other, row, floor):
            yield other


def dominating(record: FidelityRecord, policy: AttentionPolicy) -> list[str]:
    """Return other policies, the low-bit ones too, that are better somewhere and nowhere worse.

    They read no more wherever ``policy`` was measured, and lose no more, within the noise floor; somewhere they lose
    less by more than noise (``better``).

    Raises:
        ValueError: the floor was not measured somewhere.
    """
    own = rows_of(record, policy)
    others: dict[str, list[bool]] = {}
    for row in own:
        floor = _floor(record, row)
        for other in _policies(_beside(record, row)):
            is_no_worse = other["kv_read_ratio"] <= row["kv_read_ratio"] and other["kl"] <= row["kl"] + floor
            if is_no_worse and not is_of(other, policy):
                name = f"{other['policy']} {json.dumps(other['parameters'], sort_keys=True)}"
                others.setdefault(name, []).append(_beats(other, row, floor))
    return [name for name, beats in others.items() if len(beats) >= len(own) and any(beats)]


def described(row: Mapping[str, Any]) -> str:
    """Say in a line what a row is of, and what it loses and reads."""
    figures = f"KL {row['kl']:.4f}, {100 * row['kv_read_ratio']:.1f} % read"
    return f"{_place(row)}: {row['policy']} {row['parameters']}: {figures}"


def _beats(other: Mapping[str, Any], row: Mapping[str, Any], floor: float) -> bool:
    # A mean that one prompt makes may be far above what other prompts would give.
    least = row["intervals"]["kl"][0] if row["intervals"] else row["kl"]
    return bool(other["kv_read_ratio"] <= row["kv_read_ratio"] and other["kl"] < least - floor)


def _beside(record: FidelityRecord, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what was measured at a row's place, after the same prefill."""
    return [other for other in record.rows if _is_beside(other, row) and _prefill(other) == _prefill(row)]


def _is_beside(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return all(other[name] == row[name] for name in _PLACE)


def _floor(record: FidelityRecord, row: Mapping[str, Any]) -> float:
    floors = [float(other["kl"]) for other in record.rows if other["policy"] == _DENSE and _is_beside(other, row)]
    if not floors:
        raise ValueError(f"{_place(row)}: dense attention was not measured once more")
    return max(floors)


def _policies(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    yield from (row for row in rows if row["policy"] != _DENSE and not row["policy"].startswith(_ORACLE))


def _scores(row: Mapping[str, Any]) -> str:
    """Return by what a policy chooses."""
    return "low-bit keys" if row["policy"] in _BY_LOW_BITS else str(row["policy"])


def _prefill(row: Mapping[str, Any]) -> Any:
    return row["parameters"].get("prefill")


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['context']:,} tokens"
