"""The policy contract."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.policy_rows import DRAFTS_ONLY, ROWS
from tests.policy_strategies import json_values, mutated_policies, valid_policies
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.contract.fields import MAX_MESSAGE_CHARACTERS, MAX_TOKENS, PolicyError
from winnow_kernels.indexes.clusters import SPAN, clustered_until, piece_of
from winnow_kernels.policies.attention_policy import (
    MAX_POLICY_BYTES,
    AttentionPolicy,
    check_against_model,
    json_schema,
    parse_policy,
)
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.dense.parameters import Dense
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES
from winnow_kernels.policies.snapkv.parameters import SnapKV
from winnow_kernels.policies.tactic.parameters import TACTIC_CAP_WARNING, TACTIC_TAIL_TOKENS, Tactic

NAMES = ", ".join(DECODE_POLICIES)


def refusal(policy: Any) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        parse_policy(policy)
    return caught.value


def parsed_or_refused(policy: Any) -> AttentionPolicy | PolicyError:
    try:
        return parse_policy(policy)
    except PolicyError as error:
        return error


def assert_plain(error: PolicyError) -> None:
    assert str(error) == f"{error.path}: {error.problem}"
    assert error.path.split(".")[0] == "attention"
    assert str(error).isascii()
    assert str(error).isprintable()
    assert len(str(error)) < MAX_MESSAGE_CHARACTERS


def decode(**fields: Any) -> dict[str, Any]:
    return {"decode": fields}


def prefill(**fields: Any) -> dict[str, Any]:
    return {"prefill": {"policy": "quoka", **fields}}


@pytest.mark.parametrize("name", DECODE_POLICIES)
def test_defaults_of_decode_policies(name: str) -> None:
    verify: dict[str, Any] = {"verify": {}} if name in DRAFTS_ONLY else {}
    policy = parse_policy({**decode(policy=name), **verify})
    expected = {"decode": {"policy": name, **ROWS[name].defaults}, "prefill": {"policy": "dense"}}
    expected |= {"verify": {"draft_tokens": 4}} if verify else {}
    assert json.loads(policy.canonical()) == expected


def test_defaults_of_everything_else() -> None:
    policy = parse_policy({"prefill": {"policy": "quoka"}, "early_termination": {}})
    assert json.loads(policy.canonical()) == {
        "decode": {"policy": "dense"},
        "prefill": {
            "policy": "quoka",
            "sinks": 16,
            "budget": 1024,
            "block": 128,
            "queries": 64,
            "dense_prefix": 0,
            "recency_ratio": 0.5,
        },
        "early_termination": {"scale": 0.03, "direction": 0.01, "patience": 4},
    }
    assert PREFILL_POLICIES == ("dense", "quoka")
    assert parse_policy({}) == AttentionPolicy()


@pytest.mark.parametrize(("block", "queries"), [(64, 32), (128, 64), (256, 128), (512, 256)])
def test_a_block_is_represented_by_half_of_its_queries(block: int, queries: int) -> None:
    assert QuokaPrefill(block=block).queries == queries
    assert QuokaPrefill(block=block, queries=5).queries == 5


def test_a_ratio_takes_the_place_of_the_default_budget() -> None:
    assert (SnapKV(budget_ratio=0.25).budget, SnapKV(budget_ratio=0.25).budget_ratio) == (None, 0.25)
    assert (SnapKV().budget, SnapKV().budget_ratio) == (1024, None)


@given(valid_policies)
def test_valid_policies_survive_the_way_to_the_runtime(given_policy: dict[str, Any]) -> None:
    policy = parse_policy(given_policy)
    assert parse_policy(json.dumps(given_policy)) == policy
    text = policy.canonical()
    again = parse_policy(text)
    assert again == policy
    assert again.canonical() == text
    assert again.fingerprint() == policy.fingerprint()
    assert again.namespace() == policy.namespace()
    assert text.isascii()
    assert len(text) < MAX_POLICY_BYTES
    assert policy.keep == given_policy.pop("keep", False)
    for phase, members in given_policy.items():
        for name, value in (members or {}).items():
            assert getattr(getattr(policy, phase), name) == (tuple(value) if isinstance(value, list) else value)


@given(valid_policies, st.randoms(use_true_random=False))
def test_the_order_of_fields_and_given_defaults_change_no_fingerprint(policy: dict[str, Any], random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = list(value)
        random.shuffle(names)
        return {name: shuffled(value[name]) for name in names}

    parsed = parse_policy(policy)
    spelt_out = json.loads(parsed.canonical())
    assert parse_policy(shuffled(spelt_out)).fingerprint() == parsed.fingerprint()


@given(valid_policies, valid_policies)
def test_fingerprints_and_namespaces_tell_policies_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = parse_policy(one), parse_policy(other)
    assert (first.fingerprint() == second.fingerprint()) == (first == second)
    kept = first.keeps_sparse_answer or second.keeps_sparse_answer
    alike = first == second if kept else first.prefill == second.prefill
    assert (first.namespace() == second.namespace()) == alike


def test_an_answer_that_is_kept_is_in_a_namespace_of_all_that_computed_it() -> None:
    kept = [
        {**decode(policy="quest"), "keep": True},
        {**decode(policy="quest", budget=64), "keep": True},
        {**decode(policy="quest"), **prefill(), "keep": True},
        {**decode(policy="quest"), "early_termination": {}, "keep": True},
        {**prefill(), "keep": True},
    ]
    namespaces = {parse_policy(policy).namespace() for policy in (*kept, prefill(), decode(policy="quest"))}
    assert len(namespaces) == len(kept) + 2
    assert None in namespaces
    assert AttentionPolicy(keep=True).namespace() is None
    assert '"keep"' not in AttentionPolicy(decode=Quest()).canonical()
    assert '"keep":true' in parse_policy(kept[0]).canonical()


def test_the_canonical_form_is_what_other_programs_have_stored() -> None:
    policy = parse_policy({**decode(policy="tactic"), **prefill(), "early_termination": {"scale": 1}})
    assert policy.canonical() == (
        '{"decode":{"full_layers":2,"p":0.9,"policy":"tactic","sinks":16},'
        '"early_termination":{"direction":0.01,"patience":4,"scale":1.0},'
        '"prefill":{"block":128,"budget":1024,"dense_prefix":0,"policy":"quoka","queries":64,"recency_ratio":0.5,"sinks":16}}'
    )
    assert policy.fingerprint() == "e46fe58002c904d2"
    assert policy.namespace() == "winnow-5859d733e6209734"
    assert AttentionPolicy().namespace() is None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (decode(policy="quest", budget=15), "attention.decode.budget: must be greater than or equal to 16"),
        (
            decode(policy="quest", budget=MAX_TOKENS + 1),
            "attention.decode.budget: must be less than or equal to 1048576",
        ),
        (decode(policy="quest", budget=10**400), "attention.decode.budget: must be less than or equal to 1048576"),
        (decode(policy="quest", budget="32"), "attention.decode.budget: must be a valid integer"),
        (decode(policy="quest", budget=32.0), "attention.decode.budget: must be a valid integer"),
        (decode(policy="quest", budget=True), "attention.decode.budget: must be a valid integer"),
        (decode(policy="quest", budget=None), "attention.decode.budget: must be a valid integer"),
        (decode(policy="quest", full_layers=1025), "attention.decode.full_layers: must be less than or equal to 1024"),
        (decode(policy="quest", p=0.5), "attention.decode.p: unknown field; there are policy, sinks, budget, full_"),
        (decode(policy="quest", budget=31), "budget: must be at least 32: it holds 16 sinks and the newest page; it"),
        (decode(policy="quest", sinks=2033), "attention.decode.budget: must be at least 2049: it holds 2033 sinks"),
        (decode(policy="tactic", max_tokens=31), "attention.decode.max_tokens: must be at least 32: it holds 16 sinks"),
        (decode(policy="quoka", budget=19, sinks=4), "attention.decode.budget: must be at least 20: it holds 4 sinks"),
        (prefill(budget=31), "attention.prefill.budget: must be at least 32: it holds 16 sinks and the newest page"),
        (decode(policy="dense", sinks=4), "attention.decode.sinks: unknown field; there are policy"),
        (decode(policy="dense", budget=64), "attention.decode.budget: unknown field; there are policy"),
        (decode(policy="streaming_llm", sinks=-1), "attention.decode.sinks: must be greater than or equal to 0"),
        (decode(policy="streaming_llm", window=0), "attention.decode.window: must be greater than or equal to 16"),
        (decode(policy="snapkv", budget=64, budget_ratio=0.5), "attention.decode.budget: must not be given together"),
        (decode(policy="snapkv", budget=None), "attention.decode.budget: must be given when budget_ratio is not"),
        (decode(policy="snapkv", budget_ratio=0), "attention.decode.budget_ratio: must be greater than 0"),
        (decode(policy="snapkv", budget_ratio=1.1), "attention.decode.budget_ratio: must be less than or equal to 1"),
        (
            decode(policy="snapkv", budget=48),
            "attention.decode.observation_window: must be less than 32: the budget (48) also holds 16 sinks; it is 32",
        ),
        (
            decode(policy="pyramidkv", budget=64, observation_window=48),
            "attention.decode.observation_window: must be less than 48: the budget (64) also holds 16 sinks; it is 48",
        ),
        (decode(policy="snapkv", kernel_size=4), "attention.decode.kernel_size: must be odd"),
        (decode(policy="snapkv", kernel_size=65), "attention.decode.kernel_size: must be less than or equal to 63"),
        (prefill(recency_ratio=1.5), "attention.prefill.recency_ratio: must be less than or equal to 1"),
        (prefill(recency_ratio=-0.5), "attention.prefill.recency_ratio: must be greater than or equal to 0"),
        (decode(policy="delta", recency=15), "attention.decode.recency: must be greater than or equal to 16"),
        (
            decode(policy="delta", budget=143),
            "attention.decode.recency: must be at most 127: the budget (143) also holds 16 sinks; it is 128",
        ),
        (decode(policy="delta", delta_layers=[]), "attention.decode.delta_layers: must have at least 1 item"),
        (decode(policy="delta", delta_layers=list(range(2, 67))), "delta_layers: must have at most 64 items"),
        (decode(policy="delta", delta_layers=[4, 4]), "attention.decode.delta_layers: must be strictly increasing"),
        (decode(policy="delta", delta_layers=[1, 4]), "delta_layers: must be at least full_layers (2); the first is 1"),
        (decode(policy="delta", delta_layers=[2, 4.0]), "attention.decode.delta_layers.1: must be a valid integer"),
        (decode(policy="delta", delta_layers={"2": 1}), "attention.decode.delta_layers: must be a list"),
        (decode(policy="tactic", p=0), "attention.decode.p: must be greater than 0"),
        (decode(policy="tactic", p=1.01), "attention.decode.p: must be less than or equal to 1"),
        (decode(policy="tactic", p=float("nan")), "attention.decode.p: must be"),
        (decode(policy="tactic", p="0.5"), "attention.decode.p: must be a valid number"),
        (decode(policy="tactic", max_tokens=8), "attention.decode.max_tokens: must be greater than or equal to 16"),
        (decode(policy="full"), f"attention.decode.policy: must be one of {NAMES}"),
        (decode(policy=["dense"]), f"attention.decode.policy: must be one of {NAMES}"),
        (decode(budget=64), f"attention.decode.policy: must be one of {NAMES}"),
        ({"decode": None}, "attention.decode: must be an object"),
        ({"decode": "quest"}, "attention.decode: must be an object"),
        ({"prefill": {"policy": "tactic"}}, "attention.prefill.policy: must be one of dense, quoka"),
        (prefill(block=100), "attention.prefill.block: must be a multiple of 16"),
        (prefill(block=48), "attention.prefill.block: must be greater than or equal to 64"),
        (prefill(block=528), "attention.prefill.block: must be less than or equal to 512"),
        (prefill(block=64, queries=65), "attention.prefill.queries: must be at most the block (64)"),
        (prefill(queries=0), "attention.prefill.queries: must be greater than or equal to 1"),
        (prefill(dense_prefix=-1), "attention.prefill.dense_prefix: must be greater than or equal to 0"),
        ({"early_termination": True}, "attention.early_termination: must be an object"),
        ({"early_termination": {"scale": 0}}, "attention.early_termination.scale: must be greater than 0"),
        (
            {"early_termination": {"direction": 3}},
            "attention.early_termination.direction: must be less than or equal to 2",
        ),
        ({"early_termination": {"patience": 0}}, "attention.early_termination.patience: must be greater than or equal"),
        ({"early_termination": {"tiles": 1}}, "tiles: unknown field; there are scale, direction, patience"),
        (
            decode(policy="tactic", early_termination={}),
            "attention.decode.early_termination: unknown field; it belongs beside 'decode', not into it",
        ),
        (decode(policy="snapkv", p=1), "attention.decode.p: unknown field; there are policy, sinks, budget_ratio, "),
        ({"decod": {}}, "attention.decod: unknown field; there are decode, prefill, early_termination, verify, keep, "),
        ({"keep": "yes"}, "attention.keep: must be a valid boolean"),
        (
            {"verify": {}},
            "attention.verify: needs a sparse decode policy to draft with; decode.policy is dense",
        ),
        (
            {**decode(policy="quest"), **prefill(), "verify": {}},
            "attention.verify: needs a dense prefill: after a sparse one the answer would not be dense attention's",
        ),
        (
            {**decode(policy="quest"), "verify": {}, "keep": True},
            "attention.keep: must not be given together with verify, whose answer is kept for everybody",
        ),
        (
            {**decode(policy="snapkv", release=True), "verify": {}},
            "attention.verify: must not be given together with decode.release: a check reads the whole prompt",
        ),
        (
            {**decode(policy="pyramidkv", release=True), "keep": True},
            "attention.keep: must not be given together with decode.release: nothing of the prompt is kept",
        ),
        (
            {**decode(policy="quest"), "verify": {}, "audit": 0.5},
            "attention.audit: must not be given together with verify, which checks every token",
        ),
        (
            {**decode(policy="snapkv", release=True), "audit": 0.5},
            "attention.audit: must not be given together with decode.release: the rest of the prompt is gone",
        ),
        ({"audit": 1.5}, "attention.audit: must be less than or equal to 1"),
        ({"audit": "all"}, "attention.audit: must be "),
        ({"audit": True}, "attention.audit: must be a valid number"),
        ({"audit": {"kl": True}}, "attention.audit.share: must be given"),
        ({"audit": {"share": 1.5, "kl": True}}, "attention.audit.share: must be less than or equal to 1"),
        ({"audit": {"share": 0.5, "kl": 1}}, "attention.audit.kl: must be a valid boolean"),
        ({"audit": {"share": 0.5, "ppl": True}}, "attention.audit.ppl: unknown field; there are share, kl"),
        (
            {**decode(policy="quest"), "verify": {}, "audit": {"share": 0.5, "kl": True}},
            "attention.audit: must not be given together with verify, which checks every token",
        ),
        (
            {**decode(policy="snapkv", release=True), "audit": {"share": 0.5, "kl": True}},
            "attention.audit: must not be given together with decode.release: the rest of the prompt is gone",
        ),
        (decode(policy="snapkv", release=1), "attention.decode.release: must be a valid boolean"),
        (decode(policy="quest", release=True), "attention.decode.release: unknown field; there are policy, "),
        ({**decode(policy="quest"), "verify": True}, "attention.verify: must be an object"),
        (
            {**decode(policy="quest"), "verify": {"draft_tokens": 0}},
            "attention.verify.draft_tokens: must be a whole number from 1 to 16, or auto",
        ),
        (
            {**decode(policy="quest"), "verify": {"draft_tokens": 17}},
            "attention.verify.draft_tokens: must be a whole number from 1 to 16, or auto",
        ),
        (
            {**decode(policy="quest"), "verify": {"draft_tokens": "many"}},
            "attention.verify.draft_tokens: must be a whole number from 1 to 16, or auto",
        ),
        (
            {**decode(policy="quest"), "verify": {"drafts": 4}},
            "attention.verify.drafts: unknown field; there are draft_tokens",
        ),
        (decode(policy="quest", verify={}), "attention.decode.verify: unknown field; it belongs beside 'decode'"),
        (decode(policy="quest", keep=True), "attention.decode.keep: unknown field; it belongs beside 'decode'"),
        ([], "attention: must be an object"),
        (None, "attention: must be an object"),
        ("fast", "attention: must be an object such as"),
        ('"fast"', "attention: must be an object such as"),
        ("[1]", "attention: must be an object"),
        ("", "attention: must be a JSON object; this is not valid JSON (character 1)"),
        ('{"decode": }', "attention: must be a JSON object; this is not valid JSON (character 12)"),
        ('{"decode": NaN}', "attention: must be JSON, which has neither NaN nor Infinity"),
        ('{"decode": {}, "decode": {}}', "attention: has the field decode twice"),
        ('{"a": ' + "9" * 5000 + "}", "attention: must be a JSON object; this is not valid JSON"),
        ("[" * 60_000, "attention: is nested too deeply"),
        ("{" + " " * MAX_POLICY_BYTES + "}", "attention: must be at most 65536 bytes of JSON"),
        ('{"' + "é" * 40_000 + '": 1}', "attention: must be at most 65536 bytes of JSON"),
        ("\ud800", "attention: must be a JSON object"),
    ],
)
def test_a_refusal_names_the_field_and_the_bound(policy: Any, message: str) -> None:
    assert message in str(refusal(policy))


@pytest.mark.parametrize("name", ["x" * 10_000, "é" * 100, "\n\x1b[2J", "a.b", "\U0001f600" * 30, ""])
def test_a_refusal_is_short_and_plain_whatever_the_client_named(name: str) -> None:
    for policy in ({name: 1}, {"decode": {"policy": "quest", name: 1}}, {"decode": {"policy": name}}):
        error = refusal(policy)
        assert_plain(error)
        assert "unknown field; there are " in str(error) or "must be one of dense, " in str(error)


@given(mutated_policies() | json_values)
def test_whatever_is_sent_is_parsed_or_refused(sent: Any) -> None:
    for form in (sent, json.dumps(sent)):
        outcome = parsed_or_refused(form)
        if isinstance(outcome, AttentionPolicy):
            assert parse_policy(outcome.canonical()) == outcome
        else:
            assert_plain(outcome)


@given(st.text(st.characters(exclude_characters="{"), max_size=200))
def test_text_that_is_no_policy_is_refused(text: str) -> None:
    outcome = parsed_or_refused(text)
    assert isinstance(outcome, PolicyError)
    assert_plain(outcome)


def test_policies_are_values() -> None:
    with pytest.raises(ValidationError):
        AttentionPolicy().decode = Quest()  # type: ignore[misc]
    assert len({AttentionPolicy(decode=Quest()), AttentionPolicy(decode=Quest()), AttentionPolicy()}) == 2


def test_dense_is_dense_only_without_anything_else() -> None:
    assert AttentionPolicy().is_dense
    assert not AttentionPolicy(decode=Quest()).is_dense
    assert not AttentionPolicy(prefill=QuokaPrefill()).is_dense
    assert not AttentionPolicy(early_termination=EarlyTermination()).is_dense


def test_dense_with_early_termination_is_warned_about() -> None:
    [warning] = AttentionPolicy(decode=Dense(), early_termination=EarlyTermination()).warnings()
    assert "99.3 -> 78.7 at 32K" in warning
    assert warning.isascii()
    assert AttentionPolicy(decode=Tactic(), early_termination=EarlyTermination()).warnings() == []
    assert AttentionPolicy().warnings() == []


@pytest.mark.parametrize("sinks", [0, 16])
@pytest.mark.parametrize("tokens", [32, TACTIC_TAIL_TOKENS - 1, TACTIC_TAIL_TOKENS, TACTIC_TAIL_TOKENS + 16, None])
def test_a_cap_below_the_unclustered_tokens_is_warned_about(tokens: int | None, sinks: int) -> None:
    warnings = AttentionPolicy(decode=Tactic(sinks=sinks, max_tokens=tokens)).warnings()
    assert warnings == ([TACTIC_CAP_WARNING] if tokens is not None and tokens < TACTIC_TAIL_TOKENS + sinks else [])


@given(prompt=st.integers(1, 10_000), generated=st.integers(1, 20_000))
def test_no_more_tokens_are_unclustered_than_the_warning_says(prompt: int, generated: int) -> None:
    length = prompt + generated
    assert length - clustered_until(prompt, length, piece_of(SPAN, 16)) <= TACTIC_TAIL_TOKENS


def checked(policy: AttentionPolicy, profile: tuple[int, ...] | None = None) -> AttentionPolicy:
    return check_against_model(policy, layers=12, context_length=1024, delta_profile=profile)


def test_delta_takes_the_profile_of_the_model() -> None:
    policy = AttentionPolicy(decode=Delta(budget=512))
    resolved = checked(policy, (2, 7))
    assert resolved.decode == Delta(budget=512, delta_layers=(2, 7))
    assert parse_policy(resolved.canonical()) == resolved
    assert checked(AttentionPolicy(decode=Delta(delta_layers=(3, 11))), (2, 7)).decode == Delta(delta_layers=(3, 11))


@pytest.mark.parametrize(
    ("policy", "profile", "message"),
    [
        (Delta(), None, "attention.decode.delta_layers: must be given: this model has no calibrated profile; name"),
        (Delta(), (), "attention.decode.delta_layers: must be given"),
        (Delta(delta_layers=(2, 12)), (2, 7), "delta_layers: must be at most 11: the model has 12 layers"),
        (Delta(full_layers=3), (2, 7), "attention.decode.full_layers: must be at most 2, the first layer of the"),
        (SnapKV(observation_window=1025, budget=4096), None, "observation_window: must be at most 1024, the model's"),
    ],
)
def test_what_the_model_cannot_serve_is_refused(policy: Any, profile: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        checked(AttentionPolicy(decode=policy), profile)
    assert message in str(caught.value)


def test_a_dense_prefix_beyond_the_context_is_refused() -> None:
    checked(AttentionPolicy(prefill=QuokaPrefill(dense_prefix=1024)))
    with pytest.raises(PolicyError, match=r"attention\.prefill\.dense_prefix: must be at most 1024"):
        checked(AttentionPolicy(prefill=QuokaPrefill(dense_prefix=1025)))


def test_a_budget_beyond_the_context_is_served() -> None:
    policy = AttentionPolicy(decode=Quest(budget=MAX_TOKENS))
    assert checked(policy) == policy


@given(valid_policies)
def test_valid_policies_satisfy_the_json_schema(policy: dict[str, Any]) -> None:
    VALIDATOR.validate(policy)
    VALIDATOR.validate(json.loads(parse_policy(policy).canonical()))


VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_the_json_schema_is_one_and_has_the_bounds() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    wrong: Any
    for wrong in (
        decode(policy="quest", budget=15),
        decode(policy="quest", extra=1),
        decode(policy="no"),
        prefill(block=100),
        {"early_termination": {"patience": 0}},
        {"other": 1},
        [],
    ):
        assert not VALIDATOR.is_valid(wrong)


@pytest.mark.parametrize("name", [name for name in DECODE_POLICIES if name != "dense"])
def test_every_sparse_decode_policy_can_draft(name: str) -> None:
    policy = parse_policy({**decode(policy=name), "verify": {}})
    assert policy.verify is not None
    assert policy.verify.draft_tokens == 4
    # What it writes is dense attention's, for everybody.
    assert policy.namespace() is None


@pytest.mark.parametrize("name", DRAFTS_ONLY)
def test_a_policy_that_drafts_from_checks_needs_verification(name: str) -> None:
    with pytest.raises(PolicyError, match=rf"attention.verify: must be given: decode.policy is {name}"):
        parse_policy(decode(policy=name))


def test_a_policy_that_is_not_verified_says_nothing_of_it() -> None:
    assert "verify" not in AttentionPolicy(decode=Quest()).canonical()


def test_the_json_schema_in_the_docs_is_the_contracts() -> None:
    written = json.loads((Path(__file__).parents[2] / "docs" / "policy.schema.json").read_text())
    assert written == json_schema()


def test_the_contract_needs_neither_torch_nor_sglang() -> None:
    program = (
        "import sys, winnow_kernels.policies.attention_policy; print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "[]\n"
