"""What the benchmark of chosen policies makes of answers. No server is started."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serving.chosen_answers import ALWAYS, BY_TIMES, chosen_of

CHOSEN = {"decode": {"policy": "lowbit_top_k", "budget": 512}, "prefill": {"policy": "dense"}}


def told(steps: int, dense_steps: int, kl: float | None, *, chosen: Any = CHOSEN) -> dict[str, Any]:
    audited = steps - dense_steps
    audit = {"steps": audited, "next_token_kl": kl, "top1": 0.5 if audited else None, "true_share": 0.9}
    return {
        "decode": {"steps": steps, "dense_steps": dense_steps, "kv_read_ratio": 0.25 if audited else 1.0},
        "audit": audit,
        "quality": {"chosen": chosen, "expected": {"kl": 0.01, "kv_read_ratio": 0.2}},
    }


def test_figures_are_means_over_answers_with_audited_steps() -> None:
    found = chosen_of(ALWAYS, 8192, 0.02, [told(10, 0, 0.01), told(10, 5, 0.03), told(10, 10, None)], 0.004)
    assert found.kl == pytest.approx(0.02)
    assert (found.top1, found.true_share) == (0.5, 0.9)
    assert found.read == pytest.approx(0.5)
    assert found.dense_steps == 0.5
    assert (found.policy, found.expected_kl, found.expected_read) == (CHOSEN, 0.01, 0.2)


def test_dense_answers_have_no_audit() -> None:
    dense = told(10, 10, None) | {"audit": None, "quality": None}
    found = chosen_of(BY_TIMES, 8192, None, [dense, dense], 0.004)
    assert (found.kl, found.policy, found.expected_kl, found.read, found.dense_steps) == (None, None, None, 1.0, 1.0)
