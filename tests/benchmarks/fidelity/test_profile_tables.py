"""The documentation's tables of a profile's parts, on made-up figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fidelity.profile_tables import profile_drafts_table, profile_speed_table, profile_stopping_table
from sglang_winnow.profile_parts import (
    DenseTime,
    DraftingPolicy,
    DraftPoint,
    Drafts,
    Speed,
    StoppedPoint,
    StoppedPolicy,
    Stopping,
    TimedPoint,
    TimedPolicy,
    kept_thresholds,
)
from tests.models import ModelShape, write_model, write_weights
from tests.profiles import curve, profile
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.policies.attention_policy import parse_policy

POLICY = {"decode": {"policy": "lowbit_top_k", "budget": 512}}
ATTENTION = parse_policy(POLICY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", ModelShape())
    write_weights(folder)
    points = [TimedPoint(length=length, seconds=2.0, ratio=ratio) for length, ratio in ((1000, 1.5), (2000, 0.75))]
    speed = Speed(
        threads=2,
        steps=16,
        dense=tuple(DenseTime(length=length, seconds=0.004) for length in (1000, 2000)),
        policies=(TimedPolicy(attention=ATTENTION, points=tuple(points)),),
    )
    stopped = StoppedPoint(length=2000, error=0.01, worst=0.015, kv_read_ratio=0.2, kv_read_ratio_to_the_end=0.3)
    thresholds = EarlyTermination(scale=0.1, direction=0.03)
    policies = (StoppedPolicy(attention=ATTENTION, early_termination=thresholds, points=(stopped,)),)
    kept = kept_thresholds(policies, 0.02)
    drafted = DraftPoint(length=2000, draft_tokens=4, tokens_per_check=3.5, kv_read_ratio=0.6)
    made = profile(folder, (1000, 2000), [curve(POLICY, dict.fromkeys((1000, 2000), (0.01, 0.99, 0.4)))], speed)
    made = made.model_copy(
        update={
            "early_termination": Stopping(max_error=0.02, prompts=2, tokens=8, policies=policies, kept=kept),
            "drafts": Drafts(prompts=2, tokens=32, policies=(DraftingPolicy(attention=ATTENTION, points=(drafted,)),)),
        }
    )
    made.write(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_speed_stands_beside_quality(path: Path) -> None:
    table = profile_speed_table(path)
    assert "| lowbit_top_k budget 512 | 1,000 | 0.0100 | 40.0 | 1.50 | 2,000 |" in table
    assert "| lowbit_top_k budget 512 | 2,000 | 0.0100 | 40.0 | 0.75 | 2,000 |" in table
    assert "4.0 ms at 1,000" in table


def test_thresholds_that_are_kept(path: Path) -> None:
    assert "| lowbit_top_k budget 512 | 0.1, 0.03, 4 |  | 20.0 % for 30.0 %, error 1.0 % |" in profile_stopping_table(
        path
    )


def test_drafts_by_number(path: Path) -> None:
    assert "| lowbit_top_k budget 512 | 2,000 | 3.50 (60.0) |" in profile_drafts_table(path)


@pytest.mark.parametrize("table", [profile_speed_table, profile_stopping_table, profile_drafts_table])
def test_a_part_that_was_not_measured_is_named(tmp_path: Path, table: Callable[[Path], str]) -> None:
    folder = write_model(tmp_path / "model", ModelShape())
    write_weights(folder)
    profile(folder, (1000,), []).write(tmp_path / "profile.json")
    with pytest.raises(ValueError, match=r"profile\.json has no"):
        table(tmp_path / "profile.json")
