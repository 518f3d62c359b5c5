"""A server of Qwen3-Next's or Qwen3.5's shape: policies act on the layers with full attention, SGLang runs the others.

On a GPU all is as it is served. Without one, Triton interprets Winnow's kernels, and what SGLang launches for linear
attention is in torch (``linear_in_torch``). SGLang without Winnow's attention, served beside it, says what is expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch

from sglang_winnow import crossover
from sglang_winnow.dense_backend import DENSE_ENVIRONMENT, TRITON
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import ROWS, small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import (
    LOGPROBS,
    TOLERANCE,
    TOLERANCE_OF_SELECTIONS,
    equal_steps,
    prompt_of,
    steps,
)
from tests.sglang_ext.reference import Reference
from tests.sglang_ext.test_device_server import interpreted

# Each token of each request is half a second of interpreted kernels.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ON_CUDA: Final = torch.cuda.is_available()
# All experts of Qwen3-Next compute: in 16 bits rounding would choose among those that score alike.
SHAPE: Final = ModelShape(
    family="qwen3_next",
    layers=4,
    kv_heads=2,
    context_length=2048,
    chosen_experts=4,
    dtype="bfloat16" if ON_CUDA else "float32",
)
LINEAR, FULL = [0, 2], [1, 3]
CHUNK, INTERVAL, STATES_EVERY, PAGE = 512, 32, 64, 16
TOKENS, PROMPT = 4, 300
# Rounding to bfloat16 in another batch moves log-probabilities by hundredths.
ROUNDING = 0.1 if ON_CUDA else TOLERANCE
ROUNDING_OF_SELECTIONS = 0.3 if ON_CUDA else TOLERANCE_OF_SELECTIONS
DIFFERENT = 1e-3
IN_TORCH: Final = Path(__file__).parent / "linear_in_torch"

POLICIES: Final[Mapping[str, Any]] = {name: policy for name, policy in small_policies().items() if name != "dense"}
TERMINATED: Final[Mapping[str, Any]] = {
    "decode": {"policy": "streaming_llm", "window": 256},
    "early_termination": {"scale": 0.5, "direction": 0.5, "patience": 1},
}
QUOKA: Final[Mapping[str, Any]] = {"prefill": {"policy": "quoka", "budget": 64, "block": 128}}
# With what they have by default these read all of a short prompt; a share may be reached sooner.
COVERED: Final[Mapping[str, Any]] = {
    name: {"decode": {"policy": name} | ({"delta_layers": [3]} if name == "delta" else {})}
    for name in POLICIES
    if "budget" in ROWS[name].defaults or "window" in ROWS[name].defaults
}

_ARGUMENTS: Final = (
    *("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384", "--max-running-requests", "4"),
    *("--page-size", str(PAGE), "--mamba-radix-cache-strategy", "extra_buffer", "--max-mamba-cache-size", "64"),
    *("--mamba-track-interval", str(INTERVAL), "--grammar-backend", "none", "--sampling-backend", "pytorch"),
)
_DEVICE: Final = ("--mem-fraction-static", "0.3", "--cuda-graph-bs-decode", "1", "2", "4") if ON_CUDA else ()
# The same dense kernels in both servers: what differs is Winnow's.
_DENSE: Final = ("--attention-backend", TRITON if ON_CUDA else "torch_native")


class Server:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=900)

    def post(self, prompt: list[int], policy: Any, tokens: int = TOKENS, **more: Any) -> httpx.Response:
        custom = {"attention": json.dumps(policy)} | more.pop("custom", {})
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": custom}
        return self.http.post("/generate", json={"input_ids": prompt, "sampling_params": parameters} | LOGPROBS | more)

    def ask(self, prompt: list[int], policy: Any, tokens: int = TOKENS, **more: Any) -> Any:
        return self.post(prompt, policy, tokens, **more).raise_for_status().json()


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("linear") / "model", replace(SHAPE, family=request.param))
    write_weights(folder)
    return folder


def _serve(model: Path, log: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    environment |= {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1", "SGLANG_MAMBA_CONV_DTYPE": SHAPE.dtype}
    with runtime_server(model, *_ARGUMENTS, *_DEVICE, *arguments, log=log, **environment) as runtime:
        yield Server(runtime.url)
    # SGLang's words. Libraries tell at exit of other things that may leak.
    assert "memory leak detected" not in log.read_text()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {DENSE_ENVIRONMENT: TRITON} if ON_CUDA else interpreted(SHAPE, IN_TORCH)
    yield from _serve(model, tmp_path_factory.mktemp("own") / "log", "--attention-backend", "winnow", **environment)


@pytest.fixture(scope="module")
def sglang(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang's own attention."""
    environment = {} if ON_CUDA else interpreted(SHAPE, IN_TORCH)
    yield from _serve(model, tmp_path_factory.mktemp("sglang") / "log", *_DENSE, **environment)


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    return prompt_of(length, seed, SHAPE.vocab_size)


