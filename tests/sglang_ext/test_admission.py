"""The checks on a request, without a server."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields, replace
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_winnow import admission, audit_share, plugin, server_information
from sglang_winnow.admission import Limits, attach_policy, check_request, check_tokens
from sglang_winnow.sampling_parameters import SamplingParameters
from sglang_winnow.server_information import ServedModel
from sglang_winnow.sglang_versions.releases import runs
from sglang_winnow.sglang_versions.request_fields import PARAMETERS_SINCE, present
from winnow_kernels.policies.attention_policy import parse_policy

QUOKA = parse_policy('{"prefill": {"policy": "quoka"}}')
QUOKA_KEPT = parse_policy('{"prefill": {"policy": "quoka"}, "keep": true}')
MODEL = ServedModel(layers=8, context_length=1024, chunk=256)
LIMITS = Limits(vocab_size=512, model=MODEL)
FIELDS = [field.name for field in fields(GenerateReqInput)]
PARAMETERS = list(SamplingParameters.model_fields)


def check(**body: Any) -> None:
    check_request(GenerateReqInput(**body), LIMITS)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3)
)
sampling = st.dictionaries(st.sampled_from(PARAMETERS) | st.text(st.characters()), json_values, max_size=4)
prompts = st.sampled_from([{"text": "a"}, {"text": ["a", "b"]}, {"input_ids": [5]}, {"input_ids": [[5], [6, 7]]}, {}])


@given(prompts, st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4), st.none() | sampling)
def test_any_body_passes_or_is_a_value_error(
    prompt: dict[str, Any], body: dict[str, Any], parameters: dict[str, Any] | None
) -> None:
    message = ""
    try:
        check(**{"sampling_params": parameters} | body | prompt)
    except ValueError as error:
        message = str(error)
    assert message.isascii()


@given(st.lists(st.integers()))
def test_tokens_pass_only_inside_the_vocabulary(tokens: list[int]) -> None:
    if tokens and all(0 <= token < 512 for token in tokens):
        check_tokens(tokens, 512)
    else:
        with pytest.raises(ValueError, match="token"):
            check_tokens(tokens, 512)


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a"},
        {"text": ["a", "b"], "sampling_params": [{"temperature": 0}, {"temperature": 1}], "rid": ["x", "y"]},
        {"input_ids": [0, 511]},
        {"input_ids": [[0], [511]], "token_ids_logprob": [[1], None]},
        {"input_ids": [[0], [511]], "token_ids_logprob": [1, 2], "return_logprob": [True, False]},
        {"text": "a", "rid": "x", "image_data": [], "session_params": None},
        {"text": "a", "sampling_params": {"n": 128, "top_k": -1, "stop": ["x"], "logit_bias": {"0": -100, "511": 5}}},
        {"text": "a", "sampling_params": {"temperature": None, "stop_token_ids": [3, None], "stop_regex": []}},
        {"text": "a", "sampling_params": {"custom_params": {"policy": "{}", "list": [1, "a"], "map": {"a": None}}}},
        {"text": "a", "sampling_params": {"sampling_seed": -(2**63), "min_new_tokens": 4, "max_new_tokens": 4}},
    ],
)
def test_good_requests_pass(body: dict[str, Any]) -> None:
    check(**body)


# Bodies, and what the message must say of them: the field and, where there is one, the bound.
BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of text, input_ids; given: none"),
    ({"text": "a", "input_ids": [1]}, "given: text, input_ids"),
    ({"text": ""}, "text: must have at least 1 character"),
    ({"text": []}, "text: must be a list that is not empty or a string"),
    ({"text": ["a", 5]}, "text: Input should be a valid string"),
    ({"input_ids": []}, "input_ids: must be a list that is not empty"),
    ({"input_ids": [[]]}, "input_ids: List should have at least 1 item"),
    ({"input_ids": [512]}, "input_ids: token ids must be from 0 to 511"),
    ({"input_ids": [1, -1]}, "input_ids: token ids must be from 0 to 511"),
    ({"input_ids": [[1], [2**70]]}, "input_ids: token ids must be from 0 to 511"),
    ({"input_ids": [True]}, "input_ids.0: Input should be a valid integer"),
    ({"input_ids": [1.0]}, "input_ids.0: Input should be a valid integer"),
    ({"input_ids": ["1"]}, "input_ids.0: Input should be a valid integer"),
    ({"input_ids": [[[1]]]}, "input_ids.0: Input should be a valid integer"),
    ({"input_embeds": [[1.0]]}, "input_embeds: not served: send text or input_ids"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid: 1 values for 2 prompts"),
    ({"text": "a", "rid": ["x"]}, "rid: a list is for a list of prompts"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n: must be the same"),
    ({"text": ["a"] * 100, "sampling_params": {"n": 100}}, "at most 4096 sequences"),
    ({"text": "a", "token_ids_logprob": [512]}, "token_ids_logprob.0: token ids must be from 0 to 511"),
    ({"text": "a", "top_logprobs_num": 129}, "top_logprobs_num: Input should be less than or equal to 128"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len: Input should be greater than or equal to -1"),
    ({"text": "a", "logprob_start_len": 1025}, "logprob_start_len: at most 1024"),
    ({"text": "a", "session_params": {"id": "s"}}, "session_params: not served: "),
    ({"text": "a", "custom_labels": {"who": "me"}}, "custom_labels: who is not among the server's labels"),
    ({"text": "a", "image_data": "x.png"}, "image_data: this model reads text only"),
    ({"text": "a", "lora_path": 5}, "lora_path: Input should be a valid string"),
    *(({"text": "a", name: "x"}, f"{name}: set by the server") for name in present(admission.INTERNAL)),
    *(({"text": "a", name: "x"}, f"{name}: not served: ") for name in present(admission.NOT_SERVED)),
    *(({"text": "a", name: {"a": 1}}, f"{name}: this model reads") for name in present(admission.MEDIA_SETTINGS)),
]
BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature: Input should be a valid number"),
    ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
    ({"temperature": float("inf")}, "temperature: Input should be a finite number"),
    ({"temperature": 1e300}, "temperature: Input should be less than or equal to 1000000"),
    ({"max_new_tokens": -1}, "max_new_tokens: Input should be greater than or equal to 0"),
    ({"max_new_tokens": "4"}, "max_new_tokens: Input should be a valid integer"),
    ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens: at most max_new_tokens, which is 4"),
    ({"n": 0}, "n: Input should be greater than or equal to 1"),
    ({"n": 10**9}, "n: Input should be less than or equal to 128"),
    ({"n": True}, "n: Input should be a valid integer"),
    ({"top_k": 2**31}, "top_k: Input should be less than or equal to 1073741824"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty: Input should be greater than or equal to"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_regex": "(a+)+$"}, "stop_regex: not supported"),
    ({"logit_bias": {"512": 1}}, "token ids must be from 0 to 511"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"1": 1e300}}, "logit_bias.1: Input should be less than or equal to"),
    ({"stream_interval": 0}, "stream_interval: Input should be greater than or equal to 1"),
    ({"sampling_seed": 2**63}, "sampling_seed: "),
    ({"json_schema": {}}, "json_schema: Input should be a valid string"),
    ({"custom_params": {"a": {"b": {"c": 1}}}}, "custom_params.a"),
    ({"is_normalized": True}, "is_normalized: Extra inputs are not permitted"),
    ({"unheard_of": 1}, "unheard_of: Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("body", "message"), BAD_BODIES)
def test_bad_bodies_are_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the message is compared below, as it is
        check(**body)
    assert message in str(refusal.value)


# What a client that does not ask the service may put where a policy belongs, and what the message must say.
BAD_POLICIES: list[tuple[Any, str]] = [
    (5, "attention: must be a string of JSON"),
    ({"decode": "dense"}, "attention: must be a string of JSON"),
    ("{", "attention: must be a JSON object"),
    ("[]", "attention: must be an object"),
    ('{"decode": {"policy": "none"}}', "attention.decode.policy: must be one of dense, "),
    ('{"decode": {"policy": "quest", "budget": 1}}', "attention.decode.budget: must be greater than or equal to 16"),
    ('{"decode": {"policy": "delta", "delta_layers": [2, 8]}}', "attention.decode.delta_layers: must be at most 7"),
    ('{"decode": {"policy": "delta"}}', "attention.decode.delta_layers: must be given"),
    (
        '{"prefill": {"policy": "quoka", "dense_prefix": 1025}}',
        "attention.prefill.dense_prefix: must be at most 1024",
    ),
    (
        '{"prefill": {"policy": "quoka", "block": 272}}',
        "attention.prefill.block: must fit --chunked-prefill-size (256) in whole pages of 16",
    ),
]


@pytest.mark.parametrize(("policy", "message"), BAD_POLICIES)
def test_bad_policies_are_refused_by_name(policy: Any, message: str) -> None:
    parameters = {"custom_params": {"attention": policy}}
    for value in (parameters, [{}, parameters]):
        with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the message is compared below, as it is
            check(text="a" if value is parameters else ["a", "b"], sampling_params=value)
        assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("policy", ['{"decode": {"policy": "quest"}}', '{"early_termination": {}}'])
def test_without_the_attention_backend_every_policy_must_be_dense(policy: str) -> None:
    dense_only = replace(LIMITS, model=replace(MODEL, has_policies=False))
    body: dict[str, Any] = {"text": "a", "sampling_params": {"custom_params": {"attention": policy}}}
    check_request(GenerateReqInput(**body), LIMITS)
    with pytest.raises(ValueError, match=r"attention: must be dense: .* without --attention-backend winnow"):
        check_request(GenerateReqInput(**body), dense_only)
    body["sampling_params"]["custom_params"]["attention"] = '{"decode": {"policy": "dense"}}'
    check_request(GenerateReqInput(**body), dense_only)


def test_a_policy_that_the_server_does_not_serve_is_refused() -> None:
    some = replace(LIMITS, model=replace(MODEL, decode_policies=("dense", "tactic")))
    body: dict[str, Any] = {"text": "a", "sampling_params": {"custom_params": {}}}
    for policy in ("dense", "tactic"):
        body["sampling_params"]["custom_params"]["attention"] = f'{{"decode": {{"policy": "{policy}"}}}}'
        check_request(GenerateReqInput(**body), some)
    body["sampling_params"]["custom_params"]["attention"] = '{"decode": {"policy": "quest"}}'
    refusal = "^attention.decode.policy: quest is not served here; set WINNOW_POLICIES=quest,tactic$"
    with pytest.raises(ValueError, match=refusal):
        check_request(GenerateReqInput(**body), some)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prompt_is_not_released_where_layers_have_a_window(device: str) -> None:
    policy = '{"decode": {"policy": "snapkv", "release": true}}'
    body: dict[str, Any] = {"text": "a", "sampling_params": {"custom_params": {"attention": policy}}}
    model = replace(MODEL, device=device)
    check_request(GenerateReqInput(**body), replace(LIMITS, model=model))
    problem = "must be false: layer 1 has a sliding window, which is part of the prompt"
    with pytest.raises(ValueError, match=f"^attention.decode.release: {problem}$"):
        check_request(GenerateReqInput(**body), replace(LIMITS, model=replace(model, sliding_layers=frozenset({1, 2}))))


def test_a_request_is_audited_on_cuda_where_the_environment_sets_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if that is 0: it is then that there are graphs of audited steps."""
    monkeypatch.delenv(audit_share.ENVIRONMENT, raising=False)
    on_cuda = replace(LIMITS, model=replace(MODEL, device="cuda"))

    def check(audit: Any, limits: Limits) -> None:
        custom = {"attention": json.dumps({"decode": {"policy": "quest"}, "audit": audit})}
        check_request(GenerateReqInput(text="a", sampling_params={"custom_params": custom}), limits)

    check(0.5, LIMITS)
    check(0.0, on_cuda)
    problem = "^attention.audit: must be 0: the server, on cuda, was started without WINNOW_AUDIT$"
    with pytest.raises(ValueError, match=problem):
        check(0.5, on_cuda)
    monkeypatch.setenv(audit_share.ENVIRONMENT, "0")
    check(0.5, on_cuda)
    next_token = {"share": 0.5, "kl": True}
    for limits, without_graph in ((LIMITS, False), (on_cuda, True)):
        monkeypatch.setattr(server_information, "PASSES_WITHOUT_GRAPH", without_graph)
        check(next_token, limits)
    monkeypatch.setattr(server_information, "PASSES_WITHOUT_GRAPH", False)
    problem = r"^attention.audit.kl: must be false: it is not served on cuda with this SGLang \(use 0\.5\.16\)$"
    with pytest.raises(ValueError, match=problem):
        check(next_token, on_cuda)
    with_states = replace(LIMITS, model=replace(LIMITS.model, linear_layers=frozenset({1, 2})))
    check(0.5, with_states)
    with pytest.raises(ValueError, match=r"^attention.audit.kl: must be false: layer 1 has linear attention"):
        check(next_token, with_states)


