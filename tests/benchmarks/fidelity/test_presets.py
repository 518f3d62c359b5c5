"""The presets stand on the frontier that was measured, and lose no more than they promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from benchmarks.fidelity.frontier import better, described, dominating, rows_of
from benchmarks.folders import RESULTS
from winnow_evaluation.fidelity.record import FidelityRecord
from winnow_service.policies.presets import PRESETS

LEAST_CONTEXT: Final = 4096
"""At shorter ones dense attention is as fast, and presets do not act."""
ON_TEXT: Final = {("smollm2", 7680), *(("smollm2-32k", context) for context in (8192, 16_384, 32_640))}
ON_TASKS: Final = {("needle", 8192)}
MOST_KL: Final = {"balanced": 0.03, "fast": 0.1}
"""In nats, of the presets that are for any prompt. The others are measured on text, and promise nothing."""
SPARSE: Final = [name for name, preset in PRESETS.items() if not preset.attention.answers_densely]


@pytest.fixture(scope="module")
def record() -> FidelityRecord:
    return FidelityRecord.read(RESULTS / "fidelity.json")


def _rows(record: FidelityRecord, name: str) -> list[Mapping[str, Any]]:
    return [row for row in rows_of(record, PRESETS[name].attention) if row["context"] >= LEAST_CONTEXT]


@pytest.mark.parametrize("name", SPARSE)
def test_a_preset_was_measured(name: str, record: FidelityRecord) -> None:
    places = {(row["model"], row["context"]) for row in _rows(record, name)}
    assert places >= ON_TEXT | (ON_TASKS if name in MOST_KL else set())


@pytest.mark.parametrize("name", MOST_KL)
def test_a_preset_loses_no_more_than_it_promises(name: str, record: FidelityRecord) -> None:
    assert [described(row) for row in _rows(record, name) if row["kl"] > MOST_KL[name]] == []


@pytest.mark.parametrize("name", SPARSE)
def test_no_other_policy_reads_no_more_and_loses_less(name: str, record: FidelityRecord) -> None:
    beaten = {described(row): list(map(described, better(record, row))) for row in _rows(record, name)}
    assert {row: others for row, others in beaten.items() if others} == {}


@pytest.mark.parametrize("name", SPARSE)
def test_no_other_setting_is_better_somewhere_and_nowhere_worse(name: str, record: FidelityRecord) -> None:
    assert dominating(record, PRESETS[name].attention) == []
