"""Audited decode steps: shares and errors are those that float64 finds in the same cache, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_winnow import left_policies, request_policy
from sglang_winnow.answer import answer
from sglang_winnow.audit_share import ENVIRONMENT, audited_share, first_offset, server_share
from sglang_winnow.auditing import audited_rows, keep_time
from sglang_winnow.decode_plan import DecodePlan
from sglang_winnow.left_policies import LeftPolicies
from sglang_winnow.quality_choice import Choice, choose
from sglang_winnow.reporting import _note_audit
from sglang_winnow.request_state import RequestState
from tests.kernels.attention_float64 import attend_head
from tests.kernels.caches import random_cache, random_softmax
from tests.profiles import curve
from tests.sglang_ext.test_plans import CPU, DIM, GROUP, KV_HEADS, LAYERS, PAGE_SIZE, SCALE, SLOTS, Pass
from winnow_kernels.attend.reference import Attended, attend
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode import step
from winnow_kernels.decode.audit import is_audited
from winnow_kernels.decode.statistics import Field
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.attention_policy import parse_policy
from winnow_kernels.policies.lowbit_top_p.reference import LowBitTopPStep
from winnow_kernels.policies.quality import Quality
from winnow_kernels.selection.tokens import Selection

LENGTHS = [150, 163, 240, 301]
SEEDS = 50
POLICIES: dict[str, dict[str, Any]] = {
    "streaming_llm": {"window": 32},
    "quoka": {"budget": 48},
    "sparq": {"budget": 48, "channels": 8},
    "lowbit_top_k": {"budget": 96},
    "lowbit_top_p": {"p": 0.5},
}


@pytest.fixture(autouse=True)
def _every_length_is_sparse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(request_policy, "crossover_tokens", lambda _policy: 0)
    server_share.cache_clear()
    yield
    server_share.cache_clear()


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[Selection]:
    """What is selected from now on, a layer's after another's."""
    seen: list[Selection] = []

    def attend_and_note(queries: Tensor, cache: Any, selection: Selection, *others: Any) -> Attended:
        seen.append(selection)
        return attend(queries, cache, selection, *others)

    monkeypatch.setattr(step, "attend", attend_and_note)
    return seen


def _decode(own: Pass) -> list[Tensor]:
    plan = DecodePlan(own.context, own.lengths, own.rows, own.states, SCALE, own.indexes, own.statistics)
    outputs = [
        plan.attend(layer, own.queries(len(own.lengths), layer), cache, SCALE, None)
        for layer, cache in enumerate(own.indexes.caches)
    ]
    plan.finish()
    return outputs


def _pass(policy: dict[str, Any], seed: int) -> Pass:
    own = Pass(LENGTHS, [policy] * len(LENGTHS))
    # Shares are of the tokens' mass alone, errors of outputs with sinks.
    softmax = random_softmax("cap and sinks" if seed % 2 else "plain", KV_HEADS * GROUP, seed)
    caches = [
        replace(random_cache(SLOTS, KV_HEADS, DIM, 10 * seed + layer), softmax=softmax) for layer in range(LAYERS)
    ]
    own.indexes = Indexes(caches, PAGE_SIZE, CPU)
    return own


def attended_by(cache: LayerCache, head: int, queries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    softmax = cache.softmax
    sinks = None if softmax.sink_logits is None else softmax.sink_logits.unflatten(0, (KV_HEADS, GROUP))[head]
    return attend_head(queries, cache.keys[slots, head], cache.values[slots, head], SCALE, softmax.cap, sinks)


@pytest.mark.parametrize("name", POLICIES)
def test_shares_and_errors_are_those_of_float64(name: str, selections: list[Selection]) -> None:
    """A thousand steps in all."""
    decode = {"policy": name, **POLICIES[name]}
    p = decode.get("p")
    for seed in range(SEEDS):
        own = _pass({"decode": decode, "audit": 1.0}, seed)
        selections.clear()
        outputs = _decode(own)
        assert len(selections) == LAYERS
        for row, length in enumerate(LENGTHS):
            shares, errors = [], []
            slots = own.context.slots[row, :length]
            for layer, cache in enumerate(own.indexes.caches):
                grouped = own.queries(len(LENGTHS), layer)[row].unflatten(0, (KV_HEADS, GROUP))
                for head in range(KV_HEADS):
                    chosen = selections[layer].slots[row, head, : int(selections[layer].counts[row, head])]
                    whole, all_mass = attended_by(cache, head, grouped[head], slots)
                    _, mass = attended_by(cache, head, grouped[head], chosen)
                    found = outputs[layer][row].unflatten(0, (KV_HEADS, GROUP))[head]
                    shares += (mass - all_mass).exp().tolist()
                    errors += ((found - whole).norm(dim=-1) / whole.norm(dim=-1)).tolist()
            told = own.statistics.rows[own.rows[row]]
            assert float(told[Field.AUDITED_STEPS]) == 1
            assert float(told[Field.AUDITED_HEADS]) == len(shares) == LAYERS * KV_HEADS * GROUP
            assert float(told[Field.AUDITED_SHARE]) == pytest.approx(sum(shares), rel=1e-5)
            assert float(told[Field.AUDITED_ERROR]) == pytest.approx(sum(errors), rel=1e-4)
            reached = 0 if p is None else sum(share >= p for share in shares)
            assert float(told[Field.AUDITED_REACHED]) == reached


@pytest.mark.parametrize(
    "decode",
    [
        *({"policy": name, **fields} for name, fields in POLICIES.items()),
        {"policy": "quest", "budget": 48, "full_layers": 1},
        {"policy": "delta", "budget": 48, "recency": 16, "full_layers": 1, "delta_layers": [1]},
        {"policy": "tactic", "p": 0.5, "full_layers": 1},
    ],
    ids=lambda decode: str(decode["policy"]),
)
@pytest.mark.parametrize("early_termination", [None, {"scale": 0.5, "direction": 0.5, "patience": 1}])
def test_nothing_else_changes(decode: dict[str, Any], early_termination: dict[str, Any] | None) -> None:
    policy = {"decode": decode} | ({} if early_termination is None else {"early_termination": early_termination})
    plain, audited = _pass(policy, 1), _pass(policy | {"audit": 1.0}, 1)
    for one, other in zip(_decode(plain), _decode(audited), strict=True):
        assert torch.equal(one, other)
    beside = [field for field in Field if not field.name.startswith("AUDITED")]
    assert torch.equal(plain.statistics.rows[:, beside], audited.statistics.rows[:, beside])
    told = audited.statistics.rows[audited.rows]
    assert torch.equal(told[:, Field.AUDITED_STEPS], torch.ones(len(LENGTHS), dtype=torch.float64))
    shares = told[:, Field.AUDITED_SHARE] / told[:, Field.AUDITED_HEADS]
    # Of the shorter contexts tactic reads everything.
    assert bool(((shares > 0) & (shares <= 1)).all())
    assert float(shares.min()) < 0.95
    assert float(told[:, Field.AUDITED_ERROR].max()) > 0.01
    assert plain.told(Field.AUDITED_STEPS) == [0] * len(LENGTHS)


@pytest.mark.parametrize(
    "policies",
    [
        [{"policy": "quest", "budget": 48, "full_layers": count} for count in (0, 1, 2, 1)],
        [
            {"policy": "delta", "budget": 48, "recency": 16, "full_layers": 0, "delta_layers": layers}
            for layers in ([0], [1], [0, 2], [0, 1])
        ],
    ],
    ids=["quest", "delta"],
)
def test_rows_that_attend_otherwise_than_others_are_audited_as_alone(policies: list[dict[str, Any]]) -> None:
    together = Pass(LENGTHS, [{"decode": decode, "audit": 1.0} for decode in policies])
    _decode(together)
    for row, decode in enumerate(policies):
        alone = Pass(LENGTHS, [{"decode": decode, "audit": 1.0}] * len(LENGTHS))
        _decode(alone)
        for field in (Field.AUDITED_SHARE, Field.AUDITED_ERROR, Field.DECODE_ATTENDED):
            assert together.told(field)[row] == pytest.approx(alone.told(field)[row], rel=1e-5)
        heads = together.told(Field.AUDITED_HEADS)[row]
        assert together.told(Field.AUDITED_SHARE)[row] < 0.95 * heads


def test_requests_of_one_batch_are_audited_each_by_its_own_share() -> None:
    policies = [{"decode": {"policy": "quoka", "budget": 48}, "audit": share} for share in (0.0, 1.0, 0.0, 1.0)]
    own = Pass(LENGTHS, policies)
    _decode(own)
    assert own.told(Field.AUDITED_STEPS) == [0, 1, 0, 1]


def test_dense_steps_are_not_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_policy, "crossover_tokens", lambda _policy: 200)
    own = Pass(LENGTHS, [{"decode": {"policy": "quoka", "budget": 48}, "audit": 1.0}] * 3 + [{"audit": 1.0}])
    _decode(own)
    assert own.told(Field.AUDITED_STEPS) == [0, 0, 1, 0]


@given(share=st.floats(0, 1), steps=st.integers(1, 400), request=st.text(max_size=8))
def test_as_many_steps_are_audited_as_asked_for(share: float, steps: int, request: str) -> None:
    offset = first_offset(request)
    audited = sum(is_audited(offset + number, share) for number in range(1, steps + 1))
    assert math.floor(steps * Fraction(share)) <= audited <= math.ceil(steps * Fraction(share))


@given(shares=st.lists(st.sampled_from([0.01, 0.02, 0.05, 0.1, 0.5, 1.0]), min_size=2, max_size=5), drawn=st.data())
def test_requests_that_decode_together_are_audited_in_the_same_steps(shares: list[float], drawn: st.DataObject) -> None:
    """Whenever each has begun, one with a tenth of another's share is audited only where the other is."""
    begin = [drawn.draw(st.integers(0, 60)) for _ in shares]
    streaming = {"policy": "streaming_llm", "window": 32}
    states = [
        RequestState(
            parse_policy({"decode": streaming, "audit": share}),
            prompt_length=500 * number,
            audit_offset=drawn.draw(st.integers(0, 2**32 - 1)),
        )
        for number, share in enumerate(shares, 1)
    ]
    audits = [0] * len(shares)
    for number in range(1, 361):
        running = [at for at, first in enumerate(begin) if first < number]
        rows = [states[at] for at in running]
        lengths = [states[at].prompt_length + number - begin[at] for at in running]
        keep_time(rows, lengths)
        audited = {running[row.row] for row in audited_rows(rows, lengths, 16)}
        for at in audited:
            audits[at] += 1
            assert all(other in audited for other in running if (shares[other] / shares[at]).is_integer())
    for share, first, count in zip(shares, begin, audits, strict=True):
        assert abs(count - share * (360 - first)) <= 1


