"""Low-bit policies for many tokens at once, beside the steps of their reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.evaluation.fidelity.conftest import MEMORY, decode_policy
from tests.evaluation.fidelity.test_forcing import assert_alike, assert_as_many
from winnow_evaluation.fidelity.coded import is_at_once, reads_codes
from winnow_evaluation.fidelity.forcing import Forcing
from winnow_evaluation.fidelity.prefilled import PAGE_SIZE, PrefilledBatch
from winnow_kernels.indexes.key_codes import BITS, KeyCodes

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("lowbit_top_p", {"p": 0.5}),
    ("lowbit_top_p", {"p": 0.9, "sinks": 0}),
    ("lowbit_top_p", {"p": 0.02}),
    ("lowbit_top_k", {"budget": 100}),
    ("lowbit_top_k", {"budget": 120, "sinks": 0}),
    ("lowbit_top_k", {"budget": 64}),
    ("lowbit_top_k", {"budget_ratio": 0.6}),
    ("lowbit_top_k", {"budget": 190}),
    ("lowbit_top_k", {"budget": 130, "sinks": 20}),
]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("name", "parameters"), POLICIES)
def test_all_at_once_is_as_the_steps(name: str, parameters: dict[str, Any], bits: int, forcing: Forcing) -> None:
    policy = decode_policy(name, parameters)
    assert is_at_once(policy)
    with torch.inference_mode():
        at_once = forcing.policy(policy, bits=bits)
        # The index is now that of these bits.
        assert_alike(at_once, forcing.steps(policy))
        assert_alike(at_once, forcing.policy(policy, bits=bits, block=7))
    assert (at_once.counts["attended"] <= at_once.counts["context"]).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "parameters", [{"budget": 48}, {"budget": 96, "sinks": 0}, {"budget_ratio": 0.4}, {"budget": 190}]
)
def test_cosines_all_at_once_are_as_the_steps(parameters: dict[str, Any], bits: int, forcing: Forcing) -> None:
    policy = decode_policy("quoka", parameters)
    assert is_at_once(policy)
    with torch.inference_mode():
        at_once = forcing.policy(policy, bits=bits)
        assert_as_many(at_once, forcing.steps(policy), 1e-4)
        assert_as_many(at_once, forcing.policy(policy, bits=bits, block=7), 1e-4)


@pytest.mark.parametrize("stops", [{"scale": 1.0, "direction": 2.0, "patience": 1}, {"patience": 100}])
@pytest.mark.parametrize(("name", "parameters"), POLICIES)
def test_early_termination_all_at_once_is_as_the_steps(
    name: str, parameters: dict[str, Any], stops: dict[str, Any], forcing: Forcing
) -> None:
    policy = decode_policy(name, parameters, early_termination=stops)
    assert is_at_once(policy)
    with torch.inference_mode():
        at_once = forcing.policy(policy)
        assert_alike(at_once, forcing.steps(policy))
    # It takes a third tile to stop, which most selections do not have.
    stopped = stops["patience"] == 1 and "p" in parameters and parameters["p"] == 0.9
    assert bool(at_once.counts["terminated"].any()) >= stopped
    assert stops["patience"] == 1 or not at_once.counts["terminated"].any()


@pytest.mark.parametrize(
    "policy",
    [
        decode_policy("lowbit_top_p", {"min_tokens": 100}),
        decode_policy("lowbit_top_p", {"max_tokens": 100}),
        decode_policy("lowbit_top_p", {"p": 1.0}),
        decode_policy("quoka", {"budget": 96}, early_termination={}),
        decode_policy("quest", {"budget": 96}),
    ],
)
def test_other_policies_take_steps(policy: Any) -> None:
    assert not is_at_once(policy)
    assert reads_codes(policy) == (policy.decode.policy != "quest")


def test_more_bits_are_nearer_to_the_oracle(batch: PrefilledBatch, following: Tensor) -> None:
    forcing = Forcing(batch, following[:, :-1], MEMORY)
    policy = decode_policy("lowbit_top_p", {"p": 0.7})
    with torch.inference_mode():
        errors = []
        for bits in BITS:
            found = forcing.policy(policy, bits=bits)
            assert found.reported_share is not None
            errors.append(float((found.reported_share - found.true_share.mean(-1)).abs().mean()))
    assert errors[0] > errors[1] > errors[2]


def test_codes_are_of_the_continuation_that_is_being_forced(batch: PrefilledBatch, following: Tensor) -> None:
    # The page that the prompt began is full, and old enough to be looked up, when the answer is long.
    page = batch.lengths[0] // PAGE_SIZE
    built: list[Tensor] = []
    with torch.inference_mode():
        forcing = Forcing(batch, following[:, :-1], MEMORY)
        for bits in (2, 3, 2):
            forcing.policy(decode_policy("lowbit_top_k", {"budget": 96 if built else 120}), bits=bits)
            fresh = KeyCodes(batch.caches, batch.indexes.generations, bits=bits)
            fresh.ensure(torch.tensor([page]))
            assert torch.equal(batch.indexes[KeyCodes].codes[:, page], fresh.codes[:, page])
            built.append(batch.indexes[KeyCodes].codes[1, page].clone())
    assert not torch.equal(built[0], built[2])
