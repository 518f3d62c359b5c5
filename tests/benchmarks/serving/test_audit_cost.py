"""How the benchmark of audits takes turns between its servers. Nothing is timed, no server started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks.serving.audit_cost import COMPARED_SHARES, SHARES, WITHOUT, measure, ways
from benchmarks.serving.batch_timing import Stream
from benchmarks.serving.serve import Cell, Plan
from winnow_kernels.policies.attention_policy import parse_policy

DECODE = {"policy": "quest", "budget": 512}
ROUNDS = 3


class Server:
    """Takes longer for each token the more of them are audited, and longer in every next round."""

    def __init__(self, asked: list[tuple[bool, int, Any]], audits: bool) -> None:
        self.asked, self.audits = asked, audits

    def cache_tokens(self) -> int:
        return 1000

    def ask(
        self, prompts: Sequence[Sequence[int]], tokens: int, policies: Sequence[Mapping[str, Any] | None]
    ) -> list[Stream]:
        [policy] = {parse_policy(each or {}).canonical() for each in policies}
        share = parse_policy(policy).audit_share or 0.0
        self.asked.append((self.audits, tokens, parse_policy(policy).audit))
        seconds = 0.01 * (1 + share) + 0.001 * len(self.asked)
        arrivals = [(seconds * token, token) for token in range(1, tokens + 1)]
        return [Stream(0.0, arrivals, 0, {})] * len(prompts)


def test_every_way_has_its_turn_in_every_round() -> None:
    asked: list[tuple[bool, int, Any]] = []
    servers: Any = {audits: Server(asked, audits) for audits in (True, False)}
    every = ways(DECODE)
    plan = Plan("Llama-3.1-8B", [Cell(64, 2)], [], 16, 1, fresh=False, seed=0)
    found = list(measure(servers, every, plan, 1000, ROUNDS))
    turns = [asked[begin : begin + len(every)] for begin in range(0, len(asked), len(every))]
    assert len(turns) == ROUNDS + 1
    for turn in turns:
        assert [(audits, audit) for audits, _, audit in turn] == [(a, audit) for a, _, audit in turns[0]]
    # What is not counted has short answers.
    assert [turn[0][1] < plan.output_tokens for turn in turns] == [True] + [False] * ROUNDS
    for place, each in enumerate(found):
        assert each.contestant is every[place].contestant
        # The median is of the second counted round.
        share = parse_policy(every[place].contestant.policy or {}).audit_share or 0.0
        assert each.timing.mean_tpot == pytest.approx(0.01 * (1 + share) + 0.001 * (2 * len(every) + place + 1))


def test_only_the_plain_policy_is_asked_of_the_server_without_audits() -> None:
    of = {each.contestant.name: each for each in ways(DECODE)}
    assert [name for name, each in of.items() if not each.audits] == [f"quest, {WITHOUT}"]
    assert of["quest"].contestant.policy == of[f"quest, {WITHOUT}"].contestant.policy
    policies = [parse_policy(each.contestant.policy or {}) for each in of.values()]
    assert [policy.audit_share for policy in policies if policy.audits_next_token] == list(COMPARED_SHARES)
    assert [policy.audit for policy in policies[2 : 2 + len(SHARES)]] == list(SHARES)
