"""What the service measures: every request once, by bounded labels."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from tests.service.conftest import Deployment
from tests.service.control import ADMIN_KEY, bearer, make_key, processes, replica, runtime
from tests.service.test_attention import SERVED
from tests.service.test_forwarding import Samples, key, samples
from tests.service.waiting import eventually
from winnow_kernels.contract.attention_statistics import decode_context, prefill_context
from winnow_kernels.policies.registry import DECODE_POLICIES
from winnow_service.errors import StoreUnavailable
from winnow_service.metrics.instruments import Metrics
from winnow_service.metrics.state import MeasuredStore
from winnow_service.proxy.answer import AnswerReader
from winnow_service.proxy.body import Form
from winnow_service.proxy.generation import Generation
from winnow_service.proxy.reported_usage import ReportedUsage
from winnow_service.proxy.request_facts import RequestFacts
from winnow_service.store.sqlite import SqliteStore

MODEL = "needle"
QUEST = {"decode": {"policy": "quest"}, "early_termination": {}}
COST: dict[str, Any] = {
    "decode": {
        "policy": "quest",
        "steps": 4,
        "dense_steps": 1,
        "context_tokens": 103,
        "attended_ratio": 0.25,
        "kv_read_ratio": 0.5,
        "early_termination": {"terminated_ratio": 0.8, "skipped_ratio": 0.3},
    },
    "verify": {"verifications": 2, "drafted": 4, "accepted": 1, "tokens_per_verification": 1.5, "dense_steps": 1},
    "audit": {
        "steps": 2,
        "true_share": 0.75,
        "output_error": 0.125,
        "p": 0.875,
        "reached": 0.5,
        "next_token_kl": 0.0625,
        "top1": 0.5,
    },
    "prefill": {"policy": "dense", "tokens": 90, "cached_tokens": 10, "attended_ratio": 1.0, "kv_read_ratio": 1.0},
    "quality": {
        "under_load": {"kl": 0.05, "top1": None, "requests": 9},
        "expected": {"true_share": 0.8125},
        "left": [{"decode": {"policy": "lowbit_top_k", "budget": budget}} for budget in (256, 512)],
    },
}
# 100, 101, 102 and 103 tokens; queries behind 10 to 99.
DECODE_CONTEXT = 406
PREFILL_CONTEXT = 90 * 10 + 90 * 91 / 2
FORMS: dict[str, Any] = {
    "/generate": {
        "whole": {"text": "a", "meta_info": {"prompt_tokens": 100, "completion_tokens": 5, "attention": COST}},
        "stream": [
            {"text": "a", "meta_info": {"prompt_tokens": 100, "completion_tokens": 1, "finish_reason": None}},
            {
                "text": "ab",
                "meta_info": {
                    "prompt_tokens": 100,
                    "completion_tokens": 5,
                    "finish_reason": {"type": "stop"},
                    "attention": COST,
                },
            },
        ],
    },
    "/v1/chat/completions": {
        "whole": {
            "choices": [{"index": 0, "attention": COST}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 5},
            "attention": COST,
        },
        # Without stream_options: no usage, but the attention tells as much.
        "stream": [{"choices": [{"index": 0, "delta": {}}]}, {"choices": [], "attention": COST}],
    },
}


@pytest_asyncio.fixture
async def measured(service: Deployment) -> Deployment:
    """A service that knows its runtime's model."""
    service.runtime.server_info = {"winnow": SERVED}

    async def ready() -> bool | None:
        return (await service.client.get("/readyz")).status_code == 200 or None

    await eventually(ready)
    return service


def of(found: Samples, *prefixes: str) -> dict[str, float]:
    """The samples that are not 0 of metrics that begin so, written as Prometheus does."""
    return {
        f"{name}{{{','.join(f'{label}={value}' for label, value in sorted(labels))}}}": value
        for (name, labels), value in found.items()
        if name.startswith(prefixes) and value
    }