def test_verification_is_refused_where_the_server_does_not_verify() -> None:
    policy = '{"decode": {"policy": "quest"}, "verify": {"draft_tokens": 2}}'
    body: dict[str, Any] = {"text": "a", "sampling_params": {"custom_params": {"attention": policy}}}
    check_request(GenerateReqInput(**body), replace(LIMITS, model=replace(MODEL, verifies=True)))
    refusal = "^attention.verify: is not served here; start the server with --speculative-algorithm WINNOW$"
    with pytest.raises(ValueError, match=refusal):
        check_request(GenerateReqInput(**body), LIMITS)


VERIFIED = '{"decode": {"policy": "quest"}, "verify": {"draft_tokens": 2}}'


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.5, "min_new_tokens": 1},
        {"logit_bias": {"5": 1.0}, "stop": "one"},
        {"json_schema": "{}"},
        {"regex": "a"},
        {"ebnf": "root ::= a"},
        {"structural_tag": "{}"},
    ],
)
def test_sampling_parameters_are_served_with_verification(asked: dict[str, Any]) -> None:
    body: dict[str, Any] = {"text": "a", "return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [1]}
    body["sampling_params"] = {**asked, "custom_params": {"attention": VERIFIED}}
    for backend in ("none", "xgrammar", "llguidance"):
        limits = replace(LIMITS, model=replace(MODEL, verifies=True), grammar_backend=backend)
        check_request(GenerateReqInput(**body), limits)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"return_hidden_states": True}, "^return_hidden_states: is not served with attention.verify$"),
        ({"return_sampling_mask": True}, "^return_sampling_mask: is not served with attention.verify$"),
        ({"custom_logit_processor": "{}"}, "^custom_logit_processor: is not served with attention.verify$"),
        (
            {"sampling_params": {"regex": "a"}},
            (
                "^sampling_params.regex: is not served with attention.verify by --grammar-backend outlines, which"
                " cannot take tokens back; start the server with llguidance or xgrammar$"
            ),
        ),
    ],
)
def test_what_a_check_cannot_give_is_refused_with_verification(asked: dict[str, Any], refusal: str) -> None:
    limits = replace(LIMITS, model=replace(MODEL, verifies=True), grammar_backend="outlines")
    sampling = asked.get("sampling_params", {})
    body: dict[str, Any] = {"text": "a", **asked, "sampling_params": sampling}
    check_request(GenerateReqInput(**body), limits)
    body["sampling_params"] = {**sampling, "custom_params": {"attention": VERIFIED}}
    with pytest.raises(ValueError, match=refusal):
        check_request(GenerateReqInput(**body), limits)


