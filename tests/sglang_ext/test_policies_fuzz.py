"""Policies that nobody thought of: each request is answered or refused, and the server lives on as it was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sglang_winnow import crossover
from sglang_winnow.server_information import PARAMETER, ServedModel
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import DRAFTS_ONLY, ROWS, VOTED
from tests.policy_strategies import Json, json_values, mutated_policies, valid_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, TOLERANCE, TOLERANCE_OF_SELECTIONS, equal_steps, prompt_of
from winnow_kernels.contract.fields import PAGE_TOKENS, PolicyError
from winnow_kernels.policies.registry import DECODE_POLICIES

SHAPE = ModelShape(layers=5, query_heads=4, kv_heads=2, context_length=4096)
CHUNK = 256
# Less than the requests that run at once may need: prompts are evicted all the time.
KV_TOKENS = 4096
AT_ONCE = 6
LONGEST = 1200
# What the indexes of this pool and torch's own caches may still come to once the first requests have been served.
MAX_GROWTH = 128 * 2**20

_tokens = st.integers(PAGE_TOKENS, 400)
_ratio = st.floats(0.01, 0.7)


@st.composite
def _acting_decode(draw: st.DrawFn) -> Json:
    """A decode policy that the model has layers for, and that a prompt of ``LONGEST`` tokens is long enough for."""
    sinks = draw(st.integers(0, 40))
    tokens = st.integers(sinks + PAGE_TOKENS, 400)
    budget = st.fixed_dictionaries({"budget": tokens}) | st.fixed_dictionaries({"budget_ratio": _ratio})
    name = draw(st.sampled_from([name for name in DECODE_POLICIES if name not in DRAFTS_ONLY]))
    fields: Json = {}
    match name:
        case "streaming_llm":
            fields = {"window": draw(_tokens)}
        case "quest":
            fields = {"budget": draw(tokens), "full_layers": draw(st.integers(0, SHAPE.layers))}
        case _ if name in VOTED:
            fields = draw(budget) | {"kernel_size": draw(st.sampled_from([1, 5, 63])), "release": draw(st.booleans())}
            widest = int(min(fields.get("budget", 400), 300)) - sinks - 1
            fields["observation_window"] = draw(st.integers(1, widest))
        case "delta":
            full_layers = draw(st.integers(0, SHAPE.layers - 1))
            layers = draw(st.sets(st.integers(full_layers, SHAPE.layers - 1), min_size=1))
            recency = draw(st.integers(16, 100))
            fields = {"recency": recency, "budget": recency + sinks + draw(st.integers(0, 300))}
            fields |= {"full_layers": full_layers, "delta_layers": sorted(layers)}
        case "tactic":
            fields = {"p": draw(_ratio), "max_tokens": draw(tokens | st.none())}
            fields["full_layers"] = draw(st.integers(0, SHAPE.layers))
        case "quoka" | "lowbit_top_k":
            fields = draw(budget)
        case "lowbit_top_p":
            cap = draw(tokens | st.none())
            fields = {"p": draw(_ratio), "max_tokens": cap, "min_tokens": draw(st.integers(0, cap or 400))}
        case _:
            fields = dict(ROWS[name].small)
    return {"policy": name} | ({} if name == "dense" else {"sinks": sinks}) | fields


@st.composite
def _acting_prefill(draw: st.DrawFn) -> Json:
    block = 16 * draw(st.integers(4, CHUNK // 16))
    sinks = draw(st.integers(0, 40))
    tokens = st.integers(sinks + PAGE_TOKENS, 400)
    budget = st.fixed_dictionaries({"budget": tokens}) | st.fixed_dictionaries({"budget_ratio": _ratio})
    queries = draw(st.integers(1, block))
    return {
        "policy": "quoka",
        "sinks": sinks,
        "block": block,
        "queries": queries,
        "dense_prefix": draw(st.integers(0, 600)),
        "recency_ratio": draw(st.floats(0, 1)),
    } | draw(budget)


_acting_termination = st.fixed_dictionaries(
    {"scale": st.floats(1e-3, 1), "direction": st.floats(1e-3, 2), "patience": st.integers(1, 3)}
)
_acting = st.fixed_dictionaries(
    {"decode": _acting_decode()}, optional={"prefill": _acting_prefill(), "early_termination": _acting_termination}
)
# What stands where a policy's JSON text should.
_parameters = st.one_of(
    *[_acting.map(json.dumps)] * 4,
    valid_policies.map(json.dumps),
    mutated_policies().map(json.dumps),
    st.text(max_size=40) | json_values,
)


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        parameter: its policy, as it travels.
        document: the document with which its prompt begins.
        shared: how many tokens of it.
        own: tokens of its own.
        tokens: to generate.
        stays: whether its client waits for the answer.
    """

    parameter: Any
    document: int
    shared: int
    own: int
    tokens: int
    stays: bool

    @property
    def prompt(self) -> list[int]:
        return _document(self.document)[: self.shared] + prompt_of(self.own, self.shared, SHAPE.vocab_size)

    def body(self) -> Json:
        parameters = {"temperature": 0, "max_new_tokens": self.tokens, "ignore_eos": True}
        custom = {"custom_params": {PARAMETER: self.parameter}}
        return {"input_ids": self.prompt, "sampling_params": parameters | custom} | LOGPROBS

    def is_served(self, model: ServedModel) -> bool:
        try:
            model.policy_of({PARAMETER: self.parameter})
        except PolicyError:
            return False
        return True


@cache
def _document(number: int) -> list[int]:
    return prompt_of(LONGEST, number, SHAPE.vocab_size)


