"""Several policies on the same prompts: what they are called, how they are asked and how they are compared."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from tests.evaluation.fake_model import FakeModel, find_values, serving
from tests.evaluation.tasks.tiny_tasks import tiny_tasks
from winnow_evaluation.options import OptionError
from winnow_evaluation.over_http.answers import RequestError
from winnow_evaluation.over_http.client import OpenAIClient
from winnow_evaluation.over_http.policies import NO_POLICY, AskedPolicy, not_followed, parse_policies, readable_label
from winnow_evaluation.over_http.report import CellRow, Report, SampleRecord
from winnow_evaluation.over_http.runner import CellResult, Plan, run_plan
from winnow_evaluation.tasks.generation import SampleGenerator
from winnow_evaluation.tasks.scoring import PAIRED_INTERVAL
from winnow_service.cli import evaluate

TACTIC = {"decode": {"policy": "tactic", "p": 0.9}}


def test_policies_come_in_three_forms_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "policies.json"
    file.write_text(json.dumps({"ART on tactic": TACTIC, "preset": "balanced-v1"}))
    texts = ["dense={}", json.dumps(TACTIC), "thrifty", "quick=thrifty"]
    assert parse_policies(texts, file) == (
        AskedPolicy("dense", {}),
        AskedPolicy("tactic p=0.9", TACTIC),
        AskedPolicy("thrifty", "thrifty"),
        AskedPolicy("quick", "thrifty"),
        AskedPolicy("ART on tactic", TACTIC),
        AskedPolicy("preset", "balanced-v1"),
    )
    assert parse_policies([]) == (NO_POLICY,)


@pytest.mark.parametrize(
    ("attention", "label"),
    [
        ({}, "dense"),
        ({"decode": {"policy": "dense"}, "early_termination": None}, "dense"),
        ({"decode": {"policy": "quest", "budget": 512, "full_layers": 0}}, "quest budget=512 full_layers=0"),
        ({"prefill": {"policy": "quoka", "budget_ratio": 0.25}}, "quoka prefill budget_ratio=0.25"),
        (
            {**TACTIC, "early_termination": {"patience": 2}},
            "tactic p=0.9 + early termination patience=2",
        ),
        ({"decode": {"policy": "delta", "delta_layers": [2, 6]}}, "delta delta_layers=[2,6]"),
        ({"something": "else"}, '{"something":"else"}'),
        ({"decode": {"policy": 3}}, '{"decode":{"policy":3}}'),
    ],
)
def test_a_policy_without_a_name_is_called_by_what_it_says(attention: dict[str, Any], label: str) -> None:
    assert readable_label(attention) == label
    assert parse_policies([json.dumps(attention)])[0].label == label


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a={}", f"a={json.dumps(TACTIC)}"], "two policies are called 'a'"),
        (["{}", '{"decode": {"policy": "dense"}}'], "two policies are called 'dense'"),
        (["a|b={}"], r"the name 'a\|b' must be 1 to 64 letters"),
        (["={}"], "the name '' must be"),
        (["a="], "neither JSON"),
        (["a=[1]"], r"must be a JSON object or a name, not \[1\]"),
        (["two words"], "neither JSON"),
    ],
)
def test_bad_policies_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_policies(texts)
    assert caught.value.option == "--policy"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object of at least one policy"),
        ("{}", "must hold a JSON object of at least one policy"),
        ('{"a": 1}', "'a' must be a JSON object or a name, not 1"),
        ('{"a": {}, "a": {}}', "'a' occurs twice"),
        ('{"a=b": {}}', "the name 'a=b' must be"),
        (None, "cannot read .*: No such file"),
    ],
)
def test_a_bad_file_of_policies_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "policies.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        parse_policies([], file)
    assert caught.value.option == "--policies"


class CachingServer:
    """Answers by policy; a prompt seen before is a cached one.

    ``blind`` finds nothing in every third prompt, ``uncounted`` tells no usage, and ``limited`` refuses what is longer
    than the limit.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self.limit = limit
        self.seen: set[str] = set()
        self.streamed: list[tuple[str, str]] = []
        self.under_way = self.most_under_way = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("tokenize"):
            return httpx.Response(404)
        body = json.loads(request.content)
        prompt, policy = body["messages"][0]["content"], body.get("attention")
        if policy == "unknown":
            return httpx.Response(422, json={"detail": "attention: no policy is called unknown"})
        tokens = len(prompt.split())
        usage = {"prompt_tokens": tokens, "completion_tokens": 4}
        if not body.get("stream"):
            return httpx.Response(200, json={"usage": usage})
        if policy == "limited" and tokens > self.limit:
            return httpx.Response(400, json={"detail": "too long"})
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0.002)
        self.under_way -= 1
        self.streamed.append((prompt, policy))
        cached = tokens - 1 if prompt in self.seen else 0
        self.seen.add(prompt)
        values = find_values(prompt)
        if policy == "blind" and int(values[0]) % 3 == 0:
            values = ["none"]
        attention = {
            "decode": {
                "steps": 4, "context_tokens": tokens, "attended_ratio": 0.5, "estimated_share": 0.9,
                "early_termination": {"terminated_ratio": 0.8, "skipped_ratio": 0.3} if policy == "blind" else None,
            },
            "prefill": {"tokens": tokens - cached, "cached_tokens": cached},
        }  # fmt: skip
        choice = {"delta": {"content": " ".join(values)}, "finish_reason": "stop"}
        chunk = {"choices": [choice], "attention": attention, "usage": None if policy == "uncounted" else usage}
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")


