"""What is measured when nothing, presets or policies are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policy_rows import DRAFTS_ONLY
from winnow_evaluation.fidelity.policies import (
    Measured,
    asked_for,
    checked,
    full_layers_of_delta,
    oracles,
    presets,
    sweep,
)
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.registry import DECODE_POLICIES
from winnow_service.policies.presets import PRESETS


def test_the_sweep_has_every_policy_and_no_row_twice() -> None:
    measured = sweep(32_768, (2, 3))
    assert {one.policy.decode.policy for one in measured} == {*DECODE_POLICIES} - {*DRAFTS_ONLY}
    assert len({(one.policy.canonical(), one.bits) for one in measured}) == len(measured)
    assert {getattr(one.policy.decode, "budget", None) for one in measured} >= {256, 512, 1024, 2048, 4096}
    assert len({(one.name, repr(one.parameters())) for one in measured}) == len(measured)
    assert sum(one.is_prefill for one in measured) == 4


def test_policies_that_read_low_bit_keys_are_measured_with_each_number_of_bits() -> None:
    coded = [one for one in sweep(8192, (2, 4)) if one.is_coded]
    asked = {(one.name, one.parameters().get("p"), one.parameters().get("budget"), one.bits) for one in coded}
    budgets = (256, 512, 1024, 2048, 4096)
    expected: list[tuple[str, float | None, int | None]]
    expected = [("lowbit_top_p", p, None) for p in (0.5, 0.75, 0.9, 0.95, 0.99)]
    expected += [("lowbit_top_k", None, budget) for budget in (128, *budgets)]
    expected += [("quoka", None, budget) for budget in budgets]
    assert asked == {(*one, bits) for one in expected for bits in (2, 4)}
    assert all(one.parameters()["bits"] == one.bits for one in coded)
    assert coded[1].label == "lowbit_top_p p 0.5, 4 bits"
    given: list[dict[str, Any]] = [
        {"decode": {"policy": "lowbit_top_k", "budget": 512}},
        {"decode": {"policy": "quest"}},
    ]
    assert [(one.name, one.bits) for one in asked_for(given, (3, 4))] == [
        ("lowbit_top_k", 3),
        ("lowbit_top_k", 4),
        ("quest", 2),
    ]
    assert "bits" not in Measured(sweep(8192)[0].policy).parameters()


def test_oracles_stand_beside_policies_that_keep_the_newest_tokens_and_beside_those_that_do_not() -> None:
    found = [(oracle.name, oracle.parameters()) for oracle in oracles(8192)]
    assert ("oracle_top_p", {"p": 0.9, "sinks": 16}) in found
    assert ("oracle_top_p", {"p": 0.9, "sinks": 16, "newest": 64}) in found
    assert ("oracle_top_k", {"budget": 128, "sinks": 16, "newest": 64}) in found
    assert not any("newest" in parameters for name, parameters in found if name == "oracle_pages")


def test_budgets_that_cover_the_context_are_left_out() -> None:
    budgets = {one.policy.decode.budget for one in sweep(512) if one.policy.decode.policy == "quest"}
    assert budgets == {256}
    assert {oracle.parameters().get("budget", 0) for oracle in oracles(512)} == {0, 128, 256}


def test_presets_that_do_not_answer_densely_are_measured_by_their_names() -> None:
    assert {one.preset: one.policy for one in presets()} == {
        name: preset.attention for name, preset in PRESETS.items() if not preset.attention.answers_densely
    }


def test_asked_for_by_name_or_as_json() -> None:
    found = list(asked_for(["balanced", {"decode": {"policy": "quest", "budget": 512}}]))
    assert [(one.name, one.preset) for one in found] == [("lowbit_top_p", "balanced"), ("quest", None)]
    with pytest.raises(PolicyError, match="swift is none of the presets"):
        list(asked_for(["swift"]))


def test_parameters_tell_both_phases_and_early_termination() -> None:
    policy = {"decode": {"policy": "tactic", "p": 0.75}, "prefill": {"policy": "quoka"}, "early_termination": {}}
    [measured] = asked_for([policy])
    parameters = measured.parameters()
    assert (measured.name, measured.p, measured.is_prefill) == ("tactic", 0.75, False)
    assert parameters["p"] == 0.75
    assert parameters["prefill"]["policy"] == "quoka"
    assert parameters["early_termination"]["patience"] == 4
    [prefill] = asked_for([{"prefill": {"policy": "quoka", "budget_ratio": 0.25}}])
    assert (prefill.name, prefill.p, prefill.is_prefill) == ("quoka", None, True)
    assert prefill.parameters()["budget_ratio"] == 0.25
    assert "decode" not in prefill.parameters()


def test_delta_gets_its_layers_and_equal_policies_are_one() -> None:
    wanted = list(asked_for([{"decode": {"policy": "delta"}}]))
    assert full_layers_of_delta(wanted) == 2
    [found] = checked([*wanted, *wanted], 30, 8192, (2, 9, 12))
    assert full_layers_of_delta([found]) is None
    assert found.parameters()["delta_layers"] == [2, 9, 12]
    with pytest.raises(PolicyError, match="delta_layers"):
        checked(wanted, 30, 8192, None)