def test_a_request_whose_batch_has_no_other_audits_keeps_its_own_time() -> None:
    asking, dense = parse_policy({"decode": {"policy": "quest"}, "audit": 0.01}), parse_policy({})
    alone = RequestState(asking, 100, audit_offset=7)
    keep_time([None, alone, RequestState(dense, 50, audit_offset=3)], [9, 101, 80])
    assert alone.audit_offset == 7
    # One that comes back after a retraction keeps it, too.
    later = RequestState(asking, 100, audit_offset=12)
    keep_time([alone, later], [150, 120])
    assert (alone.audit_offset, later.audit_offset) == (7, 12)


def test_a_request_may_ask_for_another_share_than_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    quest = parse_policy({"decode": {"policy": "quest"}})
    asking = parse_policy({"decode": {"policy": "quest"}, "audit": 0})
    assert audited_share(quest) == 0
    server_share.cache_clear()
    monkeypatch.setenv(ENVIRONMENT, "0.25")
    assert (audited_share(quest), audited_share(asking)) == (0.25, 0)
    assert audited_share(parse_policy({})) == 0
    assert audited_share(parse_policy({"decode": {"policy": "snapkv", "release": True}})) == 0
    assert audited_share(parse_policy({"decode": {"policy": "quest"}, "verify": {}})) == 0


