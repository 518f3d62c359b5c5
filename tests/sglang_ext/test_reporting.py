"""The way of a request's cost from the scheduler to its answer, part by part."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_winnow import openai_forms, reporting
from sglang_winnow.metrics import METRICS, Metrics
from winnow_kernels.decode.statistics import FIELDS, Field, Statistics
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

QUEST = parse_policy('{"decode": {"policy": "quest"}}')
LENGTH = {"type": "length", "length": 3}


def request(policy: AttentionPolicy = QUEST, *, finished: bool = True, retracted: bool = False) -> Any:
    return SimpleNamespace(
        rid="r",
        winnow_state=SimpleNamespace(
            policy=policy,
            kept_answer=32,
            sliding_layers=15,
            linear_layers=9,
            released=None,
            explanation=None,
            choice=None,
        ),
        cached_tokens=16,
        retraction_count=0,
        is_retracted=retracted,
        finished=lambda: finished,
    )


def result(**columns: float) -> GenerationBatchResult:
    rows = torch.zeros(2, FIELDS, dtype=torch.float64)
    for name, value in columns.items():
        rows[1, Field[name]] = value
    outcome = GenerationBatchResult()
    outcome.winnow_rows = rows
    return outcome


def report(req: Any, reason: dict[str, Any]) -> Any:
    accumulator = SimpleNamespace(finished_reasons=[None, reason])
    reporting.report_finished(None, accumulator, req=req)
    return accumulator.finished_reasons[-1]


async def drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def test_rows_are_noted_after_each_forward_pass_of_the_attention_backend() -> None:
    statistics = Statistics(4, torch.device("cpu"))
    statistics.rows[2, Field.STEPS] = 7
    runner = SimpleNamespace(attn_backend=SimpleNamespace(statistics=statistics))
    batch: Any = SimpleNamespace(req_pool_indices=torch.tensor([3, 2]))
    for backend, noted in (("winnow", True), ("torch_native", False)):
        worker: Any = SimpleNamespace(server_args=SimpleNamespace(attention_backend=backend), model_runner=runner)
        outcome = GenerationBatchResult()
        reporting.note_rows(outcome, worker, batch)
        assert hasattr(outcome, "winnow_rows") == noted
        if noted:
            statistics.rows[2, Field.STEPS] += 1
            reporting.copy_rows(outcome)
            assert outcome.winnow_rows[:, Field.STEPS].tolist() == [0, 7]


def test_steps_after_the_end_do_not_count() -> None:
    req = request(finished=False)
    ended, retracted = request(finished=True), request(finished=False, retracted=True)
    for others in ([ended, req], [retracted, req]):
        reporting.keep_rows(None, SimpleNamespace(reqs=others), result(STEPS=3))
    req.finished = lambda: True
    reporting.keep_rows(None, SimpleNamespace(reqs=[ended, req]), result(STEPS=4))
    reporting.keep_rows(None, SimpleNamespace(reqs=[ended, req]), GenerationBatchResult())
    assert not hasattr(ended, "winnow_row")
    assert not hasattr(retracted, "winnow_row")
    cost = json.loads(report(req, LENGTH)[reporting.KEY])
    assert cost["decode"]["steps"] == 3
    assert cost["prefill"]["cached_tokens"] == 16
    assert (cost["sliding_layers"], cost["linear_layers"]) == (15, 9)
    assert cost["decode"]["kept_tokens"] is None
    req.winnow_state.policy = req.winnow_state.policy.model_copy(update={"keep": True})
    assert json.loads(report(req, LENGTH)[reporting.KEY])["decode"]["kept_tokens"] == 32


def test_a_running_request_and_one_without_policies_report_nothing() -> None:
    assert report(request(finished=False), LENGTH) == LENGTH
    bare = SimpleNamespace(finished=lambda: True)
    assert report(bare, LENGTH) == LENGTH


@pytest.mark.parametrize("given", [None, {"type": "abort", "message": "full", "status_code": 503}])
def test_a_request_aborted_outside_of_a_batch_reports_too(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    req = request()
    reporting.keep_rows(None, SimpleNamespace(reqs=[req, req]), result())
    notice = AbortReq(rid="r", finished_reason=given)
    with caplog.at_level(logging.INFO):
        reporting.report_aborted(None, notice, req)
    assert notice.finished_reason is not None
    cost = json.loads(notice.finished_reason.pop(reporting.KEY))
    assert cost["decode"] == cost["decode"] | {"policy": "quest", "steps": 0, "attended_ratio": None}
    assert notice.finished_reason in (given, {"type": "abort", "message": "Abort in waiting queue"})
    assert "request r until it was aborted" in caplog.text
    other = AbortReq(rid="r")
    reporting.report_aborted(None, other)
    assert other.finished_reason is None


def test_costs_are_counted_with_their_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[tuple[str, ...], float] = {}
    metrics = Metrics()

    def make_counter(name: str, _documentation: str, _labels: tuple[str, ...]) -> Any:
        def labelled(**labels: str) -> Any:
            def inc(amount: float) -> None:
                counted[name, *labels.values()] = counted.get((name, *labels.values()), 0) + amount

            return SimpleNamespace(inc=inc)

        return SimpleNamespace(labels=labelled)

    metrics.export(make_counter)
    monkeypatch.setattr(reporting, "METRICS", metrics)
    for reason in (LENGTH, {"type": "abort", "message": "m"}):
        req = request(finished=False)
        rows = result(DECODE_ATTENDED=10, DECODE_CONTEXT=40, PREFILL_CONTEXT=5)
        reporting.keep_rows(None, SimpleNamespace(reqs=[request(), req]), rows)
        req.finished = lambda: True
        report(req, reason)
    for outcome in ("finished", "aborted"):
        assert counted["sglang_winnow_requests", "quest", outcome] == 1
        assert counted["sglang_winnow_attended_tokens", "decode", "quest", outcome] == 10
        assert counted["sglang_winnow_context_tokens", "decode", "quest", outcome] == 40
        assert counted["sglang_winnow_context_tokens", "prefill", "dense", outcome] == 5
    assert metrics.totals()["context_tokens_total"] == 90
    assert metrics.totals().keys() == METRICS.totals().keys()


async def test_the_cost_moves_from_the_finish_reason_to_its_place() -> None:
    async def responses(_manager: object, _request: object) -> AsyncIterator[dict[str, Any]]:
        yield {"meta_info": {"finish_reason": None}}
        yield {"meta_info": {"finish_reason": LENGTH | {reporting.KEY: '{"retracted":0}'}}}

    first, last = await drain(reporting.wait_and_place(responses, None, None))
    assert first == {"meta_info": {"finish_reason": None}}
    assert last == {"meta_info": {"finish_reason": LENGTH, "attention": {"retracted": 0}}}


CHUNK = 'data: {"id": "7", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{}]}\n\n'


@pytest.mark.parametrize(
    ("count", "costs", "expected"),
    [
        (1, {0: {"a": 1}}, {"a": 1}),
        (2, {1: {"a": 2}, 0: {"a": 1}}, [{"a": 1}, {"a": 2}]),
        (2, {1: {"a": 2}}, [None, {"a": 2}]),
    ],
)
async def test_a_stream_ends_with_the_costs_of_its_choices(count: int, costs: Any, expected: Any) -> None:
    adapted = GenerateReqInput(text="a", sampling_params={"n": count}, stream=True)
    adapted.normalize_batch_and_arguments()

    async def outputs(_manager: object, _request: object) -> AsyncIterator[Any]:
        for index, cost in costs.items():
            yield {"index": index, "meta_info": {"finish_reason": None}}
            yield {"index": index, "meta_info": {"finish_reason": LENGTH, "attention": cost}}

    async def chunks() -> AsyncIterator[str]:
        async for _ in reporting.generate_and_note(outputs, None, adapted):
            yield CHUNK
        yield openai_forms.END

    async def handle(_serving: object, _adapted: object) -> Any:
        return SimpleNamespace(body_iterator=chunks())

    response = await openai_forms.stream_with_costs(handle, None, adapted)
    *_, before, last, end = await drain(response.body_iterator)
    assert (before, end) == (CHUNK, openai_forms.END)
    assert json.loads(last.removeprefix("data: ")) == {
        "id": "7",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
        "attention": expected,
    }


async def test_a_stream_without_costs_is_as_it_was() -> None:
    adapted = GenerateReqInput(text="a", stream=True)
    adapted.normalize_batch_and_arguments()

    async def chunks() -> AsyncIterator[str]:
        yield CHUNK
        yield openai_forms.END

    async def handle(_serving: object, _adapted: object) -> Any:
        return SimpleNamespace(body_iterator=chunks())

    response = await openai_forms.stream_with_costs(handle, None, adapted)
    assert await drain(response.body_iterator) == [CHUNK, openai_forms.END]
