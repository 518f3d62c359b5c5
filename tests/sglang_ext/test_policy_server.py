"""A real server whose requests have policies: what they cost is in every form of answer, and the cache stays true."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.models import ModelShape, write_model, write_weights
from tests.runtime import Runtime, runtime_server
from tests.sglang_ext.conftest import CHUNK, ENVIRONMENT, LOAD_REQUESTS
from tests.sglang_ext.conftest import SERVED_MODEL as MODEL
from winnow_service.policies.profile import ModelProfile

VOCABULARY = ModelShape().vocab_size
STREAMING = {"decode": {"policy": "streaming_llm", "window": 16}}
MESSAGES = [{"role": "user", "content": "abc " * 60}]


@dataclass
class Server:
    http: httpx.Client
    log: Path

    def post(self, path: str, body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Any) -> list[Any]:
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def uncached_tokens(self) -> int:
        state = self.http.get("/server_info").json()["internal_states"][0]
        total: int = state["winnow"]["uncached_generated_tokens_total"]
        return total


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCABULARY), k=length)


def body(input_ids: Any, policy: Any = None, tokens: int = 8, **parameters: Any) -> dict[str, Any]:
    custom = {} if policy is None else {"custom_params": {"attention": json.dumps(policy)}}
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": input_ids, "sampling_params": sampling | custom | parameters}


def assert_cost(cost: Any, policy: str, steps: int) -> None:
    assert (cost["decode"]["policy"], cost["decode"]["steps"]) == (policy, steps)
    assert 0 < cost["decode"]["attended_ratio"] <= 1
    if policy == "streaming_llm":
        assert cost["decode"]["attended_ratio"] < 0.5


@pytest.fixture(scope="module")
def server(small_server: Runtime) -> Iterator[Server]:
    with httpx.Client(base_url=small_server.url, timeout=60) as http:
        yield Server(http, small_server.log)


def forms(server: Server, policy: Any) -> Iterator[tuple[str, httpx.Response]]:
    """Ask in each form with a policy at the top; yield the path and the answer."""
    text = "abc " * 60
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": text, "sampling_params": sampling},
        "/v1/completions": {"model": MODEL, "prompt": text, "max_tokens": 8},
        "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 8},
        "/v1/responses": {"model": MODEL, "input": text, "max_output_tokens": 8},
        "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 8},
    }
    for path, form in bodies.items():
        yield path, server.http.post(path, json=form | {"attention": policy})


def test_each_form_takes_the_policy_at_the_top_as_the_service_does(server: Server) -> None:
    for path, answer in forms(server, STREAMING):
        assert answer.status_code == 200, (path, answer.text)
        told = answer.json()
        cost = told["meta_info"]["attention"] if path == "/generate" else told["attention"]
        assert cost["decode"]["policy"] == "streaming_llm", path
        assert cost["decode"]["attended_ratio"] < 0.5, path


def test_each_form_refuses_a_policy_at_the_top_that_it_cannot_serve(server: Server) -> None:
    for policy, message in (
        ("balanced", "not the name of a policy"),
        ({"decode": {"policy": "none"}}, "attention.dec"),
    ):
        for path, answer in forms(server, policy):
            assert answer.status_code == 400, (path, answer.text)
            assert message in answer.text, path


def test_prompts_of_a_batch_have_policies_of_their_own_at_the_top(server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    batch = {"input_ids": [prompt(200, 1), prompt(200, 2)], "sampling_params": sampling}
    answers = server.post("/generate", batch | {"attention": [STREAMING, {}]})
    assert [answer["meta_info"]["attention"]["decode"]["policy"] for answer in answers] == ["streaming_llm", "dense"]


def test_an_audited_answer_is_the_same_and_tells_what_it_lost(server: Server) -> None:
    for policy in (STREAMING, {"decode": {"policy": "lowbit_top_p", "p": 0.5}}):
        plain = server.post("/generate", body(prompt(400, 3), policy, 20))
        audited = server.post("/generate", body(prompt(400, 3), policy | {"audit": 0.5}, 20))
        assert audited["output_ids"] == plain["output_ids"]
        assert plain["meta_info"]["attention"]["audit"] is None
        audit = audited["meta_info"]["attention"]["audit"]
        assert audit["steps"] in (9, 10)
        assert 0 < audit["true_share"] < 1
        assert audit["output_error"] > 0
        assert (audit["reached"] is None) == (policy == STREAMING)
        audited["meta_info"]["attention"]["audit"] = None
        assert audited["meta_info"]["attention"]["decode"] == plain["meta_info"]["attention"]["decode"]
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    custom = {"custom_params": {"attention": json.dumps(STREAMING | {"audit": 1.0})}}
    told = server.post("/v1/chat/completions", chat | custom)["attention"]["audit"]
    assert told["steps"] > 0


@pytest.mark.parametrize(
    "decode",
    [
        {"policy": "streaming_llm", "window": 16},
        {"policy": "quest", "budget": 64, "full_layers": 0},
        {"policy": "lowbit_top_p", "p": 0.3},
        {"policy": "tactic", "p": 0.5, "full_layers": 0},
    ],
    ids=lambda decode: str(decode["policy"]),
)
def test_comparing_next_tokens_leaves_the_cache_as_it_is(server: Server, decode: Any) -> None:
    """Of two layers: the second's key and value of a token are others after dense attention in the first."""
    vocabulary = {"return_logprob": True, "token_ids_logprob": list(range(VOCABULARY))}

    def answer(policy: Any) -> tuple[Any, Any, Any]:
        information = server.post("/generate", body(prompt(400, 3), policy, 24) | vocabulary)["meta_info"]
        return information["output_token_ids_logprobs"], information["attention"], information["attention"]["audit"]

    # The first to ask builds the index of what they share.
    answer({"decode": decode})
    logprobs, cost, audit = answer({"decode": decode, "audit": {"share": 1.0, "kl": True}})
    plain_logprobs, plain_cost, plain_audit = answer({"decode": decode, "audit": 1.0})
    assert logprobs == plain_logprobs
    assert audit["next_token_kl"] > 1e-6
    assert (plain_audit["next_token_kl"], plain_audit["top1"]) == (None, None)
    audit["next_token_kl"] = audit["top1"] = None
    assert cost == plain_cost