@pytest.mark.parametrize("route", FORMS)
@pytest.mark.parametrize("way", ["whole", "stream"])
async def test_an_answer_is_counted_once_with_all_it_tells(measured: Deployment, route: str, way: str) -> None:
    fake = {"answer": FORMS[route]["whole"]} if way == "whole" else {"events": FORMS[route]["stream"]}
    body = {"attention": QUEST, "stream": way == "stream", "fake": fake}
    assert (await measured.client.post(route, json=body)).status_code == 200
    found = await samples(measured.client)

    generation = {"decode_policy": "quest", "model": MODEL}
    assert of(found, "winnow_generations_total") == {
        f"winnow_generations_total{{decode_policy=quest,model={MODEL},outcome=finished}}": 1
    }
    assert of(found, "winnow_generations_in_flight") == {}
    assert found[key("winnow_prompt_tokens_total", **generation)] == 100
    assert found[key("winnow_cached_prompt_tokens_total", **generation)] == 10
    assert found[key("winnow_output_tokens_total", **generation)] == 5
    assert found[key("winnow_generation_duration_seconds_count", **generation)] == 1
    for name in ("time_to_first_token", "time_per_output_token"):
        assert found.get(key(f"winnow_{name}_seconds_count", **generation)) == (1 if way == "stream" else None)

    decode = {"phase": "decode", "policy": "quest", "model": MODEL}
    prefill = {"phase": "prefill", "policy": "dense", "model": MODEL}
    for labels, attended, read, context in ((decode, 0.25, 0.5, DECODE_CONTEXT), (prefill, 1, 1, PREFILL_CONTEXT)):
        assert found[key("winnow_attended_ratio_count", **labels)] == 1
        assert found[key("winnow_attended_ratio_sum", **labels)] == attended
        assert found[key("winnow_kv_read_ratio_sum", **labels)] == read
        assert found[key("winnow_context_tokens_total", **labels)] == context
        assert found[key("winnow_attended_tokens_total", **labels)] == attended * context
        assert found[key("winnow_kv_read_tokens_total", **labels)] == read * context
    quest = {"policy": "quest", "model": MODEL}
    assert found[key("winnow_decode_steps_total", mode="dense", **quest)] == 1
    assert found[key("winnow_decode_steps_total", mode="sparse", **quest)] == 3
    assert found[key("winnow_terminated_ratio_sum", **quest)] == 0.8
    assert found[key("winnow_skipped_ratio_sum", **quest)] == 0.3
    assert found[key("winnow_early_terminations_total", **quest)] == 1
    assert found[key("winnow_verifications_total", **quest)] == 2
    assert found[key("winnow_drafted_tokens_total", **quest)] == 4
    assert found[key("winnow_accepted_tokens_total", **quest)] == 1
    assert found[key("winnow_tokens_per_verification_sum", **quest)] == 1.5
    assert found[key("winnow_audited_steps_total", **quest)] == 2
    assert found[key("winnow_audited_share_sum", **quest)] == 0.75
    assert found[key("winnow_audited_output_error_sum", **quest)] == 0.125
    assert found[key("winnow_audited_next_token_kl_sum", **quest)] == 0.0625
    assert found[key("winnow_audited_shortfall_sum", promise="p", **quest)] == 0.125
    assert found[key("winnow_audited_shortfall_sum", promise="quality", **quest)] == 0.0625
    assert found[key("winnow_quality_answers_total", quality="under_load", **quest)] == 1
    assert found[key("winnow_left_policy_answers_total", policy="lowbit_top_k", model=MODEL)] == 1