@pytest.mark.parametrize("extra_key", ["winnow-", QUOKA.namespace(), QUOKA_KEPT.namespace()])
def test_no_client_names_the_namespace_of_a_policy(extra_key: str) -> None:
    with pytest.raises(ValueError, match="extra_key: must not begin with winnow-"):
        check(text="a", extra_key=extra_key)
    check(text="a", extra_key="mine-" + extra_key)


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_batch, "get_parallel", lambda: SimpleNamespace(tp_rank=0))


def queued(custom_params: Any, model: ServedModel = MODEL) -> Req:
    parameters = SamplingParams(custom_params=custom_params)
    req = Req("r", "", array("q", range(9)), parameters, extra_key="mine")
    attach_policy(req, model)
    return req


def test_the_scheduler_gives_a_request_its_policy() -> None:
    req = queued({"attention": QUOKA.canonical()})
    assert req.winnow_state.policy == QUOKA
    assert req.winnow_state.prompt_length == 9
    assert req.extra_key == f"{QUOKA.namespace()}|mine"
    assert req.to_finish is None
    # Nothing keeps it in memory when it has ended.
    assert req.sampling_params.custom_params is None
    assert queued(None).winnow_state.policy.is_dense
    assert queued({"attention": "{}", "thinking_budget": 3}).sampling_params.custom_params == {"thinking_budget": 3}