def test_the_first_step_is_compared_with_the_same_step_of_a_dense_request(server: Server) -> None:
    """Before it all that is cached is dense attention's."""
    vocabulary = {"return_logprob": True, "token_ids_logprob": list(range(VOCABULARY))}

    def first_step(policy: Any) -> tuple[torch.Tensor, Any]:
        information = server.post("/generate", body(prompt(500, 8), policy, 2) | vocabulary)["meta_info"]
        logprobs = [logprob for logprob, _, _ in information["output_token_ids_logprobs"][1]]
        return torch.tensor(logprobs, dtype=torch.float64), information["attention"]["audit"]

    dense, _ = first_step(None)
    for policy in (STREAMING, {"decode": {"policy": "lowbit_top_p", "p": 0.5}}):
        sparse, audit = first_step(policy | {"audit": {"share": 1.0, "kl": True}})
        assert audit["steps"] == 1
        assert audit["next_token_kl"] == pytest.approx(float((dense.exp() * (dense - sparse)).sum()), rel=1e-3)
        assert audit["next_token_kl"] > 1e-5
        assert audit["top1"] == float(dense.argmax() == sparse.argmax())


def test_the_server_says_what_a_policy_may_ask(server: Server) -> None:
    for path in ("/server_info", "/get_server_info"):
        information = server.http.get(path).json()["winnow"]
        policies = information.pop("policies")
        assert information.pop("prefill_policies") == ["dense", "quoka"]
        profile = information.pop("profile")
        assert profile.keys() == ModelProfile.model_fields.keys()
        assert (profile["under_load_kl"], profile["load_requests"]) == (0.05, LOAD_REQUESTS)
        assert information == {
            "layers": 2,
            "context_length": 8192,
            "delta_layers": None,
            "sliding_layers": [],
            "linear_layers": [],
            "key_bits": 2,
            "verifies": False,
            "kv_heads": 1,
            "explains": True,
        }
        assert {"dense", "tactic", "quest"} <= set(policies)