_asked = st.builds(
    Asked,
    parameter=_parameters,
    document=st.integers(0, 3),
    shared=st.just(0) | st.integers(0, LONGEST - 300),
    own=st.integers(1, 300),
    tokens=st.integers(1, 24),
    stays=st.integers(0, 9).map(bool),
)


@dataclass
class Server:
    http: httpx.Client
    page_size: int
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE))

    def ask(self, asked: Asked) -> Any:
        """Return the answer; None if there is none, because it was refused or not waited for."""
        if not asked.stays:
            with self.http.stream("POST", "/generate", json=asked.body() | {"stream": True}) as response:
                next(response.iter_lines(), None)
            return None
        response = self.http.post("/generate", json=asked.body())
        model = ServedModel(SHAPE.layers, SHAPE.context_length, page_size=self.page_size, chunk=CHUNK)
        assert response.status_code == (200 if asked.is_served(model) else 400), (asked, response.text)
        return response.json() if response.is_success else None

    def dense(self) -> Any:
        asked = Asked(None, document=9, shared=700, own=20, tokens=24, stays=True)
        self.http.post("/flush_cache", params={"timeout": 60}).raise_for_status()
        return self.ask(asked)

    def memory(self) -> dict[str, int]:
        """Return the bytes that each of the server's processes holds."""
        processes = psutil.Process().children(recursive=True)
        return {f"{process.name()} {process.pid}": process.memory_info().rss for process in processes}


def assert_plausible(asked: Asked, answer: Any) -> None:
    information = answer["meta_info"]
    assert len(answer["output_ids"]) == asked.tokens, asked
    cost = information["attention"]
    decode, prefill = cost["decode"], cost["prefill"]
    assert cost["retracted"] == information["num_retractions"]
    assert asked.tokens - 1 - cost["retracted"] <= decode["steps"] <= asked.tokens - 1, (asked, cost)
    assert 0 <= decode["dense_steps"] <= decode["steps"]
    assert prefill["tokens"] + prefill["cached_tokens"] >= len(asked.prompt), (asked, cost)
    for phase, happened in ((decode, decode["steps"]), (prefill, prefill["tokens"])):
        assert (phase["attended_ratio"] is None) == (not happened), (asked, cost)
        assert phase["attended_ratio"] is None or 0 < phase["attended_ratio"] <= 1, (asked, cost)
        assert phase["kv_read_ratio"] is None or phase["kv_read_ratio"] > 0, (asked, cost)


@contextmanager
def serve(folder: Path, page_size: int, *arguments: str) -> Iterator[Server]:
    model = write_model(folder / "model", SHAPE)
    write_weights(model)
    arguments = ("--page-size", str(page_size), "--chunked-prefill-size", str(CHUNK), *arguments)
    environment = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    with (
        runtime_server(
            model, "--max-total-tokens", str(KV_TOKENS), *arguments, log=folder / "log", **environment
        ) as runtime,
        httpx.Client(base_url=runtime.url, timeout=120) as http,
    ):
        yield Server(http, page_size)


def ask_whatever(server: Server, requests: int) -> None:
    before = server.dense()
    rounds = -(-requests // AT_ONCE)
    outcomes: Counter[str] = Counter()
    answered: list[tuple[Asked, Any]] = []
    memory: list[dict[str, int]] = []

    # Each request meets what those before it have left behind: to shrink one would prove nothing.
    @settings(
        max_examples=rounds,
        phases=[Phase.generate],
        derandomize=requests <= 300,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(_asked, min_size=AT_ONCE, max_size=AT_ONCE))
    def ask(together: list[Asked]) -> None:
        for asked, answer in zip(together, server.pool.map(server.ask, together), strict=True):
            outcomes["left" if not asked.stays else "refused" if answer is None else "answered"] += 1
            if answer is not None:
                assert_plausible(asked, answer)
                answered.append((asked, answer))
        memory.append(server.memory())

    ask()
    assert sum(outcomes.values()) >= requests
    assert min(outcomes[outcome] for outcome in ("answered", "refused", "left")) > requests // 50, outcomes
    assert equal_steps(server.dense(), before, TOLERANCE) > 0
    settled, last = memory[len(memory) // 3], memory[-1]
    assert any("scheduler" in name for name in last)
    for name, size in last.items():
        assert size - settled[name] < MAX_GROWTH, (name, settled, last)

    # Whoever was answered in the crowd would have been answered the same alone.
    for asked, answer in answered[:: max(1, len(answered) // 25)]:
        server.http.post("/flush_cache", params={"timeout": 60}).raise_for_status()
        alone = server.ask(asked)
        if answer["meta_info"]["num_retractions"] == 0:
            try:
                equal_steps(answer, alone, TOLERANCE_OF_SELECTIONS)
            except AssertionError as error:
                raise AssertionError((asked, answer["meta_info"]["attention"])) from error


@pytest.mark.timeout(600)
def test_whatever_is_asked(tmp_path: Path) -> None:
    with serve(tmp_path, 16) as server:
        ask_whatever(server, 150)


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("page_size", "arguments", "requests"),
    [
        (16, [], 10_000),
        (64, ["--disable-overlap-schedule"], 1000),
        (16, ["--disable-radix-cache"], 1000),
    ],
)
def test_whatever_is_asked_of_servers_for_long(
    tmp_path: Path, page_size: int, arguments: list[str], requests: int
) -> None:
    with serve(tmp_path, page_size, *arguments) as server:
        ask_whatever(server, requests)