@pytest.mark.parametrize(("policy", "message"), BAD_POLICIES)
@pytest.mark.usefixtures("_one_rank")
def test_the_scheduler_ends_a_request_whose_policy_is_bad(policy: Any, message: str) -> None:
    req = queued({"attention": policy})
    assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
    assert req.to_finish.message.startswith(message)
    assert req.winnow_state.policy.is_dense
    assert req.winnow_state.prompt_length == len(req.origin_input_ids)


@pytest.mark.usefixtures("_one_rank")
def test_delta_layers_see_the_whole_context() -> None:
    sliding = replace(MODEL, sliding_layers=frozenset({0, 1, 3}), delta_layers=(2, 3))
    for policy in ('{"decode": {"policy": "delta"}}', '{"decode": {"policy": "delta", "delta_layers": [3, 5]}}'):
        req = queued({"attention": policy}, sliding)
        assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
        assert "delta_layers: must be layers that see the whole context: layer 3" in req.to_finish.message
    req = queued({"attention": '{"decode": {"policy": "delta", "delta_layers": [2, 5]}}'}, sliding)
    assert req.to_finish is None


@pytest.mark.usefixtures("_one_rank")
def test_delta_layers_attend_to_tokens() -> None:
    linear = replace(MODEL, linear_layers=frozenset({0, 1, 3}), delta_layers=(2, 5))
    req = queued({"attention": '{"decode": {"policy": "delta", "delta_layers": [3, 5]}}'}, linear)
    assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
    problem = "delta_layers: must be layers that attend to tokens: layer 3 has linear attention"
    assert problem in req.to_finish.message
    assert queued({"attention": '{"decode": {"policy": "delta"}}'}, linear).to_finish is None