def cached(answer: Any) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def cost(answer: Any) -> Any:
    return answer["meta_info"]["attention"]


def test_server_and_answers_tell_which_layers_are_left_out(server: Server) -> None:
    information = server.http.get("/server_info").raise_for_status().json()["winnow"]
    assert (information["linear_layers"], information["sliding_layers"]) == (LINEAR, [])
    answer = cost(server.ask(prompt(0), {}))
    assert (answer["linear_layers"], answer["sliding_layers"]) == (len(LINEAR), 0)


@pytest.mark.parametrize("length", [1, 40, 64, 65, PROMPT, CHUNK + 100])
def test_dense_answers_are_sglangs_own(server: Server, sglang: Server, length: int) -> None:
    text = prompt(length, length)
    for computed in (0, (length - 1) // STATES_EVERY * STATES_EVERY):
        own, expected = server.ask(text, {}), sglang.ask(text, {})
        assert cached(own) == cached(expected) == computed
        equal_steps(own, expected, ROUNDING)
        assert cost(own)["decode"]["attended_ratio"] == 1


@pytest.mark.skipif(ON_CUDA, reason="what SGLang launches on CUDA is its own")
def test_linear_attention_in_torch_is_that_of_transformers(model: Path, sglang: Server) -> None:
    text = prompt(1)
    answer = sglang.ask(text, {})
    reference, tokens = Reference(model), answer["output_ids"]
    assert max(reference.logit_gaps(text, tokens)) < TOLERANCE
    told = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    assert told == pytest.approx(reference.logprobs(text, tokens), abs=TOLERANCE)


@pytest.mark.parametrize("name", COVERED)
def test_a_policy_that_covers_the_context_answers_as_dense_attention(server: Server, sglang: Server, name: str) -> None:
    text = prompt(2)
    answer = server.ask(text, COVERED[name])
    equal_steps(answer, sglang.ask(text, {}), ROUNDING)
    decode = cost(answer)["decode"]
    assert (decode["policy"], decode["dense_steps"]) == (name, decode["steps"])
    assert decode["steps"] == TOKENS - 1


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_reads_less_and_answers_otherwise(server: Server, sglang: Server, name: str) -> None:
    text = prompt(3)
    answer, dense = server.ask(text, POLICIES[name]), sglang.ask(text, {})
    decode = cost(answer)["decode"]
    assert (decode["policy"], decode["dense_steps"]) == (name, 0)
    assert 0 < decode["attended_ratio"] < 1
    # The first token is the prefill's.
    equal_steps({"meta_info": _first(answer)}, {"meta_info": _first(dense)}, ROUNDING)
    pairs = list(zip(steps(answer), steps(dense), strict=True))[1:]
    assert any(own.token != wanted.token or abs(own.logprob - wanted.logprob) > DIFFERENT for own, wanted in pairs)


def _first(answer: Any) -> dict[str, Any]:
    information = answer["meta_info"]
    return {name: information[name][:1] for name in ("output_token_logprobs", "output_top_logprobs")}


def test_ratios_are_of_the_layers_with_full_attention_alone(server: Server) -> None:
    contexts = [PROMPT + step for step in range(1, TOKENS)]
    budget = 96
    decode = cost(server.ask(prompt(4), {"decode": {"policy": "streaming_llm", "sinks": 0, "window": budget}}))[
        "decode"
    ]
    assert decode["steps"] == len(contexts)
    assert decode["attended_ratio"] == pytest.approx(len(contexts) * budget / sum(contexts), abs=1e-6)


def test_policies_in_one_batch_answer_as_alone(server: Server) -> None:
    names = POLICIES if ON_CUDA else ("quest", "snapkv", "delta")
    asked = [{}, *(POLICIES[name] for name in names), TERMINATED, QUOKA]
    alone = [server.ask(prompt(20 + number), policy) for number, policy in enumerate(asked)]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: server.ask(prompt(20 + each[0]), each[1]), enumerate(asked)))
    for own, expected in zip(together, alone, strict=True):
        equal_steps(own, expected, ROUNDING_OF_SELECTIONS)
        assert cost(own)["decode"]["policy"] == cost(expected)["decode"]["policy"]


# More than one copy of the state behind the prompt. The step that overlap runs beyond the end makes none.
BEHIND, LONG_ANSWER = 250, 2 * INTERVAL + 10
LAST_COPY: Final = (BEHIND + LONG_ANSWER - 1) // INTERVAL * INTERVAL