class Quiet:
    def __init__(self) -> None:
        self.records: list[SampleRecord] = []
        self.rows: list[CellRow] = []

    def sizing(self, task: str, length: int) -> None: ...

    def asking(self, task: str, length: int) -> None: ...

    def answered(self, record: SampleRecord) -> None:
        self.records.append(record)

    def finished(self, row: CellRow) -> None:
        self.rows.append(row)


async def compare(
    server: CachingServer, *names: str, task: str = "tiny_one", samples: int = 30, length: int = 256, seed: int = 3
) -> tuple[list[CellResult], Quiet]:
    policies = tuple(AskedPolicy(name, name) for name in names)
    plan = Plan((task,), (length,), samples=samples, seed=seed, concurrency=4, policies=policies)
    progress = Quiet()
    with SampleGenerator(tiny_tasks, workers=1) as generator:
        async with OpenAIClient("http://x", model="m", transport=httpx.MockTransport(server)) as client:
            return [cell async for cell in run_plan(plan, client, generator, progress)], progress


async def test_policies_are_asked_behind_the_first_on_the_same_prompts_and_compared() -> None:
    server = CachingServer()
    (cell,), progress = await compare(server, "exact", "blind", "again")
    exact, blind, again = cell.rows
    assert [(row.policy, row.samples, row.errors) for row in cell.rows] == [
        ("exact", 30, 0), ("blind", 30, 0), ("again", 30, 0),
    ]  # fmt: skip
    assert progress.rows == [exact, blind, again]
    assert sorted(progress.records, key=lambda record: record.index) == list(cell.records)
    by_index = [cell.records[start : start + 3] for start in range(0, 90, 3)]
    for index, records in enumerate(by_index):
        assert [(record.index, record.policy) for record in records] == [
            (index, "exact"), (index, "blind"), (index, "again"),
        ]  # fmt: skip
        assert len({record.prompt_sha256 for record in records}) == 1
    assert len({records[0].prompt_sha256 for records in by_index}) == 30
    for prompt in {prompt for prompt, _ in server.streamed}:
        first, *others = [policy for of, policy in server.streamed if of == prompt]
        assert first == "exact"
        assert sorted(others) == ["again", "blind"]
    assert server.most_under_way == 4

    wrong = sum(int(records[0].references[0]) % 3 == 0 for records in by_index)
    assert 0 < wrong < 30
    assert (exact.accuracy, exact.difference, exact.difference_low) == (100.0, None, None)
    assert blind.difference == pytest.approx(-100 * wrong / 30)
    assert blind.accuracy == pytest.approx(100 - 100 * wrong / 30)
    low, high = blind.difference_low, blind.difference_high
    assert low is not None
    assert high is not None
    assert low < -100 * wrong / 30 < high
    # 0 of 30 with a gain, 0 of 30 with a loss: Wilson's bound for each.
    assert again.difference == 0
    assert again.difference_high == pytest.approx(11.35, abs=0.01)
    assert again.difference_low == pytest.approx(-11.35, abs=0.01)

    assert exact.cached_tokens == 0
    assert blind.prompt_tokens is not None
    assert blind.cached_tokens == again.cached_tokens == pytest.approx(blind.prompt_tokens - 1)
    assert exact.estimated_share == pytest.approx(0.9)
    assert (exact.terminated_ratio, exact.skipped_ratio) == (None, None)
    assert blind.terminated_ratio == pytest.approx(0.8)
    assert blind.skipped_ratio == pytest.approx(0.3)


async def test_a_sample_that_a_later_policy_shows_to_be_too_long_is_made_smaller_for_all() -> None:
    server = CachingServer(limit=504)
    (cell,), _ = await compare(server, "uncounted", "limited", task="giant", samples=40, length=512, seed=0)
    assert all(row.errors == 0 for row in cell.rows)
    first, second = cell.records[::2], cell.records[1::2]
    assert [record.prompt_sha256 for record in first] == [record.prompt_sha256 for record in second]
    assert len({record.size for record in first}) > 1
    assert all(record.prompt_tokens is not None and record.prompt_tokens + 8 <= 512 for record in second)


