"""Which rows stand on the frontier of fidelity."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fidelity.frontier import better, described, dominating, rows_of
from tests.evaluation.fidelity.test_record import record, row
from winnow_kernels.policies.attention_policy import parse_policy

FLOOR = row(policy="dense", parameters={"prompts_at_once": 1}, kl=0.002, kv_read_ratio=1.0)
OWN = row(policy="lowbit_top_p", parameters={"p": 0.9}, kl=0.01, kv_read_ratio=0.2)


@pytest.mark.parametrize(
    ("other", "is_better"),
    [
        ({"kl": 0.007, "kv_read_ratio": 0.1}, True),
        ({"kl": 0.001, "kv_read_ratio": 0.2}, True),
        # Within the floor; more is read.
        ({"kl": 0.009, "kv_read_ratio": 0.1}, False),
        ({"kl": 0.001, "kv_read_ratio": 0.3}, False),
        # Elsewhere, after another prefill, by the same scores, or of a policy that cannot be had.
        ({"kl": 0.001, "kv_read_ratio": 0.1, "context": 4096}, False),
        ({"kl": 0.001, "kv_read_ratio": 0.1, "model": "n"}, False),
        ({"kl": 0.001, "kv_read_ratio": 0.1, "phase": "prefill"}, False),
        ({"kl": 0.001, "kv_read_ratio": 0.1, "parameters": {"prefill": {"policy": "quoka"}}}, False),
        ({"kl": 0.001, "kv_read_ratio": 0.1, "policy": "lowbit_top_p", "parameters": {"p": 0.5}}, False),
        ({"kl": 0.001, "kv_read_ratio": 0.1, "policy": "lowbit_top_k"}, False),
        ({"kl": 0.001, "kv_read_ratio": 0.1, "policy": "oracle_top_p"}, False),
    ],
)
def test_what_is_better(other: dict[str, Any], is_better: bool) -> None:
    found = list(better(record("gpu", FLOOR, OWN, row(**other)), OWN))
    assert [one["kl"] for one in found] == ([other["kl"]] if is_better else [])


@pytest.mark.parametrize(("kl", "is_better"), [(0.003, True), (0.007, False)])
def test_what_is_better_than_other_prompts_might_give(kl: float, is_better: bool) -> None:
    own = OWN | {"intervals": {"kl": [0.006, 0.03]}}
    other = row(kl=kl, kv_read_ratio=0.1)
    assert (list(better(record("gpu", FLOOR, own, other), own)) == [other]) is is_better


def test_without_a_floor_there_is_no_frontier() -> None:
    with pytest.raises(ValueError, match="m, 2,048 tokens: dense attention was not measured once more"):
        list(better(record("gpu", OWN), OWN))


def test_the_rows_of_a_policy_are_those_of_its_presets_too_with_the_default_bits() -> None:
    policy = parse_policy({"decode": {"policy": "lowbit_top_p", "p": 0.9}})
    parameters = {"sinks": 16, "p": 0.9, "min_tokens": 0, "bits": 2}
    rows = [row(policy="lowbit_top_p", parameters=parameters | {"bits": bits}) for bits in (2, 3)]
    rows += [row(policy="lowbit_top_p", parameters=parameters | {"p": 0.5})]
    rows += [row(policy="lowbit_top_p", parameters=parameters, preset="balanced", context=4096)]
    assert [(one["context"], one["parameters"]["bits"]) for one in rows_of(record("gpu", *rows), policy)] == [
        (2048, 2),
        (4096, 2),
    ]
    assert described(OWN) == "m, 2,048 tokens: lowbit_top_p {'p': 0.9}: KL 0.0100, 20.0 % read"


@pytest.mark.parametrize(
    ("short", "long", "dominates"),
    [
        # Better at both contexts; at one, and as good at the other; within the floor at both.
        ((0.001, 0.1), (0.001, 0.1), True),
        ((0.001, 0.1), (0.011, 0.2), True),
        ((0.009, 0.1), (0.009, 0.1), False),
        # Worse at one: more is lost, or read, or nobody knows.
        ((0.001, 0.1), (0.013, 0.1), False),
        ((0.001, 0.1), (0.001, 0.3), False),
        ((0.001, 0.1), None, False),
    ],
)
def test_what_dominates(short: tuple[float, float], long: tuple[float, float] | None, dominates: bool) -> None:
    policy = parse_policy({"decode": {"policy": "lowbit_top_p"}})
    own = OWN | {"parameters": {"sinks": 16, "p": 0.9, "min_tokens": 0, "bits": 2}}
    rows = [row(**(each | {"context": context})) for context in (4096, 8192) for each in (FLOOR, own)]
    for context, figures in ((4096, short), (8192, long)):
        if figures is not None:
            kl, ratio = figures
            rows.append(row(policy="lowbit_top_k", context=context, kl=kl, kv_read_ratio=ratio))
    assert dominating(record("gpu", *rows), policy) == (['lowbit_top_k {"budget": 512}'] if dominates else [])
