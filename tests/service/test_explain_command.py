"""``winnow explain``: what it asks, what it draws on a terminal, and the page that it writes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from winnow_service.cli import explain_terminal
from winnow_service.cli.explain_page import page
from winnow_service.cli.explain_terminal import draw, plain
from winnow_service.cli.explanation import heat, share_of, tokens_of
from winnow_service.cli.main import app

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028\x1b[31mred&amp;"


def explained(text: str = "one two three", tokens: int = 3, **changes: Any) -> dict[str, Any]:
    """An explanation of a text that is cut into tokens of one length, in one step, two layers and one head."""
    size = -(-len(text) // tokens)
    offsets = [[at, min(at + size, len(text))] for at in range(0, len(text), size)]
    count = len(offsets) + 1
    weights = [0.5, *[0.5 / (count - 1)] * (count - 1)]
    entry = {"step": 1, "head": 0, "dense": False, "attended": [[0, 1]], "attended_tokens": 1, "share": 0.5}
    policy = {
        "policy": "fast",
        "attention": {"decode": {"policy": "quest"}},
        "fingerprint": "0",
        "warnings": [],
        "output": {"text": "four", "offsets": [[0, 4]]},
        "decode_steps": 1,
        "missing_steps": [8],
        "statistics": {},
        "entries": [entry | {"layer": layer, "weights": weights} for layer in (0, 5)],
    }
    return {
        "prompt": {"text": text, "offsets": offsets},
        "steps": [1, 8],
        "layers": [0, 5],
        "heads": [0],
        "policies": [policy | changes],
    }


def drawn(explanation: dict[str, Any], width: int = 100, **options: Any) -> str:
    output = io.StringIO()
    draw(Console(file=output, width=width, **options), explanation)
    return output.getvalue()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of the service from now on, which explains it."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def post(url: str, **options: Any) -> httpx.Response:
        seen.append((url, options))
        return httpx.Response(200, json=explained())

    monkeypatch.setattr(httpx, "post", post)
    return seen


def run(*arguments: str, text: str = "one two three") -> Any:
    return CliRunner().invoke(app, ["explain", *arguments], input=text)


def test_the_service_is_asked_and_its_answer_drawn(asked: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    written = tmp_path / "page.html"
    policy = '{"decode": {"policy": "quest"}}'
    done = run(
        "-", "--policy", policy, "--policy", "fast", "--steps", "1,8", "--layers", "0,5", "--heads", "0",
        *("--url", "http://127.0.0.1:1/", "--api-key", "k", "--html", str(written)),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    [(url, options)] = asked
    assert url == "http://127.0.0.1:1/v1/attention:explain"
    assert options["headers"] == {"authorization": "Bearer k"}
    assert options["json"] == {
        "prompt": "one two three",
        "policies": [json.loads(policy), "fast"],
        "decode_steps": 8,
        "steps": [1, 8],
        "layers": [0, 5],
        "heads": [0],
    }
    assert "50.0%" in done.output
    assert "Not explained: step 8" in done.output
    assert written.read_text() == page(explained())


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', {"messages": [{"role": "user", "content": "a"}]}),
        ('{"prompt": "a"}', {"prompt": "a"}),
        ('{"other": "a"}', {"prompt": '{"other": "a"}'}),
        ("[1, 2]", {"prompt": "[1, 2]"}),
    ],
)
def test_a_prompt_is_text_or_the_body_of_a_request(
    asked: list[tuple[str, dict[str, Any]]], tmp_path: Path, text: str, question: dict[str, Any]
) -> None:
    file = tmp_path / "prompt"
    file.write_text(text)
    assert run(str(file)).exit_code == 0
    got = asked[0][1]["json"]
    assert {name: got[name] for name in ("prompt", "messages") if name in got} == question
    assert got["policies"] == ["balanced", "fast"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/no/such/file"], "cannot be read"),
        (["-", "--policy", "{"], "is not JSON"),
        (["-", "--layers", "1,x"], "no list of numbers"),
        (["-", "--decode-steps", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_arguments_are_refused(asked: list[Any], arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert says in re.sub(r"[\s\u2502]+", " ", done.output)
    assert asked == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (httpx.Response(403, json={"detail": "This needs a key with the scope 'admin'."}), "the scope 'admin'"),
        (httpx.Response(400, json={"error": {"message": "too long"}}), "refuses (400): too long"),
        (httpx.Response(404, text="<html>"), "without JSON; is it a Winnow service?"),
        (httpx.ConnectError("refused"), "does not answer: refused"),
    ],
)
def test_what_the_service_refuses_is_told(monkeypatch: pytest.MonkeyPatch, answer: Any, says: str) -> None:
    def post(*_: object, **__: object) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        refusal: httpx.Response = answer
        return refusal

    monkeypatch.setattr(httpx, "post", post)
    done = run("-")
    assert done.exit_code == 1
    assert says in done.output


def test_the_help_is_short() -> None:
    done = CliRunner().invoke(app, ["explain", "--help"], env={"COLUMNS": "100"})
    assert done.exit_code == 0
    assert len(done.output.splitlines()) < 50


# On the terminal.


def test_tokens_add_up_over_layers_and_heads() -> None:
    explanation = explained()
    [policy] = explanation["policies"]
    tokens = tokens_of(explanation["prompt"], policy, 1)
    assert "".join(token.text for token in tokens) == "one two threefour"
    assert sum(token.weight for token in tokens) == pytest.approx(1)
    assert [token.attended for token in tokens] == [1, 0, 0, 0]
    share = share_of(policy, 5, 1)
    assert share is not None
    assert (share.share, share.attended, share.dense) == (0.5, 0.25, False)
    assert share_of(policy, None, 8) is None


@given(st.text())
def test_nothing_of_a_prompt_is_obeyed_by_a_terminal(text: str) -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e]", plain(text))
    assert len(plain(text)) == len(text)


def test_a_hostile_prompt_is_drawn_as_it_is() -> None:
    output = drawn(explained(HOSTILE, tokens=5), width=400)
    assert "\x1b" not in output
    assert "</script><script>alert(1)</script>" in output


def test_a_long_strip_keeps_its_ends_and_its_heaviest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_terminal, "_MAX_DRAWN", 200)
    words = [f"w{number:04} " for number in range(1000)]
    explanation = explained("".join(words), tokens=1000)
    for entry in explanation["policies"][0]["entries"]:
        entry["weights"][500] = 0.4
    output = drawn(explanation)
    for number in (0, 500, 999):
        assert words[number].strip() in output
    assert words[300].strip() not in output
    assert "tokens \u2026" in output


def test_colours_tell_what_was_attended_to_and_underlines_what_was_not() -> None:
    output = drawn(explained(), force_terminal=True, color_system="256", _environ={})
    assert re.search(r"\x1b\[[^m]*48;5;208m *one", output)
    assert re.search(r"\x1b\[4;[^m]*48;5;", output)


def test_an_explanation_without_offsets_or_steps_has_still_its_shares() -> None:
    nothing = explained() | {"prompt": {"text": None, "offsets": None}}
    assert "50.0%" in drawn(nothing)
    assert "Not explained" in drawn(explained(entries=[]))
    assert "All policies" in page(explained(entries=[]))


@given(weight=st.floats(0, 1), largest=st.floats(1e-6, 1))
def test_heat_goes_by_the_logarithm(weight: float, largest: float) -> None:
    weight = min(weight, largest)
    assert 0 <= heat(weight, largest) <= 1
    assert heat(largest, largest) == 1
    assert heat(largest / 100, largest) == pytest.approx(0.5)


# The page.


def data_of(text: str) -> str:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("text", [HOSTILE, "plain", "\N{ROCKET} caf\u00e9"])
def test_the_page_has_the_whole_answer_and_nothing_of_it_is_markup(text: str) -> None:
    explanation = explained(text, policy=None, attention={"decode": {"policy": HOSTILE}})
    written = page(explanation)
    assert json.loads(data_of(written)) == explanation
    assert "alert(1)</script>" not in written
    assert "<img" not in written
    assert not re.search(r"[<>&\u2028]", data_of(written))


def test_the_page_needs_nothing_else_and_runs_no_other_script() -> None:
    written = page(explained())
    assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|url\(", written)
    [script] = re.findall(r"<script>(.*?)</script>", written, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in written
    assert "innerHTML" not in script
    assert "prefers-color-scheme: dark" in written