@pytest.mark.parametrize(
    ("body", "outcome", "policy"),
    [
        ({"fake": {"status": 400}}, "rejected", "default"),
        ({"fake": {"status": 500}}, "failed", "default"),
        ({"fake": {"die": True}, "attention": QUEST}, "failed", "quest"),
        ({"fake": {"die_after": 1}, "stream": True}, "failed", "default"),
        ({"fake": {"events": [{"error": {"message": "no"}}]}, "stream": True}, "rejected", "default"),
        ({"text": ["a", "b"], "attention": [QUEST, {}]}, "finished", "mixed"),
    ],
)
async def test_every_request_ends_in_one_way(
    measured: Deployment, body: dict[str, Any], outcome: str, policy: str
) -> None:
    await measured.client.post("/generate", json=body)
    found = await samples(measured.client)
    assert of(found, "winnow_generations") == {
        f"winnow_generations_total{{decode_policy={policy},model={MODEL},outcome={outcome}}}": 1
    }
    first_token = key("winnow_time_to_first_token_seconds_count", decode_policy=policy, model=MODEL)
    assert (first_token in found) == ("die_after" in body.get("fake", {}))
    duration = key("winnow_generation_duration_seconds_count", decode_policy=policy, model=MODEL)
    assert (duration in found) == (outcome == "finished")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_counted_once(measured: Deployment, stream: bool) -> None:
    fake = {"gated": True} if stream else {"hang": True}
    request = asyncio.create_task(measured.client.post("/generate", json={"stream": stream, "fake": fake}))
    await asyncio.wait_for(measured.runtime.answering.wait(), 5)
    assert of(await samples(measured.client), "winnow_generations") == {
        "winnow_generations_in_flight{decode_policy=default}": 1
    }
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)

    async def look() -> bool | None:
        return (
            of(await samples(measured.client), "winnow_generations")
            == {f"winnow_generations_total{{decode_policy=default,model={MODEL},outcome=abandoned}}": 1}
            or None
        )

    await eventually(look)


@pytest.mark.parametrize(
    ("quality", "counted"),
    [
        (None, {}),
        (
            {"under_load": None, "left": []},
            {"winnow_quality_answers_total{model=needle,policy=quest,quality=asked}": 1},
        ),
    ],
)
async def test_an_answer_counts_by_the_quality_that_it_keeps(
    measured: Deployment, quality: Any, counted: dict[str, int]
) -> None:
    fake = {"answer": {"choices": [{"attention": COST | {"quality": quality}}]}}
    assert (await measured.client.post("/v1/completions", json={"fake": fake})).status_code == 200
    assert of(await samples(measured.client), "winnow_quality", "winnow_left") == counted


def generation_of(metrics: Metrics) -> Generation:
    return Generation(metrics, "default", MODEL, RequestFacts(), AnswerReader(Form.NATIVE))


def test_an_abandoned_native_stream_tells_what_it_took() -> None:
    events = [{"meta_info": {"prompt_tokens": 7, "completion_tokens": count}} for count in (1, 2)]
    generation = generation_of(Metrics())
    for event in events:
        generation.feed(b"data: " + encoded(event) + b"\n\n")
    generation.abandon()
    generation.end()
    generation.end()
    metrics = generation._metrics
    assert metrics.output_tokens.labels("default", MODEL)._value.get() == 2
    assert metrics.generations.labels("default", MODEL, "abandoned")._value.get() == 1


async def test_a_refused_request_counts_as_that_alone(measured: Deployment) -> None:
    bad = {"attention": {"decode": {"policy": "quest", "budget": 1}}}
    for body in (bad, bad, {"attention": "nobody"}):
        assert (await measured.client.post("/generate", json=body)).status_code == 422
    await measured.client.post("/generate", content=b"{", headers={"content-type": "application/json"})
    found = await samples(measured.client)
    assert of(found, "winnow_refusals") == {
        "winnow_refusals_total{code=invalid_policy}": 3,
        "winnow_refusals_total{code=invalid_json}": 1,
    }
    assert of(found, "winnow_generations", "winnow_runtime_errors", "winnow_requests_by_decode_policy") == {}


async def test_failures_of_the_runtime_are_no_refusals(deployment: Deployment) -> None:
    assert (await deployment.client.post("/generate", json={})).status_code == 503
    found = await samples(deployment.client)
    assert of(found, "winnow_refusals", "winnow_generations") == {
        "winnow_generations_total{decode_policy=default,model=unknown,outcome=failed}": 1
    }


