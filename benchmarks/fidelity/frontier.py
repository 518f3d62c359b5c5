"""The frontier of fidelity: which rows of the record no other policy beats, in what they lose and in what they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.record import FidelityRecord
from winnow_kernels.policies.attention_policy import AttentionPolicy

_ORACLE: Final = "oracle_"
_PLACE: Final = ("model", "text", "context", "phase")


def rows_of(record: FidelityRecord, policy: AttentionPolicy) -> list[Mapping[str, Any]]:
    """Return the rows of a policy as a server runs it by default, whether it was measured by a preset's name or not."""
    name, parameters, _ = Measured(policy).named
    return [row for row in record.rows if (row["policy"], row["parameters"]) == (name, parameters)]


def better(record: FidelityRecord, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of other policies that read less than a row's, and lose less by more than the noise floor.

    They are of the same model, text and context, and decode after the same prefill.

    Raises:
        ValueError: the floor was not measured there.
    """
    beside = [other for other in record.rows if all(other[name] == row[name] for name in _PLACE)]
    floors = [other["kl"] for other in beside if other["policy"] == "dense"]
    if not floors:
        raise ValueError(f"{_place(row)}: dense attention was not measured once more")
    for other in _policies(beside):
        is_other = other["policy"] != row["policy"] and _prefill(other) == _prefill(row)
        if is_other and other["kl"] < row["kl"] - max(floors) and other["kv_read_ratio"] < row["kv_read_ratio"]:
            yield other


def described(row: Mapping[str, Any]) -> str:
    """Say in a line what a row is of, and what it loses and reads."""
    figures = f"KL {row['kl']:.4f}, {100 * row['kv_read_ratio']:.1f} % read"
    return f"{_place(row)}: {row['policy']} {row['parameters']}: {figures}"


def _policies(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    yield from (row for row in rows if row["policy"] != "dense" and not row["policy"].startswith(_ORACLE))


def _prefill(row: Mapping[str, Any]) -> Any:
    return row["parameters"].get("prefill")


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['context']:,} tokens"