@pytest.mark.parametrize("name", ["quest", "streaming_llm"])
def test_a_dense_turn_goes_on_from_the_state_of_the_prompt_alone(server: Server, sglang: Server, name: str) -> None:
    """What was decoded sparsely is computed anew: from a state of it, the answer would be another."""
    text = prompt(100 + list(POLICIES).index(name), BEHIND)
    answer = server.ask(text, POLICIES[name], LONG_ANSWER)
    turn = [*text, *answer["output_ids"], *prompt(50, 20)]
    own, expected = server.ask(turn, {}), sglang.ask(turn, {})
    assert cached(own) == BEHIND // STATES_EVERY * STATES_EVERY
    equal_steps(own, expected, ROUNDING)


@pytest.mark.parametrize("answered", [LONG_ANSWER, LONG_ANSWER - 4])
def test_a_dense_answer_is_kept_for_the_next_turn(server: Server, sglang: Server, answered: int) -> None:
    """Also if the last copy is of the step that overlap runs beyond the end."""
    text = prompt(answered, BEHIND)
    answer = server.ask(text, {}, answered)
    assert answer["output_ids"] == sglang.ask(text, {}, answered)["output_ids"] or ON_CUDA
    turn = [*text, *answer["output_ids"], *prompt(51, 20)]
    own, expected = server.ask(turn, POLICIES["quest"]), sglang.ask(turn, {})
    assert cached(own) >= LAST_COPY - INTERVAL
    assert cached(own) == cached(expected) or ON_CUDA
    equal_steps({"meta_info": _first(own)}, {"meta_info": _first(expected)}, ROUNDING)


def test_a_sparse_answer_that_is_kept_is_there_for_its_policy_alone(server: Server) -> None:
    policy = POLICIES["streaming_llm"] | {"keep": True}
    text = prompt(7, BEHIND)
    answer = server.ask(text, policy, LONG_ANSWER)
    assert cost(answer)["decode"]["kept_tokens"] == LAST_COPY - BEHIND
    turn = [*text, *answer["output_ids"], *prompt(52, 20)]
    assert cached(server.ask(turn, {})) == 0
    assert cached(server.ask(turn, policy)) == LAST_COPY


@pytest.mark.parametrize("length", [200, PROMPT, CHUNK + 100])
def test_sparse_prefill_goes_on_from_states_between_blocks(server: Server, sglang: Server, length: int) -> None:
    text = prompt(60 + length, length)
    first = server.ask(text, QUOKA)
    assert cached(first) == 0
    assert cost(first)["prefill"]["attended_ratio"] < 1
    again = server.ask(text, QUOKA)
    assert cached(again) == (length - 1) // 128 * 128
    turn = [*text, *first["output_ids"], *prompt(53, 150)]
    warm, cold = server.ask(turn, QUOKA), server.ask(turn, QUOKA, extra_key="cold")
    assert (cached(warm), cached(cold)) == (length // 128 * 128, 0)
    equal_steps(warm, cold, ROUNDING_OF_SELECTIONS)
    dense = server.ask(turn, {})
    assert cached(dense) == 0
    equal_steps(dense, sglang.ask(turn, {}), ROUNDING)


def test_a_prompt_is_given_back(server: Server, sglang: Server) -> None:
    policy = {"decode": {"policy": "snapkv", "budget": 48, "observation_window": 16, "release": True}}
    text = prompt(8)
    kept = server.ask(text, {"decode": {**policy["decode"], "release": False}})
    answer = server.ask(text, policy)
    assert cost(answer)["decode"]["released_tokens"] >= 0
    equal_steps(answer, kept, ROUNDING_OF_SELECTIONS)
    fresh = server.ask(text, policy, extra_key="alone")
    assert cost(fresh)["decode"]["released_tokens"] > 0
    equal_steps(fresh, kept, ROUNDING_OF_SELECTIONS)
    equal_steps(server.ask(text, {}), sglang.ask(text, {}), ROUNDING)


def test_layers_with_linear_attention_are_neither_chosen_nor_explained(server: Server) -> None:
    delta = {"decode": {"policy": "delta", "budget": 64, "recency": 32, "delta_layers": [0, 1], "full_layers": 0}}
    refused = server.post(prompt(9), delta)
    assert refused.status_code == 400
    assert "layer 0 has linear attention" in refused.text
    for layers, status in ((LINEAR, 400), (FULL, 200)):
        explain = {"attention_explain": json.dumps({"steps": [1], "layers": layers, "heads": [0]})}
        assert server.post(prompt(9), POLICIES["quest"], custom=explain).status_code == status
    assert server.post(prompt(9), POLICIES["quest"] | {"verify": {}}).status_code == 400