async def test_labels_stay_few_whatever_clients_send(measured: Deployment) -> None:
    for number in range(3):
        named = {"model": f"mine-{number}", "decode": {"policy": "quest"}}
        strange = {"decode": {"policy": f"new-{number}", "attended_ratio": 0.5}}
        answer = {"model": f"mine-{number}", "choices": [{"attention": strange}]}
        await measured.client.post("/v1/completions", json={**named, "fake": {"answer": answer}})
        policy = {"attention": {"decode": {"policy": "quest"}}, "description": "one"}
        assert (await measured.client.put(f"/v1/policies/mine-{number}", json=policy)).status_code == 201
        await measured.client.post("/v1/completions", json={"attention": f"mine-{number}"})
    found = await samples(measured.client)
    assert not any("mine" in value or "new" in value for _, labels in found for _, value in labels)
    assert found[key("winnow_attended_ratio_count", phase="decode", policy="other", model=MODEL)] == 3
    assert found[key("winnow_stored_policies", decode_policy="quest")] == 3
    kinds = {dict(labels).get("decode_policy") for _, labels in found}
    assert kinds <= {None, "default", "mixed", *DECODE_POLICIES}


async def test_limits_keys_and_the_store(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/control.db"
    async with runtime() as (_, address), replica(store, address, admin_key=ADMIN_KEY, metrics_public=True) as client:
        limited = await make_key(client, limits={"requests_per_minute": 1})
        await make_key(client)
        answers = [await client.post("/generate", json={}, headers=bearer(limited["key"])) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 429, 429]
        await client.post("/generate", json={}, headers=bearer("winnow_0000000000000000_" + "x" * 43))
        await client.delete(f"/v1/keys/{limited['id']}", headers={**bearer(ADMIN_KEY), "if-match": "*"})

        async def read() -> Samples | None:
            found = await samples(client)
            return found if found[key("winnow_store_revisions_read_total", collection="keys")] >= 2 else None

        found = await eventually(read)
        assert found[key("winnow_keys", state="valid")] == 1
        text = (await client.get("/metrics")).text
        for secret in (limited["key"], limited["id"], ADMIN_KEY):
            assert secret not in text
    assert of(found, "winnow_limits_hit") == {"winnow_limits_hit_total{limit=requests}": 2}
    assert of(found, "winnow_refusals") == {
        "winnow_refusals_total{code=rate_limited}": 2,
        "winnow_refusals_total{code=invalid_key}": 1,
    }
    assert found[key("winnow_keys", state="expired")] == 0
    assert found[key("winnow_open")] == 0
    assert found[key("winnow_store_reachable")] == 1
    assert 0 <= found[key("winnow_store_mirror_age_seconds")] < 10
    assert found[key("winnow_store_writes_total", collection="keys")] == 3
    assert found[key("winnow_store_write_duration_seconds_count")] == 3


async def test_a_store_that_is_away(tmp_path: Path) -> None:
    metrics = Metrics()
    store = MeasuredStore(SqliteStore(tmp_path / "not a folder" / "x" / "control.db"), metrics)
    (tmp_path / "not a folder").touch()
    with pytest.raises(StoreUnavailable):
        await store.changes(0)
    with pytest.raises(StoreUnavailable):
        await store.write("policies", "one", {}, "absent", "me")
    await store.close()
    assert metrics.store_read_errors._value.get() == 1
    assert metrics.store_write_errors.labels("policies")._value.get() == 1
    assert metrics.store_writes.labels("policies")._value.get() == 0


async def test_promtool_finds_nothing_to_improve(measured: Deployment) -> None:
    for route, answers in FORMS.items():
        await measured.client.post(route, json={"attention": QUEST, "fake": {"answer": answers["whole"]}})
    text = (await measured.client.get("/metrics")).content
    command = ["promtool", "check", "metrics"]
    checked = await asyncio.to_thread(subprocess.run, command, input=text, capture_output=True, timeout=30, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def encoded(value: Any) -> bytes:
    """As SGLang writes it: without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def native(index: int, **facts: Any) -> bytes:
    return b"data: " + encoded({"index": index, "meta_info": facts}) + b"\n\n"


def test_several_native_answers_in_one_stream() -> None:
    stream = AnswerReader(Form.NATIVE)
    for index, count in ((0, 1), (1, 1), (0, 2), (1, 2)):
        ends = {"finish_reason": {"type": "stop"}} if count == 2 else {}
        stream.read_events(native(index, prompt_tokens=4 + index, completion_tokens=count, **ends))
    stream.read_events(b"data: [DONE]\n\n")
    assert stream.usage == ReportedUsage((), 9, 4, 13, events=4)


def test_several_choices_have_a_cost_each() -> None:
    body = encoded({"choices": [{"attention": COST}, {"attention": None}, {"attention": COST}]})
    answer = AnswerReader(Form.CHAT)
    assert answer.read(body) == body
    assert answer.usage == ReportedUsage((COST, COST), 200, 10)
    stream = AnswerReader(Form.CHAT)
    event = b"data: " + encoded({"choices": [], "attention": [COST, None]}) + b"\n\n"
    assert stream.read_events(event) == event
    assert stream.usage == ReportedUsage((COST,), 100, 5, events=1)


@pytest.mark.parametrize("several", [False, True])
def test_no_part_of_an_answer_is_parsed_twice(monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    parsed: list[bytes] = []

    def counted(text: bytes) -> Any:
        parsed.append(text)
        return from_json(text)

    monkeypatch.setattr("winnow_service.proxy.answer.from_json", counted)
    reader = AnswerReader(Form.NATIVE, ["changed"], several=several)
    events = [native(0, prompt_tokens=7, completion_tokens=count) for count in range(1, 20)]
    for event in events:
        assert reader.read_events(event) == event
    last = native(0, prompt_tokens=7, completion_tokens=20, finish_reason={"type": "stop"}, attention=COST)
    sent = json.loads(reader.read_events(last).removeprefix(b"data: "))
    assert sent["attention"] == sent["meta_info"]["attention"] == {**COST, "warnings": ["changed"]}
    usage = reader.usage
    assert (usage.output_tokens, usage.total_tokens, usage.events) == (20, 27, 20)
    # Which of several answers an event is of, only its JSON says.
    assert len(parsed) == len(set(parsed)) == (20 if several else 2)


_NAMES = (
    "meta_info attention choices usage decode prefill verify early_termination policy steps tokens context_tokens "
    "completion_tokens attended_ratio kv_read_ratio terminated_ratio verifications drafted tokens_per_verification "
    "audit true_share output_error next_token_kl p quality expected left under_load"
).split()
_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(_NAMES),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(_JSON | st.fixed_dictionaries({"meta_info": st.fixed_dictionaries({"attention": _JSON})}))
def test_no_answer_breaks_the_measuring(answer: Any) -> None:
    metrics = Metrics()
    body = encoded(answer)
    generation_of(metrics).end_with(200, body)
    stream = generation_of(metrics)
    stream.feed(b"data: " + body + b"\n\n")
    stream.end()
    values = [sample.value for family in metrics.registry.collect() for sample in family.samples]
    assert all(math.isfinite(value) and value >= 0 for value in values)


def test_contexts_are_the_sums_they_stand_for() -> None:
    assert decode_context(COST["decode"]) == sum(range(100, 104)) == DECODE_CONTEXT
    assert prefill_context(COST["prefill"]) == sum(range(11, 101)) == PREFILL_CONTEXT


async def test_each_process_gives_its_own_and_they_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the runtime's processes share a folder of metrics, and the service has the same environment.
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(shared))
    monkeypatch.setenv("WINNOW_METRICS_PUBLIC", "true")
    async with (
        runtime() as (_, address),
        processes(f"sqlite:///{tmp_path}/control.db", tmp_path, address) as services,
    ):
        clients = [service.client for service in services]
        for client in clients:
            await eventually(lambda client=client: _is_ready(client))  # type: ignore[misc]
        for client, number in zip(clients, (3, 5), strict=True):
            for _ in range(number):
                answer = await client.post("/generate", json={}, headers=bearer(ADMIN_KEY))
                assert answer.status_code == 200
        labels = {"decode_policy": "default", "model": MODEL, "outcome": "finished"}
        found = [(await samples(client))[key("winnow_generations_total", **labels)] for client in clients]
        assert found == [3, 5]
        in_flight = [(await samples(client))[key("winnow_admitted_requests")] for client in clients]
        assert in_flight == [0, 0]


async def _is_ready(client: httpx.AsyncClient) -> bool | None:
    return (await client.get("/readyz")).status_code == 200 or None