def test_keys_are_not_among_the_arguments_that_are_logged() -> None:
    arguments = SimpleNamespace(api_key="k'1", admin_api_key=None, ssl_keyfile_password="p")
    shown = f"ServerArgs(port=1, api_key={arguments.api_key!r}, admin_api_key=None, ssl_keyfile_password='p')"
    assert plugin._hide_keys(shown, arguments) == (
        "ServerArgs(port=1, api_key='***', admin_api_key=None, ssl_keyfile_password='***')"
    )


@pytest.mark.usefixtures("_one_rank")
def test_without_the_attention_backend_a_request_has_no_state() -> None:
    req = queued({"attention": '{"decode": {"policy": "quest"}}'}, replace(MODEL, has_policies=False))
    assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
    assert not hasattr(req, "winnow_state")


@pytest.mark.parametrize(("parameters", "message"), BAD_PARAMETERS)
def test_bad_sampling_parameters_are_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    for value in (parameters, [parameters]):
        with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the message is compared below, as it is
            check(text="a" if value is parameters else ["a"], sampling_params=value)
        assert str(refusal.value).startswith("sampling_params.")
        assert message in str(refusal.value)


def test_every_parameter_of_sglang_is_known() -> None:
    internal = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
    not_served = {name for name, release in PARAMETERS_SINCE.items() if runs(release)}
    assert set(PARAMETERS) | not_served == set(SamplingParams.__struct_fields__) - internal


