"""The choice by a profile beside figures of other text, on made-up figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.quality import about_profile, compared, of_profile, quality_table
from sglang_winnow.quality_profile import Profile
from tests.models import ModelShape, write_model, write_weights
from tests.profiles import curve, profile
from winnow_evaluation.fidelity.policies import Measured
from winnow_evaluation.fidelity.record import FidelityRecord
from winnow_kernels.policies.attention_policy import parse_policy

NEAR, FAR = ({"decode": {"policy": "lowbit_top_k", "budget": budget}} for budget in (512, 128))


@pytest.fixture
def made(tmp_path: Path) -> Profile:
    folder = write_model(tmp_path / "model", ModelShape())
    write_weights(folder)
    figures = {NEAR["decode"]["budget"]: (0.01, 0.99, 0.4), FAR["decode"]["budget"]: (0.03, 0.9, 0.1)}
    curves = [curve(policy, dict.fromkeys((1000, 2000), figures[policy["decode"]["budget"]])) for policy in (NEAR, FAR)]
    return profile(folder, (1000, 2000), curves)


def row(policy: dict[str, Any], context: int, kl: float, read: float) -> dict[str, Any]:
    measured = Measured(parse_policy(policy))
    return {
        "phase": "decode", "policy": measured.name, "parameters": measured.parameters(), "preset": None,
        "context": context, "kl": kl, "kv_read_ratio": read, "intervals": {"kl": [kl / 2, 2 * kl]},
    }  # fmt: skip


def test_the_choice_is_set_beside_the_best_of_the_other_text(made: Profile, tmp_path: Path) -> None:
    record = FidelityRecord([], [row(NEAR, 1500, 0.012, 0.38), row(FAR, 1500, 0.018, 0.12)])
    strict, default, loose = compared(made, record)
    assert (strict.chosen, strict.kl, strict.read, strict.best) == ("dense", 0.0, 1.0, "dense")
    assert (default.expected_kl, default.kl, default.read) == (0.01, 0.012, 0.38)
    assert (default.best, default.best_read) == (loose.chosen, 0.12)
    assert (loose.kl, loose.best_read) == (0.018, 0.12)
    runs = [{"prompts": 8, "tokens_each": 32, "text": "prose", "commit": None}]
    path = tmp_path / "quality.json"
    path.write_text(json.dumps({"profile": about_profile(made), "runs": runs, "rows": [asdict(default)]}))
    assert "| 0.0120 [0.0060, 0.0240] | 38.0 |" in quality_table(path)
    assert "| 12.0 | 3.17 |" in quality_table(path)


def test_rows_of_other_models_policies_and_lengths_are_left_out(made: Profile) -> None:
    of_model = {"model": made.model.name, "text": "prose", "run": 1}
    wanted = row(NEAR, 1500, 0.012, 0.38) | of_model
    others = [
        wanted | {"model": "another"},
        wanted | {"preset": "fast"},
        wanted | {"phase": "prefill"},
        wanted | {"context": 2001},
        row({"decode": {"policy": "lowbit_top_k", "budget": 256}}, 1500, 0.012, 0.38) | of_model,
        row({"decode": {"policy": "dense"}}, 1500, 0.0, 1.0) | of_model,
    ]
    record = FidelityRecord([{"prompts": 1}, {"prompts": 2}], [*others, wanted])
    left = of_profile(made, record)
    assert left.runs == [{"prompts": 2}]
    assert left.rows == [wanted | {"run": 0}]