@pytest.mark.parametrize("policy", [None, {"decode": {"policy": "dense"}}, STREAMING])
def test_a_native_answer_has_its_cost(server: Server, policy: Any) -> None:
    answer = server.post("/generate", body(prompt(200, 1), policy))
    name = "streaming_llm" if policy == STREAMING else "dense"
    # The first token comes from prefill.
    assert_cost(answer["meta_info"]["attention"], name, 7)
    assert "attention" not in answer["meta_info"]["finish_reason"]


@pytest.mark.parametrize("more", [{}, {"stream_interval": 3}, {"stream_interval": 100}])
def test_a_native_stream_has_it_once_at_its_end(server: Server, more: Any) -> None:
    received = server.events("/generate", body(prompt(200, 2), STREAMING, **more))
    assert [event for event in received if "attention" in event["meta_info"]] == received[-1:]
    assert_cost(received[-1]["meta_info"]["attention"], "streaming_llm", 7)


def test_each_of_a_batch_and_each_sample_has_its_own(server: Server) -> None:
    request = body([prompt(150, 3), prompt(90, 4)], STREAMING)
    request["sampling_params"] = [request["sampling_params"], body(0, None, 5)["sampling_params"]]
    sparse, dense = server.post("/generate", request)
    assert_cost(sparse["meta_info"]["attention"], "streaming_llm", 7)
    assert_cost(dense["meta_info"]["attention"], "dense", 4)
    samples = server.post("/generate", body(prompt(150, 5), STREAMING, n=3, temperature=1))
    assert len(samples) == 3
    for sample in samples:
        assert_cost(sample["meta_info"]["attention"], "streaming_llm", 7)


def openai(path: str, **more: Any) -> dict[str, Any]:
    content = {"messages": MESSAGES} if "chat" in path else {"prompt": "abc " * 60}
    custom = {"custom_params": {"attention": json.dumps(STREAMING)}}
    return {"model": MODEL, "max_tokens": 6, "ignore_eos": True} | content | custom | more


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openai_answers_have_it(server: Server, path: str) -> None:
    answer = server.post(path, openai(path))
    assert_cost(answer["attention"], "streaming_llm", 5)
    assert answer["choices"][0]["attention"] == answer["attention"]
    assert "attention" not in answer["metadata"]
    several = server.post(path, openai(path, n=2))
    assert "attention" not in several
    for choice in several["choices"]:
        assert_cost(choice["attention"], "streaming_llm", 5)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("usage", [False, True])
def test_openai_streams_end_with_it(server: Server, path: str, usage: bool) -> None:
    for choices in (1, 2):
        received = server.events(path, openai(path, n=choices, stream_options={"include_usage": usage}))
        assert [event for event in received if "attention" in event] == received[-1:]
        # Clients of text completions read the first choice of every chunk.
        assert [choice["text"] for choice in received[-1]["choices"]] == [""] * (path == "/v1/completions")
        assert received[-1]["id"] == received[-2]["id"]
        costs = received[-1]["attention"]
        assert isinstance(costs, list) == (choices == 2)
        for cost in costs if choices == 2 else [costs]:
            assert_cost(cost, "streaming_llm", 5)