@pytest.mark.parametrize("text", ["", "2", "-0.1", "nan", "some"])
def test_a_share_of_the_server_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(ValueError, match=f"{ENVIRONMENT}: must be a share of decode steps from 0 to 1; it is {text}"):
        server_share()


def test_auditing_changes_no_namespace() -> None:
    kept = {"decode": {"policy": "quest"}, "keep": True}
    for audit in (0.5, {"share": 0.5, "kl": True}):
        assert parse_policy(kept).namespace() == parse_policy({**kept, "audit": audit}).namespace()


def test_a_share_is_the_same_in_either_form() -> None:
    """So runtimes that know numbers alone serve it."""
    quest = {"decode": {"policy": "quest"}}
    number = parse_policy(quest | {"audit": 0.5})
    for audit in ({"share": 0.5}, {"share": 0.5, "kl": False}):
        assert parse_policy(quest | {"audit": audit}).canonical() == number.canonical()
    compared = parse_policy(quest | {"audit": {"share": 0.5, "kl": True}})
    assert parse_policy(compared.canonical()) == compared != number
    assert compared.audit_share == number.audit_share == audited_share(compared) == 0.5
    assert (compared.audits_next_token, number.audits_next_token) == (True, False)


def test_the_answer_tells_what_was_audited() -> None:
    own = _pass({"decode": {"policy": "lowbit_top_p", "p": 0.5}, "audit": 1.0}, 3)
    _decode(own)
    [policy] = {state.policy for state in own.states}
    told = answer(own.statistics.rows[1], policy, 0, 0, 0, 0, 0, 0, 1.0)["audit"]
    assert (told["steps"], told["p"]) == (1, 0.5)
    assert 0.5 < told["true_share"] < 1
    assert 0 < told["output_error"] < 1
    assert 0 < told["reached"] <= 1
    assert answer(own.statistics.rows[1], policy, 0, 0, 0, 0, 0, 0, 0.0)["audit"] is None
    nothing = answer(torch.zeros(len(Field), dtype=torch.float64), policy, 0, 0, 0, 0, 0, 0, 0.01)["audit"]
    assert nothing == {
        "steps": 0,
        "true_share": None,
        "output_error": None,
        "p": 0.5,
        "reached": None,
        "next_token_kl": None,
        "top1": None,
    }


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_selector_that_takes_what_it_should_leave_is_left(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[dict[str, Any]] = [
        {"decode": {"policy": "lowbit_top_p", "p": 0.9}},
        {"decode": {"policy": "lowbit_top_k", "budget": 96}},
    ]
    at = dict.fromkeys((100, 400), (0.01, 0.98, 0.2))
    curves = [curve(policies[0], at, true_share=0.9), curve(policies[1], dict.fromkeys(at, (0.01, 0.98, 0.4)))]
    watched = LeftPolicies()
    monkeypatch.setattr(left_policies, "LEFT", watched)
    if is_broken:
        sound = LowBitTopPStep.chosen
        monkeypatch.setattr(LowBitTopPStep, "chosen", lambda *arguments: ~sound(*arguments))

    def chosen() -> Choice:
        anywhere: dict[str, Any] = {"cached": lambda _: 0, "dense_until": lambda _: 0}
        return choose(Quality(), 200, curves, list(at), default_kl=0.02, left=watched.find, **anywhere)

    first = chosen()
    assert first.policy == parse_policy(policies[0])
    for seed in range(0, 20, 2):
        own = _pass(policies[0] | {"audit": 1.0}, seed)
        _decode(own)
        for row in own.statistics.rows[own.rows]:
            _note_audit(row, first)
    assert chosen().policy == parse_policy(policies[int(is_broken)])
    assert [left.policy for left in chosen().left] == [parse_policy(policies[0])] * is_broken
