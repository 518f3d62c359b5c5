"""What is measured when nothing, presets or policies are asked for."""

from __future__ import annotations

import pytest

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
    policies = sweep(32_768)
    assert {policy.decode.policy for policy in policies} == {*DECODE_POLICIES}
    assert len({policy.canonical() for policy in policies}) == len(policies)
    assert {getattr(policy.decode, "budget", None) for policy in policies} >= {256, 512, 1024, 2048}
    measured = [Measured(policy) for policy in policies]
    assert len({(one.name, repr(one.parameters())) for one in measured}) == len(measured)
    assert sum(one.is_prefill for one in measured) == 4


def test_budgets_that_cover_the_context_are_left_out() -> None:
    budgets = {policy.decode.budget for policy in sweep(512) if policy.decode.policy == "quest"}
    assert budgets == {256}
    assert {oracle.parameters().get("budget", 0) for oracle in oracles(512)} == {0, 256}


def test_presets_that_are_not_dense_are_measured_by_their_names() -> None:
    assert {one.preset: one.policy for one in presets()} == {
        name: preset.attention for name, preset in PRESETS.items() if not preset.attention.is_dense
    }


def test_asked_for_by_name_or_as_json() -> None:
    found = list(asked_for(["balanced", {"decode": {"policy": "quest", "budget": 512}}]))
    assert [(one.name, one.preset) for one in found] == [("tactic", "balanced"), ("quest", None)]
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
