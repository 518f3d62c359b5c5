"""The record of what was measured: a row for each policy, and a run for each time the command ran.

    {"runs": [{"model": …, "device": …, "versions": …, "commit": …, …}], "rows": [{…, "run": 0}]}

A row's ``run`` says which run it is from. Rows of several runs can lie in one record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from winnow_evaluation.writing import write_json

KEYS: Final = tuple(
    "model text phase policy parameters preset context prompts tokens kl top1 loss_change kv_read_ratio attended_ratio "
    "terminated_ratio skipped_ratio reported_share true_share share_error share_error_p95 success worst_layer "
    "true_share_by_layer intervals run".split()
)
"""What a row has.

``context`` is the tokens of a prompt; ``tokens`` those predicted, of all prompts. ``kl`` is KL(dense ‖ policy) in nats,
``loss_change`` in nats. ``success`` is the share of (token, layer, query head) that hold p. Shares are means over
tokens, layers and query heads; ``share_error`` is reported less true share, ``share_error_p95`` the 95th percentile of
its absolute value over (token, layer), each a mean over query heads. Ratios are ratios of sums. Of what was not
measured it has null.
"""
SWEPT: Final = ("p", "budget", "budget_ratio", "window")
"""Parameters that say how much a policy reads."""
_IDENTITY: Final = ("model", "text", "phase", "policy", "parameters", "preset", "context")


@dataclass(frozen=True)
class FidelityRecord:
    """Rows, and the runs that they are from."""

    runs: Sequence[dict[str, Any]]
    rows: Sequence[dict[str, Any]]

    def write(self, path: Path) -> None:
        """Write JSON to ``path``; what was there before is replaced at once."""
        write_json(path, {"runs": list(self.runs), "rows": [{key: row[key] for key in KEYS} for row in self.rows]})

    @classmethod
    def read(cls, path: Path) -> FidelityRecord:
        """Read what ``write`` wrote.

        Raises:
            ValueError: it is something else.
        """
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.keys() != {"runs", "rows"}:
            raise ValueError(f"{path} is no record of winnow fidelity")
        for row in content["rows"]:
            if row.keys() != set(KEYS):
                raise ValueError(f"{path}: a row has {sorted(row)}; it must have {sorted(KEYS)}")
        return cls(content["runs"], content["rows"])


def identity_of(row: Mapping[str, Any]) -> str:
    """Return what tells a row from those of something else; it needs no figures."""
    return json.dumps([row[key] for key in _IDENTITY], sort_keys=True)


def merged(records: Sequence[FidelityRecord]) -> FidelityRecord:
    """Return the rows of several records. Of rows that are of the same, the last counts; it stands where the first did.

    Runs of which no row is left are left out.
    """
    latest: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for record in records:
        for row in record.rows:
            latest[identity_of(row)] = (record.runs[row["run"]], row)
    runs: list[dict[str, Any]] = []
    rows = []
    for run, row in latest.values():
        if run not in runs:
            runs.append(run)
        rows.append(row | {"run": runs.index(run)})
    return FidelityRecord(runs, rows)