async def test_a_refused_policy_ends_the_run_before_its_first_cell() -> None:
    server = CachingServer()
    with pytest.raises(RequestError, match="policy unknown: HTTP 422: attention: no policy is called unknown"):
        await compare(server, "exact", "unknown")
    assert server.streamed == []


async def test_a_policy_that_the_server_does_not_follow_ends_the_run() -> None:
    """As the runtime itself, asked without the service: it ignores ``attention``, and tells what it did."""

    async def runtime(request: httpx.Request) -> httpx.Response:
        told = {"decode": {"policy": "dense"}, "prefill": {"policy": "dense"}}
        found = request.url.path.endswith("completions")
        return httpx.Response(200 if found else 404, json={"usage": {"prompt_tokens": 3}, "attention": told})

    policies = (AskedPolicy("dense", {}), AskedPolicy("t", TACTIC))
    plan = Plan(("tiny_one",), (256,), samples=1, seed=3, concurrency=1, policies=policies)
    with SampleGenerator(tiny_tasks, workers=1) as generator:
        async with OpenAIClient("http://x", model="m", transport=httpx.MockTransport(runtime)) as client:
            with pytest.raises(RequestError, match=r"policy t: decode was .* 'tactic', and done with 'dense'.*service"):
                [cell async for cell in run_plan(plan, client, generator, Quiet())]


@pytest.mark.parametrize(
    ("asked", "told", "other"),
    [
        ({}, {"decode": {"policy": "dense"}, "prefill": {"policy": "dense"}}, None),
        (TACTIC, {"decode": {"policy": "tactic"}, "prefill": {"policy": "dense"}}, None),
        (TACTIC, {"decode": {"steps": 3}}, None),
        ("thrifty", {"decode": {"policy": "dense"}}, None),
        ({"decode": None, "prefill": {"policy": "quoka"}}, {"decode": {"policy": "dense"}}, None),
        (
            {"prefill": {"policy": "quoka"}},
            {"decode": {"policy": "dense"}, "prefill": {"policy": "dense"}},
            "prefill was asked for with 'quoka', and done with 'dense'",
        ),
        ({}, {"decode": {"policy": "delta"}}, "decode was asked for with 'dense', and done with 'delta'"),
    ],
)
def test_what_a_server_did_is_compared_with_what_was_asked(asked: Any, told: Any, other: str | None) -> None:
    assert not_followed(asked, told) == other


async def test_a_cell_that_does_not_fit_has_a_row_for_each_policy() -> None:
    (cell,), _ = await compare(CachingServer(), "exact", "blind", task="tiny_four", length=30, samples=2)
    assert [(row.policy, row.status) for row in cell.rows] == [("exact", "does not fit"), ("blind", "does not fit")]
    assert cell.records == ()


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "builtin_tasks", tiny_tasks)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(evaluate.evaluate)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.usefixtures("tasks")
def test_a_server_that_ignores_attention_is_compared_all_the_same(tmp_path: Path) -> None:
    fake = FakeModel()
    file, output = tmp_path / "policies.json", tmp_path / "out.json"
    file.write_text(json.dumps({"art": {"early_termination": {}}}))
    with serving(fake) as url:
        result = run(
            "--url", url, "--tasks", "tiny_one", "--lengths", "256,512", "--samples", "5", "--output", str(output),
            "--policy", "dense={}", "--policy", json.dumps(TACTIC), "--policies", str(file),
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = Report.model_validate_json(output.read_text())
    assert report.header.options["policies"] == {
        "dense": {}, "tactic p=0.9": TACTIC, "art": {"early_termination": {}},
    }  # fmt: skip
    assert report.header.complete
    assert report.header.difference_interval == PAIRED_INTERVAL
    assert [(row.length, row.policy) for row in report.rows] == [
        (length, label) for length in (256, 512) for label in ("dense", "tactic p=0.9", "art")
    ]
    assert [body["attention"] for body in fake.streamed()].count(TACTIC) == 10
    assert {record.attention is None for record in report.samples} == {True}
    assert "the server may have ignored --policy" in result.stdout
    assert re.search(r"\| tiny_one +\| +256 +\| tactic p=0.9 +\| 100.0 \[56.6, 100.0\] \| +\+0.0 \[-43", result.stdout)
    assert "Difference: accuracy less that of dense" in result.stdout
    assert "that the server may have cached" in " ".join(result.stdout.split())
    assert "tiny_one at 512, tactic p=0.9: accuracy 100.0 %" in result.stderr


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize(("policy", "shown"), [("mine=thrifty", True), ("thrifty", False)])
def test_one_policy_is_a_column_if_it_was_given_a_name(policy: str, shown: bool) -> None:
    with serving(FakeModel()) as url:
        result = run("--url", url, "--tasks", "tiny_one", "--lengths", "256", "--samples", "2", "--policy", policy)
    assert result.exit_code == 0, result.output
    assert ("| policy |" in result.stdout) == shown
    assert "difference" not in result.stdout.lower()
