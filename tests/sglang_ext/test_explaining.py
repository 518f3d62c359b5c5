"""Explained decode steps: positions are the selector's, weights those of float64, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import GenerateReqInput
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_winnow import reporting, request_policy, server_information
from sglang_winnow.admission import Limits, attach_policy, check_custom_params, check_request
from sglang_winnow.decode_plan import DecodePlan
from sglang_winnow.device import variants
from sglang_winnow.explain_requests import explanation_of, note_explained_prompt
from sglang_winnow.explaining import explained
from sglang_winnow.server_information import ServedModel
from sglang_winnow.text_offsets import text_and_offsets
from tests.kernels.attention_float64 import attend_head_until_settled
from tests.kernels.caches import random_softmax
from tests.models import NEEDLE
from tests.sglang_ext.test_plans import DIM, GROUP, KV_HEADS, LAYERS, SCALE, SLOTS, Pass
from winnow_kernels.attend import reference
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import Attended
from winnow_kernels.contract.explanation import (
    MAX_WEIGHTS,
    PARAMETER,
    Explain,
    default_heads,
    default_layers,
    default_steps,
    parse_explain,
)
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.decode import step
from winnow_kernels.decode.explanation import Explanation, exact_weights
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_kernels.policies.delta import reference as delta
from winnow_kernels.selection.tokens import Selection

LENGTHS = [150, 163, 240, 301]
ASKED = Explain(steps=(2,), layers=tuple(range(LAYERS)), heads=tuple(range(KV_HEADS)))
POLICIES: list[dict[str, Any]] = [
    {"policy": "streaming_llm", "window": 32},
    {"policy": "quoka", "budget": 48},
    {"policy": "sparq", "budget": 48, "channels": 8},
    {"policy": "lowbit_top_k", "budget": 96},
    {"policy": "lowbit_top_p", "p": 0.5},
    {"policy": "quest", "budget": 48, "full_layers": 1},
    {"policy": "delta", "budget": 48, "recency": 16, "full_layers": 1, "delta_layers": [1]},
    {"policy": "tactic", "p": 0.5, "full_layers": 1},
]
MODEL = ServedModel(layers=4, context_length=4096, sliding_layers=frozenset({3}), kv_heads=2)
TEXT = '{"steps": [1], "layers": [0], "heads": [0]}'


@pytest.fixture(autouse=True)
def _every_length_is_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_policy, "crossover_tokens", lambda _policy: 0)


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[Selection]:
    """What is selected from now on, a layer's after another's."""
    seen: list[Selection] = []

    def attend_and_note(queries: Tensor, cache: Any, selection: Selection, *others: Any) -> Attended:
        seen.append(selection)
        return reference.attend(queries, cache, selection, *others)

    monkeypatch.setattr(step, "attend", attend_and_note)
    monkeypatch.setattr(delta, "attend", attend_and_note)
    return seen


def decoding(policy: dict[str, Any], *rows: int, asked: Explain = ASKED) -> Pass:
    """A pass in which it is the second decode step of these rows that is explained."""
    own = Pass(LENGTHS, [policy] * len(LENGTHS))
    for row in rows:
        own.states[row].prompt_length = LENGTHS[row] - 2
        own.states[row].explanation = Explanation(asked)
    return own


def decode(own: Pass) -> list[Tensor]:
    plan = DecodePlan(own.context, own.lengths, own.rows, own.states, SCALE, own.indexes, own.statistics)
    outputs = [
        plan.attend(layer, own.queries(len(own.lengths), layer), cache, SCALE, None)
        for layer, cache in enumerate(own.indexes.caches)
    ]
    plan.finish()
    return outputs


def told(own: Pass, row: int, tokens: int = 3) -> dict[str, Any]:
    explanation = own.states[row].explanation
    assert explanation is not None
    return explained(explanation, list(range(tokens)))


def positions(entry: dict[str, Any]) -> list[int]:
    return [position for begin, end in entry["attended"] for position in range(begin, end)]


def float64_weights(own: Pass, row: int, layer: int, head: int) -> Tensor:
    slots = own.context.slots[row, : LENGTHS[row]]
    queries = own.queries(len(LENGTHS), layer)[row].unflatten(0, (KV_HEADS, GROUP))[head].double()
    scores = queries @ own.indexes.caches[layer].keys[slots, head].double().T * SCALE
    weights: Tensor = scores.softmax(-1).mean(0)
    return weights


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy["policy"]))
def test_positions_are_the_selectors_and_weights_those_of_float64(
    policy: dict[str, Any], selections: list[Selection]
) -> None:
    own = decoding({"decode": policy}, *range(len(LENGTHS)))
    decode(own)
    full_layers = LAYERS - len(selections)
    fewer = 0
    for row, length in enumerate(LENGTHS):
        found = told(own, row)
        assert (found["decode_steps"], found["missing_steps"]) == (2, [])
        entries = iter(found["entries"])
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                entry = next(entries)
                assert (entry["step"], entry["layer"], entry["head"], entry["dense"]) == (2, layer, head, False)
                wanted = list(range(length))
                if layer >= full_layers:
                    selection = selections[layer - full_layers]
                    chosen = set(selection.slots[row, head, : int(selection.counts[row, head])].tolist())
                    wanted = [at for at in range(length) if int(own.context.slots[row, at]) in chosen]
                    assert len(wanted) == len(chosen)
                assert positions(entry) == wanted
                fewer += len(wanted) < length
                exact = float64_weights(own, row, layer, head)
                assert torch.tensor(entry["weights"], dtype=torch.float64) == pytest.approx(exact, abs=2e-6)
                assert entry["share"] == pytest.approx(float(exact[wanted].sum()), abs=1e-5)
                assert entry["attended_tokens"] == len(wanted)
    assert fewer


def test_what_early_termination_did_not_read_was_not_attended_to(selections: list[Selection]) -> None:
    policy = {"decode": {"policy": "dense"}, "early_termination": {"scale": 0.5, "direction": 0.5, "patience": 1}}
    own = decoding(policy, *range(len(LENGTHS)))
    decode(own)
    thresholds = own.states[0].policy.early_termination
    stopped = 0
    for row, length in enumerate(LENGTHS):
        for entry in told(own, row)["entries"]:
            layer, head = entry["layer"], entry["head"]
            queries = own.queries(len(LENGTHS), layer)[row].unflatten(0, (KV_HEADS, GROUP))[head]
            slots = own.context.slots[row, :length].flip(0).tolist()
            cache = own.indexes.caches[layer]
            wanted = attend_head_until_settled(queries, cache, head, slots, SCALE, thresholds)
            # The newest first.
            assert positions(entry) == list(range(length - wanted.read, length))
            stopped += wanted.read < length
    assert stopped


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy["policy"]))
@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_nothing_else_changes(policy: dict[str, Any], audit: float) -> None:
    asked = {"decode": policy, "audit": audit}
    plain, own = decoding(asked), decoding(asked, 1, 2)
    for one, other in zip(decode(plain), decode(own), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain.statistics.rows, own.statistics.rows)
    assert own.told(Field.AUDITED_STEPS) == [audit] * len(LENGTHS)


@pytest.mark.parametrize("policy", [{"policy": "dense"}, {"policy": "quest", "budget": 1024}])
def test_a_step_that_reads_everything_says_so(policy: dict[str, Any]) -> None:
    own = decoding({"decode": policy}, 1)
    decode(own)
    for entry in told(own, 1)["entries"]:
        assert (entry["dense"], entry["attended"], entry["share"]) == (True, [[0, LENGTHS[1]]], 1)
        assert sum(entry["weights"]) == pytest.approx(1, abs=1e-4)


def test_rows_that_attend_otherwise_than_others_are_explained_as_alone() -> None:
    policies = [{"decode": {"policy": "quest", "budget": 48, "full_layers": count}} for count in (0, 1, 2, 1)]
    together = Pass(LENGTHS, policies)
    for row, state in enumerate(together.states):
        state.prompt_length, state.explanation = LENGTHS[row] - 2, Explanation(ASKED)
    decode(together)
    for row, policy in enumerate(policies):
        alone = decoding(policy, row)
        decode(alone)
        assert told(together, row) == told(alone, row)


def test_only_what_is_asked_for_is_explained() -> None:
    own = decoding({"decode": POLICIES[0]}, 1, asked=Explain(steps=(2, 3), layers=(2,), heads=(1,)))
    decode(own)
    found = told(own, 1, tokens=4)
    assert [(entry["layer"], entry["head"]) for entry in found["entries"]] == [(2, 1)]
    assert found["missing_steps"] == [3]
    # Overlap scheduling has run a step beyond the end.
    ended = told(own, 1, tokens=2)
    assert (ended["decode_steps"], ended["missing_steps"], ended["entries"]) == (1, [2, 3], [])
    assert own.states[0].explanation is None


def test_steps_that_nobody_asks_about_are_computed_as_ever() -> None:
    own = decoding({"decode": POLICIES[0]}, 1, asked=Explain(steps=(7,), layers=(0,), heads=(0,)))
    plan = DecodePlan(own.context, own.lengths, own.rows, own.states, SCALE, own.indexes, own.statistics)
    [group] = plan._groups
    assert (type(group.meter), group.explanation) == (Meter, None)


@given(heads=st.lists(st.integers(0, KV_HEADS - 1), min_size=1, unique=True), length=st.integers(1, 300))
def test_weights_are_a_distribution_over_the_tokens(heads: list[int], length: int) -> None:
    own = Pass(LENGTHS, [{}] * len(LENGTHS))
    queries = own.queries(1, 0)[0]
    slots = torch.randperm(SLOTS)[:length]
    weights = exact_weights(queries, slots, own.indexes.caches[0], DIM**-0.5, heads)
    assert weights.shape == (len(heads), length)
    assert bool((weights >= 0).all())
    assert weights.sum(1).tolist() == pytest.approx([1] * len(heads), abs=1e-5)


@pytest.mark.parametrize("kind", ["cap", "sinks", "cap and sinks"])
def test_weights_have_the_softmax_of_the_layer_and_leave_out_its_sinks(kind: str) -> None:
    own = Pass(LENGTHS, [{}] * len(LENGTHS))
    softmax = random_softmax(kind, KV_HEADS * GROUP)
    cache = replace(own.indexes.caches[0], softmax=softmax)
    queries = 4 * own.queries(1, 0)[0]
    slots = torch.arange(40)
    [weights] = exact_weights(queries, slots, cache, SCALE, [1])
    scores = queries.unflatten(0, (KV_HEADS, GROUP))[1].double() @ cache.keys[slots, 1].double().T * SCALE
    if softmax.cap is not None:
        scores = softmax.cap * (scores / softmax.cap).tanh()
    torch.testing.assert_close(weights.double(), scores.softmax(-1).mean(0), rtol=1e-4, atol=1e-6)


# What may be asked.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (7, "attention_explain: must be a string of JSON"),
        ("[]", "attention_explain: must be an object"),
        ("{", "attention_explain: Invalid JSON"),
        ("\ud800", "attention_explain: "),
        ("{}", "attention_explain.steps: Field required"),
        (
            '{"steps": [0], "layers": [0], "heads": [0]}',
            "attention_explain.steps.0: must be greater than",
        ),
        (
            '{"steps": [257], "layers": [0], "heads": [0]}',
            "attention_explain.steps.0: must be less than or equal",
        ),
        ('{"steps": [], "layers": [0], "heads": [0]}', "attention_explain.steps: "),
        ('{"steps": [1], "layers": [0], "heads": [0], "x\u00e9": 1}', "attention_explain.x"),
    ],
)
def test_what_is_no_question_is_refused(text: object, message: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        parse_explain(text)
    assert str(refusal.value).startswith(message)
    assert str(refusal.value).isascii()


@pytest.mark.parametrize(
    ("changes", "policy", "message"),
    [
        ({"ranks": 2}, {}, "attention_explain: is not served with --tp-size 2: no rank sees all heads"),
        ({"has_policies": False}, {}, "attention_explain: is not served without --attention-backend winnow"),
        ({"layers": 0}, {}, "attention_explain.layers: must be at most -1; there is no layer 0"),
        ({"sliding_layers": {0}}, {}, "attention_explain.layers: must be layers that see the whole context: layer 0"),
        (
            {"linear_layers": {0}},
            {},
            "attention_explain.layers: must be layers that attend to tokens: layer 0 has linear",
        ),
        ({"kv_heads": 0}, {}, "attention_explain.heads: must be at most -1, KV heads; there is no head 0"),
        ({}, {"decode": {"policy": "quest"}, "verify": {}}, "attention_explain: must not be given together with"),
        ({}, {"decode": {"policy": "snapkv", "release": True}}, "attention_explain: must not be given together with"),
    ],
)
def test_what_is_not_explained_is_refused(changes: dict[str, Any], policy: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        explanation_of({PARAMETER: TEXT}, replace(MODEL, **changes), parse_policy(policy))
    assert str(refusal.value).startswith(message)


def test_on_cuda_the_oldest_release_alone_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda = replace(MODEL, device="cuda")
    monkeypatch.setattr(server_information, "PASSES_WITHOUT_GRAPH", True)
    assert explanation_of({PARAMETER: TEXT}, on_cuda, AttentionPolicy()) == parse_explain(TEXT)
    monkeypatch.setattr(server_information, "PASSES_WITHOUT_GRAPH", False)
    problem = r"^attention_explain: is not served on cuda with this SGLang \(use 0\.5\.16\)$"
    with pytest.raises(PolicyError, match=problem):
        explanation_of({PARAMETER: TEXT}, on_cuda, AttentionPolicy())


@pytest.mark.parametrize("without_graph", [False, True])
def test_no_graph_serves_a_pass_that_runs_without(without_graph: bool) -> None:
    runner, other = (
        SimpleNamespace(attn_backend=backend)
        for backend in (SimpleNamespace(runs_without_graph=without_graph), object())
    )
    for could in (False, True):
        assert variants._can_run(lambda *_, could=could: could, runner, Any) == (could and not without_graph)
        assert variants._can_run(lambda *_, could=could: could, other, Any) == could


def test_an_ordinary_request_asks_for_nothing() -> None:
    for custom in (None, {}, {"attention": "{}"}):
        assert explanation_of(custom, replace(MODEL, device="cuda"), AttentionPolicy()) is None
        request: Any = SimpleNamespace(text="a")
        note_explained_prompt(request, [1], custom)
        assert not hasattr(request, "winnow_prompt")
    assert MODEL.describe()["explains"]
    assert not replace(MODEL, ranks=2).describe()["explains"]


def test_too_long_an_explanation_is_refused_when_the_tokens_are_known() -> None:
    request: Any = SimpleNamespace(text="a")
    note_explained_prompt(request, range(MAX_WEIGHTS - 1), {PARAMETER: TEXT})
    assert request.winnow_prompt == (list(range(MAX_WEIGHTS - 1)), "a")
    with pytest.raises(
        PolicyError, match=r"attention_explain\.steps: steps, layers, heads and tokens must multiply to at most 262144"
    ):
        note_explained_prompt(request, range(MAX_WEIGHTS), {PARAMETER: TEXT})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": ["a", "b"]}, "attention_explain: is for a single prompt"),
        ({"text": "a", "n": 2}, "attention_explain: is for a single sample; sampling_params.n must be 1"),
    ],
)
def test_several_sequences_are_refused(body: dict[str, Any], message: str) -> None:
    parameters = {"n": body.pop("n", 1), "custom_params": {PARAMETER: TEXT}}
    limits = Limits(vocab_size=100, model=MODEL)
    with pytest.raises(ValueError, match=message):
        check_request(GenerateReqInput(**body, sampling_params=parameters), limits)
    check_request(GenerateReqInput(text="a", sampling_params=parameters | {"n": 1}), limits)
    # Responses of this form are kept.
    with pytest.raises(PolicyError, match="attention_explain: is not served in this form"):
        check_custom_params({PARAMETER: TEXT}, limits)


def test_a_prompt_with_an_image_is_not_explained() -> None:
    limits = Limits(vocab_size=100, model=MODEL, multimodal=True)
    body: Any = {"text": "a", "sampling_params": {"custom_params": {PARAMETER: TEXT}}}
    check_request(GenerateReqInput(**body, image_data=[]), limits)
    with pytest.raises(PolicyError, match="attention_explain: must not be given together with image_data"):
        check_request(GenerateReqInput(**body, image_data="x.png"), limits)


def test_a_request_in_the_scheduler_gets_its_explanation_and_nobody_else_sees_the_question() -> None:
    def request(custom: dict[str, Any]) -> Any:
        aborted: list[str] = []
        return SimpleNamespace(
            rid="r",
            sampling_params=SimpleNamespace(custom_params=custom),
            custom_logit_processor=None,
            origin_input_ids=[1, 2],
            extra_key=None,
            aborted=aborted,
            set_finish_with_abort=aborted.append,
        )

    own = request({PARAMETER: TEXT, "mine": 1})
    attach_policy(own, MODEL)
    assert own.winnow_state.explanation.asked == Explain(steps=(1,), layers=(0,), heads=(0,))
    assert own.sampling_params.custom_params == {"mine": 1}
    other = request({"mine": 1})
    attach_policy(other, MODEL)
    assert other.winnow_state.explanation is None
    refused = request({PARAMETER: "{}"})
    attach_policy(refused, MODEL)
    assert refused.aborted == ["attention_explain.steps: Field required"]


@given(layers=st.integers(1, 64), heads=st.integers(1, 64), steps=st.integers(1, 256), data=st.data())
def test_defaults_are_among_what_there_is(layers: int, heads: int, steps: int, data: st.DataObject) -> None:
    sliding = data.draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    asked = Explain(steps=default_steps(steps), layers=default_layers(layers, sliding), heads=default_heads(heads))
    asked.check_model(layers, sliding, heads)
    assert len(asked.layers) == min(4, layers - len(sliding))
    assert asked.weights(1) <= 16


# Texts and offsets.


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(NEEDLE)


@pytest.mark.parametrize("text", ["", "one two", "caf\u00e9 \N{ROCKET}\N{ROCKET} <script>\n\n\t", "\u4f60\u597d"])
def test_offsets_are_the_tokenizers(tokenizer: Any, text: str) -> None:
    encoded = tokenizer(text, return_offsets_mapping=True)
    found = text_and_offsets(tokenizer, encoded["input_ids"], text)
    assert found == {"text": text, "offsets": [list(place) for place in encoded["offset_mapping"]]}


def test_tokens_that_came_as_ids_have_the_text_that_they_decode_to(tokenizer: Any) -> None:
    ids = tokenizer("one two three", add_special_tokens=False)["input_ids"]
    found = text_and_offsets(tokenizer, ids, None)
    assert found["text"] == tokenizer.decode(ids)
    assert found["offsets"][-1][1] == len(found["text"])


@given(data=st.data())
def test_tokens_in_any_order_cover_their_text(tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    found = text_and_offsets(tokenizer, ids, None)
    assert len(found["offsets"]) == len(ids)
    begins = [begin for begin, _ in found["offsets"]]
    assert begins == sorted(begins)
    for begin, end in found["offsets"]:
        assert 0 <= begin <= end <= len(found["text"])


def test_bytes_of_one_character_share_its_place(tokenizer: Any) -> None:
    rocket = tokenizer("\N{ROCKET}", add_special_tokens=False)["input_ids"]
    word = tokenizer("one", add_special_tokens=False)["input_ids"]
    # Not as the tokenizer would write it: the space apart.
    ids = [*rocket, *word, *rocket[:1]]
    found = text_and_offsets(tokenizer, ids, None)
    assert found["text"].startswith("\N{ROCKET}")
    assert {tuple(place) for place in found["offsets"][: len(rocket)]} == {(0, 1)}


def test_without_a_tokenizer_that_tells_there_are_no_offsets() -> None:
    for tokenizer in (None, SimpleNamespace(is_fast=False)):
        assert text_and_offsets(tokenizer, [1], None) == {"text": None, "offsets": None}


def test_the_answer_gets_the_texts_where_the_tokenizer_is(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("one two")["input_ids"]
    manager: Any = SimpleNamespace(tokenizer=tokenizer)
    request: Any = SimpleNamespace(winnow_prompt=(ids, "one two"))
    read = reporting._read('{"explain": {"output_ids": [5, 6], "entries": []}}', manager, request)
    assert read["explain"]["prompt"]["text"] == "one two"
    assert read["explain"].keys() == {"prompt", "output", "entries"}
    assert isinstance(tokenizer.backend_tokenizer, Tokenizer)
