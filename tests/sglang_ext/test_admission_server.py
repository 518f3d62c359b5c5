"""A real server is sent what is wrong: it refuses it by name, and answers as before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sglang_winnow.sampling_parameters import SamplingParameters
from sglang_winnow.sglang_versions.releases import NATIVE_CONTRACT, runs
from tests.models import ModelShape
from tests.runtime import Runtime
from tests.sglang_ext.conftest import SERVED_MODEL as MODEL

VOCABULARY = ModelShape().vocab_size
MESSAGES = [{"role": "user", "content": "abc"}]
FUZZED_BODIES = 240
# Nested deeper than Python's recursion limit allows.
NESTING = 5000


@dataclass
class Server:
    http: httpx.Client
    before: list[int]

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def assert_answers_as_before(self) -> None:
        assert greedy(self.http) == self.before


def greedy(http: httpx.Client) -> list[int]:
    body = generate(input_ids=[5, 9, 300, 12], max_new_tokens=12)
    tokens: list[int] = http.post("/generate", json=body).raise_for_status().json()["output_ids"]
    return tokens


def generate(*, input_ids: Any = None, **parameters: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True} | parameters
    return {"input_ids": input_ids if input_ids is not None else [5, 6], "sampling_params": sampling}


@pytest.fixture(scope="module")
def server(small_server: Runtime) -> Iterator[Server]:
    # SGLang closes a connection after an answer with status 500.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=small_server.url, timeout=60, limits=limits) as http:
        yield Server(http, greedy(http))


def native(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", generate() | fields


def sampling(**parameters: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", generate(**parameters)


def prompt(value: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": MODEL, "prompt": value, "max_tokens": 2}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": 2} | fields


# Requests, and what the answer must say of them.
REFUSED: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (native(input_ids=[99_999_999]), f"input_ids: token ids must be from 0 to {VOCABULARY - 1}"),
    (native(input_ids=[VOCABULARY]), f"from 0 to {VOCABULARY - 1}"),
    (native(input_ids=[-1]), f"from 0 to {VOCABULARY - 1}"),
    (native(input_ids=[[1], [-(2**63)]]), f"from 0 to {VOCABULARY - 1}"),
    (native(input_ids=[2**64]), "input_ids"),
    (native(input_ids=[1.5]), "input_ids"),
    (native(input_ids=["1"]), "input_ids"),
    (native(input_ids=[[[1]]]), "input_ids"),
    (native(input_ids=[True]), "input_ids"),
    (native(input_ids=[]), "input_ids"),
    (native(input_ids=[[]]), "input_ids"),
    (native(text="both"), "exactly one of text, input_ids"),
    (prompt([99_999_999]), f"from 0 to {VOCABULARY - 1}"),
    (prompt([-1]), f"from 0 to {VOCABULARY - 1}"),
    (prompt([[1], [VOCABULARY]]), f"from 0 to {VOCABULARY - 1}"),
    (prompt(["a", ""]), "text: must have at least 1 character"),
    (chat(input_ids=[99_999_999]), f"from 0 to {VOCABULARY - 1}"),
    (native(token_ids_logprob=[VOCABULARY], return_logprob=True), "token_ids_logprob.0"),
    (native(token_ids_logprob=[-1], return_logprob=True), "token_ids_logprob.0"),
    (native(top_logprobs_num=10**6, return_logprob=True), "top_logprobs_num: Input should be less than or equal to"),
    (native(top_logprobs_num=-1, return_logprob=True), "top_logprobs_num"),
    (native(logprob_start_len=10**9, return_logprob=True), "logprob_start_len: at most"),
    (native(logprob_start_len=3, return_logprob=True), "logprob_start_len"),
    (native(logprob_start_len=-5, return_logprob=True), "logprob_start_len"),
    (native(session_params={"id": "none", "replace": True}), "session_params: not served"),
    (native(lora_path="none"), "LoRA"),
    (native(http_worker_ipc="ipc:///tmp/x"), "http_worker_ipc: set by the server"),
    (native(positional_embed_overrides={"a": 1}), "positional_embed_overrides: set by the server"),
    (native(custom_labels={"who": "me"}), "custom_labels: who is not among the server's labels"),
    (native(rid=["a"]), "rid: a list is for a list of prompts"),
    (native(image_data="x.png"), "image_data: this model reads text only"),
    (native(custom_logit_processor="x"), "custom logit processor"),
    (
        ("/generate", generate(temperature=1) | {"return_sampling_mask": True}),
        "return_sampling_mask requires ",
    ),
    (native(sampling_params=[{}]), "sampling_params: a list is for a list of prompts"),
    (native(input_ids=[[1], [2]], sampling_params=[{}]), "sampling_params: 1 values for 2 prompts"),
    (native(input_ids=None, input_embeds=[[1.0, 2.0]]), "input_embeds: not served"),
    (sampling(temperature="hot"), "sampling_params.temperature: Input should be a valid number"),
    (sampling(n=10**9), "sampling_params.n: Input should be less than or equal to 128"),
    (sampling(n=0), "sampling_params.n"),
    (sampling(n="many"), "sampling_params.n"),
    (sampling(max_new_tokens=-1), "sampling_params.max_new_tokens"),
    (sampling(max_new_tokens=2**31 - 1), "maximum context length of 8192 tokens"),
    (sampling(max_new_tokens="4"), "sampling_params.max_new_tokens"),
    (sampling(min_new_tokens=9), "sampling_params.min_new_tokens: at most max_new_tokens, which is 2"),
    (sampling(top_k=2**40), "sampling_params.top_k"),
    (sampling(repetition_penalty=1e-300), "sampling_params.repetition_penalty"),
    (sampling(stop_token_ids=[10**9], min_new_tokens=1), "sampling_params.stop_token_ids"),
    (sampling(stop_regex="(a+)+$"), "sampling_params.stop_regex: not supported"),
    (sampling(stop_regex="("), "sampling_params.stop_regex: not supported"),
    (sampling(logit_bias={str(VOCABULARY): 1}), "sampling_params.logit_bias"),
    (sampling(logit_bias={"1": 1e300}), "sampling_params.logit_bias"),
    (sampling(logit_bias={"one": 1}), "sampling_params.logit_bias"),
    (sampling(stream_interval=0), "sampling_params.stream_interval"),
    (sampling(sampling_seed=2**70), "sampling_params.sampling_seed"),
    (sampling(custom_params={"a": {"b": {"c": {}}}}), "sampling_params.custom_params"),
    (sampling(json_schema='{"type": "object"}'), "json_schema"),
    (sampling(json_schema={"type": "object"}), "sampling_params.json_schema"),
    (sampling(regex="a*"), "regex"),
    (sampling(is_normalized=True), "sampling_params.is_normalized"),
    (chat(logit_bias={"99999999": 1}), "logit_bias"),
    (chat(stop_token_ids=[-1]), "stop_token_ids"),
    (chat(n=1000), "sampling_params.n"),
    (chat(logprobs=True, top_logprobs=10**6), "top_logprobs"),
    (chat(custom_params={"a": [[1]]}), "custom_params"),
]


@pytest.mark.parametrize(("request_", "message"), REFUSED)
def test_bad_requests_are_refused_by_name(server: Server, request_: tuple[str, dict[str, Any]], message: str) -> None:
    path, body = request_
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    if not (path == "/generate" and runs(NATIVE_CONTRACT) and mistyped(answer.json().get("error"))):
        assert message in answer.text


def mistyped(error: object) -> bool:
    """Whether SGLang itself found a wrong type or name in a native body, before hooks saw it."""
    return isinstance(error, str) and error.startswith(("invalid type: ", "unknown field "))


def test_streams_are_refused_too(server: Server) -> None:
    for path, body in (prompt([99_999_999]), chat(n=1000)):
        assert server.post(path, body | {"stream": True}).status_code == 400
    # SGLang has sent status 200 before it looks at a native stream.
    answer = server.post(*native(input_ids=[99_999_999], stream=True))
    assert answer.status_code == 200
    assert f"from 0 to {VOCABULARY - 1}" in answer.text
    # And the connection lives on, past the clean-up that SGLang starts two seconds after a stream.
    with httpx.Client(base_url=server.http.base_url, timeout=60) as http:
        for _ in range(2):
            path, body = native(input_ids=[99_999_999], stream=True)
            assert http.post(path, json=body).status_code == 200
    server.assert_answers_as_before()


@pytest.mark.parametrize(
    "body",
    [
        native(top_logprobs_num=128, return_logprob=True, logprob_start_len=0),
        native(token_ids_logprob=list(range(VOCABULARY)), return_logprob=True, logprob_start_len=0),
        native(return_hidden_states=False, rid="mine", session_id="s", routing_key="k", extra_key="e"),
        native(return_routed_experts=True, return_indexer_topk=True, return_entropy=True, return_bytes=True),
        native(return_prompt_token_ids=True, require_reasoning=True, return_text_in_logprobs=True),
        native(input_ids=[[1], [2, 3]], rid=["a", "b"], token_ids_logprob=[[1], [2]], return_logprob=[True, False]),
        sampling(n=4, temperature=1),
        sampling(temperature=1e6, top_p=1e-300, top_k=2**30 - 1, min_p=1),
        sampling(temperature=1e-6, repetition_penalty=1e-6, logit_bias={"3": 1e9, "4": -1e9}),
        sampling(temperature=1e6, frequency_penalty=2, presence_penalty=-2, min_new_tokens=2, stop_token_ids=[0, 511]),
        sampling(max_new_tokens=0),
        native(priority=2**63 - 1),
        ("/generate", generate(temperature=1, top_k=4096) | {"return_sampling_mask": True}),
        sampling(max_new_tokens=9, ignore_eos=False, stop=["a", "e"]),
        sampling(stop="", sampling_seed=-(2**63), stream_interval=2**31 - 1),
        sampling(custom_params={"thinking_budget": -1, "list": [1, None], "__req__": 1}),
    ],
)
def test_the_extremes_that_are_let_through_are_served(server: Server, body: tuple[str, dict[str, Any]]) -> None:
    answer = server.post(*body)
    assert answer.status_code == 200, answer.text
    server.assert_answers_as_before()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_deep_nesting_is_refused(server: Server, path: str) -> None:
    body = '{"model": "tiny", "sampling_params": ' + '{"custom_params": ' * NESTING + "1" + "}" * NESTING + "}"
    answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    server.assert_answers_as_before()


def test_what_sglang_fails_to_parse_is_500_and_stops_nothing(server: Server) -> None:
    # An error in SGLang's model of the OpenAI body, before any plugin sees the request.
    assert server.post(*chat(response_format=True)).status_code == 500
    server.assert_answers_as_before()


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    odd: list[Any] = [None, True, False, 0, 1, -1, 2, 7, 511, 512, 2**31, 2**63, -(2**63) - 1, 2**70, 0.0, -0.5, 1e-300]
    odd += [1e300, "", "a", "7", "\x00", "é" * 50, "\U0001f980", [], {}]
    if depth < 3 and rng.random() < 0.3:
        values = [odd_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        return values if rng.random() < 0.6 else dict(zip(["a", "7", "text"], values, strict=False))
    return rng.choice(odd)


GENERATE_FIELDS = """text input_ids input_embeds rid session_id image_data video_data audio_data mm_hashes
    use_audio_in_video sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob
    return_sampling_mask return_text_in_logprobs return_hidden_states return_routed_experts routed_experts_start_len
    return_indexer_topk modalities session_params lora_path lora_id custom_logit_processor positional_embed_overrides
    bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank
    disagg_prefill_dp_rank routing_key conversation_id http_worker_ipc background require_reasoning priority extra_key
    no_logs custom_labels return_bytes return_entropy return_prompt_token_ids external_trace_header received_time
    need_wait_for_mm_inputs num_items_assigned mm_data_mooncake encoder_urls max_dynamic_patch images_config
    multi_item_delimiter_indices""".split()
OPENAI_FIELDS = """frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty seed stop suffix temperature top_p user best_of echo top_k min_p min_tokens json_schema regex ebnf
    repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_params
    custom_params rid extra_key cache_salt priority session_id tools tool_choice
    chat_template_kwargs reasoning_effort return_hidden_states input_ids continue_final_message
    bootstrap_room routed_dp_rank custom_logit_processor return_prompt_token_ids return_meta_info""".split()


def fuzzed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    form = rng.choice(["sampling", "native", "prompt", "chat"])
    path, body = {"sampling": sampling(), "native": native(), "prompt": prompt("abc"), "chat": chat()}[form]
    if form == "sampling":
        names = list(SamplingParameters.model_fields)
        body["sampling_params"] |= {rng.choice(names): odd_value(rng) for _ in range(rng.randint(1, 2))}
    else:
        names = GENERATE_FIELDS if form == "native" else [*OPENAI_FIELDS, "prompt" if form == "prompt" else "messages"]
        body |= {rng.choice(names): odd_value(rng) for _ in range(rng.randint(1, 2))}
    return path, body


def test_no_fuzzed_body_is_answered_with_5xx_or_stops_the_server(server: Server) -> None:
    rng = random.Random(0)
    statuses: dict[int, int] = {}
    failures = []
    for _ in range(FUZZED_BODIES):
        path, body = fuzzed(rng)
        answer = server.post(path, body)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        if not (answer.status_code == 200 or 400 <= answer.status_code < 500):
            failures.append((path, body, answer.status_code, answer.text[:300]))
    assert not failures
    # Neither all refused nor all let through: the bodies reach both sides of the checks.
    assert statuses[200] > FUZZED_BODIES // 10
    assert statuses[400] > FUZZED_BODIES // 10
    server.assert_answers_as_before()