def test_parameters_of_a_later_sglang_must_be_unset() -> None:
    later = replace(LIMITS, later_parameters=frozenset({"beam_width"}))
    check_request(GenerateReqInput(text="a", sampling_params={"beam_width": None}), later)
    for name, value in (("beam_width", 2), ("unheard_of", None)):
        with pytest.raises(ValueError, match=f"{name}: Extra inputs are not permitted"):
            check_request(GenerateReqInput(text="a", sampling_params={name: value}), later)


def test_every_field_of_sglang_is_known() -> None:
    # Checked by type alone, on the way in, or read only for models that are not served by it.
    unchecked = {"conversation_id", "external_trace_header", "images_config", "mm_hashes", "use_audio_in_video"}
    unchecked |= {f"{part}_dynamic_patch" for part in ("max", "min", "image_max", "video_max")}
    checked = {*admission._PerSequence.model_fields, *admission._Shared.model_fields}
    checked |= {
        *admission.PROMPTS,
        *admission.NOT_SERVED,
        *admission.MEDIA,
        *admission.MEDIA_SETTINGS,
        *admission.INTERNAL,
        "multi_item_delimiter_indices",
    }
    assert set(present(checked | unchecked)) == set(FIELDS)


def test_fields_come_and_go_with_releases() -> None:
    fields = ["text", "cache_salt", "mm_data_mooncake"]
    assert present(fields, Version("0.5.16")) == ["text", "mm_data_mooncake"]
    assert present(fields, Version("0.5.18")) == fields
    assert present(fields, Version("0.5.19")) == ["text", "cache_salt"]


def test_states_that_sglang_does_not_use_are_forgotten() -> None:
    request = GenerateReqInput(text=["a", "b"], sampling_params={"n": 2}, rid=None)
    request.normalize_batch_and_arguments()
    manager: Any = SimpleNamespace(rid_to_state=dict.fromkeys(request.rid))
    plugin._forget_unused_states(None, manager, request)
    assert list(manager.rid_to_state) == request.rid[:2]
    single = GenerateReqInput(text="a", rid="mine")
    single.normalize_batch_and_arguments()
    manager.rid_to_state["mine"] = None
    plugin._forget_unused_states(None, manager, single)
    assert "mine" in manager.rid_to_state


def test_a_refused_request_can_be_aborted_without_touching_another() -> None:
    # SGLang's clean-up of a native stream reads is_single and rid.
    config = SimpleNamespace(vocab_size=512, is_multimodal=False)
    arguments = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=None, enable_mis=False, grammar_backend="none")
    manager: Any = SimpleNamespace(model_config=config, server_args=arguments, winnow_model=MODEL)
    request = GenerateReqInput(input_ids=[-1], rid="of-another", stream=True)
    with pytest.raises(ValueError, match="input_ids: token ids must be from 0 to 511"):
        plugin._check_before_anything_else(manager, request)
    assert request.is_single
    assert request.rid not in {"", None, "of-another"}
