"""``winnow eval --wording ruler``: the beginning of the answer is given over each API, needles lie in real text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from tests.evaluation.fake_model import FakeModel, serving
from winnow_evaluation.over_http.answers import RequestError
from winnow_evaluation.over_http.client import OpenAIClient
from winnow_evaluation.over_http.requests import Api
from winnow_evaluation.text import Document
from winnow_evaluation.text.documents import write_collection
from winnow_service.cli import evaluate

GIVEN = "The special magic number for "


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WINNOW_CACHE_DIR", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(evaluate.evaluate)
    return CliRunner().invoke(app, ["--wording", "ruler", "--lengths", "1024", *arguments], catch_exceptions=False)


def collect(folder: Path) -> str:
    """Write prose of every split; return the one that is held out."""
    documents = [
        Document(f"page-{number}", "made-up", "prose", f"Of page {number} nobody knows the end. " * 50)
        for number in range(40)
    ]
    (folder / "text").mkdir()
    write_collection(folder / "text", documents, {"sha256": "the digest"})
    return " ".join(document.text for document in documents if document.split == "test")


@pytest.mark.parametrize("api", ["chat", "completions", "tokens"])
def test_the_beginning_of_the_answer_is_given(api: str) -> None:
    fake = FakeModel()
    with serving(fake) as url:
        result = run("--url", url, "--tasks", "niah_single_1,niah_multikey_2", "--samples", "3", "--api", api)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("100.0 [43.9, 100.0]") == 2
    assert len(fake.streamed()) == 6
    for body in fake.streamed():
        assert body["max_tokens"] == 128
        if api == "chat":
            asked, begun = body["messages"]
            assert (asked["role"], begun["role"]) == ("user", "assistant")
            assert asked["content"].endswith("mentioned in the provided text?")
            assert begun["content"].startswith(f" {GIVEN}")
            assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
        else:
            prompt = body["prompt"] if api == "completions" else "".join(map(chr, body["prompt"]))
            assert "mentioned in the provided text? The special magic number for " in prompt
            assert prompt.endswith("mentioned in the provided text is")


@pytest.mark.parametrize("continues", ["closes", "refuses"])
def test_a_server_that_cannot_continue_a_chats_answer_is_refused(continues: Any) -> None:
    fake = FakeModel(continues=continues)
    with serving(fake) as url:
        result = run("--url", url, "--tasks", "niah_single_1", "--samples", "3")
        assert result.exit_code == 1
        assert "continue_final_message" in result.stderr
        assert "--api tokens or --api completions" in result.stderr
        assert not fake.streamed()
        other = run("--url", url, "--tasks", "niah_single_1", "--samples", "3", "--api", "completions")
    assert other.exit_code == 0, other.output


async def test_a_failure_while_checking_is_not_taken_for_a_refusal() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(500, text="broken"))
    async with OpenAIClient("http://x", api=Api.CHAT, transport=transport) as client:
        with pytest.raises(RequestError, match=r"^HTTP 500: broken"):
            await client.check_continues("Which way?", " That way")


def test_needles_are_hidden_in_held_out_prose(cache: Path, tmp_path: Path) -> None:
    held_out = collect(cache)
    fake = FakeModel()
    with serving(fake) as url:
        result = run(
            "--url", url, "--tasks", "niah_single_2", "--samples", "4", "--output", str(tmp_path / "out.json")
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    options = json.loads((tmp_path / "out.json").read_text())["header"]["options"]
    assert (options["wording"], options["text"]) == ("ruler", "the digest")
    begins = set()
    for body in fake.streamed():
        prompt = body["messages"][0]["content"].split("\n")[1]
        sentences = [f"{sentence}." for sentence in prompt.split(". ") if "special magic" not in sentence]
        assert all(sentence in held_out for sentence in sentences[:-1])
        begins.add(sentences[0])
    assert len(begins) > 1


def test_without_collected_text_the_tasks_that_need_it_are_refused_by_name() -> None:
    with serving(FakeModel()) as url:
        result = run("--url", url, "--tasks", "all")
    assert result.exit_code == 2
    for word in ("niah_single_2", "winnow text collect"):
        assert word in result.stderr
    assert "niah_single_1" not in result.stderr


def test_the_list_is_that_of_the_wording() -> None:
    result = run("--list")
    assert result.exit_code == 0
    assert "after a worked example" in result.stdout
    assert "records" not in result.stdout