def test_an_aborted_request_has_it(server: Server) -> None:
    request = body(prompt(60, 6), STREAMING, 3000) | {"stream": True, "rid": "aborted"}
    with server.http.stream("POST", "/generate", json=request) as response:
        events = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {"))
        next(events)
        httpx.post(f"{server.http.base_url}/abort_request", json={"rid": "aborted"})
        last = json.loads(list(events)[-1])
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    # The step that was running when the abort came counts; what it gave is not sent.
    tokens = last["meta_info"]["completion_tokens"]
    assert tokens - 1 <= last["meta_info"]["attention"]["decode"]["steps"] <= tokens + 1
    assert "The attention of request aborted until it was aborted: {" in server.log.read_text()


def test_a_request_aborted_in_the_queue_has_it(server: Server) -> None:
    # As many as run at once, and one more.
    running = [body(prompt(20, seed), None, 600) for seed in range(10, 14)]
    threads = [threading.Thread(target=server.post, args=("/generate", request)) for request in running]
    answers: list[Any] = []
    queued = body(prompt(20, 15), STREAMING, 600) | {"rid": "queued"}
    threads.append(threading.Thread(target=lambda: answers.append(server.post("/generate", queued))))
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    httpx.post(f"{server.http.base_url}/abort_request", json={"rid": "queued"})
    for thread in threads:
        thread.join()
    (answer,) = answers
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["attention"]["decode"]["policy"] == "streaming_llm"


def test_costs_are_in_the_metrics(server: Server) -> None:
    server.post("/generate", body(prompt(60, 20), STREAMING))
    text = server.http.get("/metrics/").text
    assert 'sglang_winnow_requests_total{outcome="finished",policy="streaming_llm"}' in text
    assert "sglang_winnow_attended_tokens_total{" in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_policy_is_refused_for_its_request_alone(server: Server, stream: bool) -> None:
    bad = {"decode": {"policy": "quest", "budget": 1}}
    message = "attention.decode.budget: must be greater than or equal to 16"
    answer = server.http.post("/generate", json=body(prompt(20, 30), bad) | {"stream": stream})
    # SGLang has sent status 200 before it looks at a native stream.
    assert answer.status_code == (200 if stream else 400)
    assert message in answer.text
    for path in ("/v1/chat/completions", "/v1/completions"):
        custom = {"custom_params": {"attention": json.dumps(bad)}}
        answer = server.http.post(path, json=openai(path, stream=stream) | custom)
        assert answer.status_code == 400
        assert message in answer.text
    server.post("/generate", body(prompt(20, 31)))


def test_sparse_tokens_are_not_kept_for_the_next_turn(server: Server) -> None:
    first = prompt(100, 40)
    for policy, cached in ((None, 192), (STREAMING, 96)):
        opening = [7 if policy else 8, *first]
        before = server.uncached_tokens()
        answer = server.post("/generate", body(opening, policy, 100))
        # With overlap scheduling, the KV of the last token is computed too; later releases do not tell the cache of it.
        assert server.uncached_tokens() - before in ((0,) if policy is None else (99, 100))
        turn = [*opening, *answer["output_ids"], *prompt(10, 41)]
        assert server.post("/generate", body(turn, policy))["meta_info"]["cached_tokens"] == cached


def test_a_sparse_prefill_shares_whole_blocks_with_its_own_policy_only(server: Server) -> None:
    quoka = {"prefill": {"policy": "quoka", "budget": 64, "block": 128}}
    document = prompt(700, 50)
    cached = [
        server.post("/generate", body(document, policy, 1))["meta_info"]["cached_tokens"]
        for policy in (quoka, None, quoka, None)
    ]
    assert cached == [0, 0, 640, 688]
    answer = server.post("/generate", body([*document[:400], *prompt(50, 51)], quoka, 4))
    assert answer["meta_info"]["cached_tokens"] == 384
    assert answer["meta_info"]["attention"]["prefill"]["policy"] == "quoka"


def test_the_observation_window_is_always_computed(server: Server) -> None:
    snapkv = {"decode": {"policy": "snapkv", "observation_window": 32, "budget": 64}}
    document = prompt(256, 60)
    cached = [
        server.post("/generate", body(document, policy, 4))["meta_info"]["cached_tokens"]
        for policy in (None, None, snapkv)
    ]
    assert cached == [0, 240, 224]


@pytest.mark.full
def test_other_ways_through_sglang_carry_the_cost_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", ModelShape())
    write_weights(model)
    arguments = ["--served-model-name", MODEL, "--chunked-prefill-size", str(CHUNK), "--attention-backend", "winnow"]
    arguments += ["--incremental-streaming-output", "--disable-overlap-schedule", "--disable-radix-cache"]
    settings = ENVIRONMENT | {"SGLANG_USE_PICKLE_IPC": "0"}
    with (
        runtime_server(model, *arguments, log=tmp_path / "log", **settings) as runtime,
        httpx.Client(base_url=runtime.url, timeout=60) as http,
    ):
        server = Server(http, tmp_path / "log")
        test_a_native_answer_has_its_cost(server, STREAMING)
        test_a_native_stream_has_it_once_at_its_end(server, {"stream_interval": 3})
        test_each_of_a_batch_and_each_sample_has_its_own(server)
        for path in ("/v1/chat/completions", "/v1/completions"):
            test_openai_answers_have_it(server, path)
            test_openai_streams_end_with_it(server, path, usage=True)
        test_an_aborted_request_has_it(server)
