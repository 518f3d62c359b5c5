"""``winnow explain``: what policies attend to on a prompt, drawn on the terminal and as a page."""

from __future__ import annotations

import json
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer

from winnow_service.cli.explain_page import page
from winnow_service.cli.explain_terminal import draw
from winnow_service.cli.terminal import console_of_width, fail

_ROUTE: Final = "/v1/attention:explain"
_STANDARD_INPUT: Final = "-"
_DEFAULT_POLICIES: Final = ("balanced", "fast")
_PLAIN_WIDTH: Final = 120


def explain(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="The prompt: text, or a JSON object with 'messages' or 'prompt'; - for a pipe.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="A policy in JSON, or the name of one; give it up to four times.",
            show_default=", ".join(_DEFAULT_POLICIES),
        ),
    ] = None,
    decode_steps: Annotated[int, typer.Option(min=1, max=256, help="Decode steps of the answer at most.")] = 8,
    steps: Annotated[
        str | None, typer.Option(help="Those to explain, with commas.", show_default="the first and the last")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to explain, with commas.", show_default="four of them")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="KV heads to explain, with commas.", show_default="the first and the last")
    ] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page to this file.")] = None,
    url: Annotated[str, typer.Option(help="Address of the service.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="WINNOW_API_KEY", show_envvar=True, help="A key with the scope admin.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the answer.")] = 600.0,
) -> None:
    """Show which tokens of a prompt policies attend to, and what dense attention would give each.

    Asks a service whose runtime runs on a CPU, or on CUDA with SGLang 0.5.16.
    `winnow sample niah_single_1 | winnow explain -` explains a sample.
    """
    question = _prompt(prompt) | {
        "policies": [_policy(given) for given in policy or _DEFAULT_POLICIES],
        "decode_steps": decode_steps,
        "steps": _numbers(steps, "--steps"),
        "layers": _numbers(layers, "--layers"),
        "heads": _numbers(heads, "--heads"),
    }
    explanation = _ask(url, api_key, question, timeout)
    draw(console_of_width(_PLAIN_WIDTH), explanation)
    if html is not None:
        try:
            html.write_text(page(explanation), encoding="utf-8")
        except OSError as error:
            fail(f"{html} cannot be written: {error}")
        typer.echo(f"Written to {html}.")


def _prompt(name: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if name == _STANDARD_INPUT else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{name} cannot be read: {error}", param_hint="FILE") from error
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if isinstance(body, dict) and isinstance(messages := body.get("messages"), list):
        return {"messages": messages}
    if isinstance(body, dict) and "prompt" in body:
        return {"prompt": body["prompt"]}
    return {"prompt": text}


def _policy(given: str) -> Any:
    if not given.lstrip().startswith("{"):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise typer.BadParameter(f"{given} is not JSON: {error}", param_hint="--policy") from error


def _numbers(given: str | None, option: str) -> list[int] | None:
    if given is None:
        return None
    try:
        return [int(number) for number in given.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{given!r} is no list of numbers with commas between", param_hint=option) from error


def _ask(url: str, api_key: str | None, question: dict[str, Any], timeout: float) -> dict[str, Any]:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        answer = httpx.post(f"{url.rstrip('/')}{_ROUTE}", json=question, headers=headers, timeout=timeout)
        body: Any = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{url} does not answer: {error}")
    except ValueError:
        fail(f"{url} answers {answer.status_code} without JSON; is it a Winnow service?")
    if answer.status_code != HTTPStatus.OK or not isinstance(body, dict):
        fail(f"{url} refuses ({answer.status_code}): {_told(body)}")
    return body


def _told(body: object) -> object:
    """Return the message of an error, the service's or the runtime's."""
    if not isinstance(body, dict):
        return body
    holder = body.get("error")
    inner = holder.get("message") if isinstance(holder, dict) else None
    return body.get("detail") or inner or body.get("message") or body
