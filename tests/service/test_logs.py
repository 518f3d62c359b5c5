"""What the log says, and in which form."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from tests.service.conftest import Deployment
from tests.service.waiting import eventually
from winnow_service.errors import ServiceError, install_error_handlers
from winnow_service.keys.tokens import new_token
from winnow_service.logs import LogFormat, LogLevel, configure_logging
from winnow_service.metrics.instruments import Metrics
from winnow_service.proxy.entrance import EntranceMiddleware
from winnow_service.proxy.request_facts import request_facts

Configure = Callable[..., io.StringIO]
SECRET = "what nobody may read"

logger = logging.getLogger("winnow_service.test")


@pytest.fixture
def configure() -> Iterator[Configure]:
    """Log to what is returned; at the end all loggers are what they were."""
    names = ("", "winnow_service", "uvicorn")
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in names}

    def configured(log_format: LogFormat | None = "json", level: LogLevel = "info") -> io.StringIO:
        stream = io.StringIO()
        configure_logging(log_format, level, stream)
        return stream

    yield configured
    logging.captureWarnings(False)
    for name, (level, handlers) in before.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).handlers[:] = handlers


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_a_json_object_with_the_time_in_utc(configure: Configure) -> None:
    stream = configure()
    logger.info("caf\u00e9\n%s", 5, extra={"fields": {"policy": "quest", "n": 2}})
    [line] = lines(stream)
    assert {name: line[name] for name in line if name != "time"} == {
        "level": "info",
        "logger": "winnow_service.test",
        "message": "caf\u00e9\n5",
        "policy": "quest",
        "n": 2,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert abs(datetime.fromisoformat(line["time"]) - datetime.now(UTC)) < timedelta(minutes=1)


def test_text_has_the_same_without_control_characters(configure: Configure) -> None:
    stream = configure("text")
    logger.warning("one\r\x1b[31mtwo", extra={"fields": {"policy": "quest"}})
    assert re.fullmatch(r"\S+Z WARNING one\ufffd\ufffd\[31mtwo policy=quest\n", stream.getvalue())


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_an_exception_has_its_places_but_no_message(configure: Configure, log_format: LogFormat) -> None:
    stream = configure(log_format)
    try:
        try:
            int(SECRET)
        except ValueError as error:
            raise ExceptionGroup(SECRET, [KeyError(SECRET), FileNotFoundError(2, "no such file")]) from error
    except ExceptionGroup:
        logger.exception("It failed")
    written = stream.getvalue()
    assert SECRET not in written
    for expected in ("ValueError", "ExceptionGroup", "KeyError", "FileNotFoundError: [Errno 2] no such file", "line"):
        assert expected in written


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_keys_are_blotted_out(configure: Configure, log_format: LogFormat) -> None:
    stream = configure(log_format)
    token = new_token()
    logger.error("%s and authorization: Bearer abc.def", token.text, extra={"fields": {"got": f"<{token.text}>"}})
    assert token.text not in stream.getvalue()
    assert "abc.def" not in stream.getvalue()
    assert stream.getvalue().count(f"winnow_{token.key_id}_***") == 2


def test_the_level_is_of_the_services_own_lines(configure: Configure) -> None:
    stream = configure(level="debug")
    # A server in another test of this process may have set a level of its own.
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)
    for name in ("winnow_service.test", "httpcore.http11", "uvicorn.error"):
        logging.getLogger(name).debug(name)
    logging.getLogger("httpx").info("POST /generate?prompt")
    logging.getLogger("uvicorn.error").info("Started")
    assert [line["message"] for line in lines(stream)] == ["winnow_service.test", "Started"]

    stream = configure(level="error")
    logger.warning("no")
    logging.getLogger("uvicorn.error").warning("no")
    logger.error("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]


def test_without_a_terminal_it_is_json() -> None:
    code = (
        "import logging, warnings; from winnow_service.logs import configure_logging;"
        "configure_logging(None, 'info'); logging.getLogger('uvicorn').info('hello'); warnings.warn('careful')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    first, second = map(json.loads, done.stderr.splitlines())
    assert first["message"] == "hello"
    assert "careful" in second["message"]


# The line of a request.


def app() -> FastAPI:
    made = FastAPI()
    install_error_handlers(made)

    @made.get("/items/{name:path}")
    async def item(name: str, request: Request) -> str:
        facts = request_facts(request.scope)
        facts.key_id, facts.policy = "abc", "quest"
        logger.info("inside")
        return name

    @made.get("/refused")
    async def refused() -> None:
        raise ServiceError("body_too_large", limit=5)

    @made.get("/broken")
    async def broken() -> None:
        raise RuntimeError(SECRET)

    @made.get("/stream")
    async def stream(kind: str) -> StreamingResponse:
        return StreamingResponse(iter([b'data: {"' + kind.encode() + b'"}\n\n'] * 2), media_type="text/event-stream")

    @made.get("/healthz")
    async def healthz() -> None:
        """Is asked all the time."""

    made.add_middleware(EntranceMiddleware, metrics=Metrics())
    return made


async def logged(configure: Configure, path: str, level: LogLevel = "info", method: str = "GET") -> list[Any]:
    stream = configure(level=level)
    transport = httpx.ASGITransport(app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        await client.request(method, path, headers={"x-request-id": "r-1"})
    return lines(stream)


async def test_a_request_has_one_line_at_its_end_and_others_have_its_id(configure: Configure) -> None:
    inside, line = await logged(configure, f"/items/{SECRET}?q={SECRET}")
    assert (inside["message"], inside["request_id"]) == ("inside", "r-1")
    assert line.pop("duration_seconds") > 0
    del line["time"]
    assert line == {
        "level": "info",
        "logger": "winnow_service.request_log",
        "message": "GET /items/{name:path}: 200",
        "request_id": "r-1",
        "method": "GET",
        "route": "/items/{name:path}",
        "status": 200,
        "key_id": "abc",
        "policy": "quest",
    }


async def test_a_refusal_is_told_by_its_code(configure: Configure) -> None:
    [line] = await logged(configure, "/refused")
    assert (line["status"], line["error"], line["level"]) == (413, "body_too_large", "info")
    [line] = await logged(configure, f"/none/{SECRET}", method=SECRET.replace(" ", "-"))
    assert (line["status"], line["error"], line["route"], line["method"]) == (404, "not_found", "unmatched", "other")
    assert SECRET not in json.dumps(line)


async def test_an_error_of_the_service_is_a_warning_with_the_id_at_the_exception(configure: Configure) -> None:
    request, exception = sorted(await logged(configure, "/broken"), key=lambda line: "exception" in line)
    assert (request["status"], request["level"]) == (500, "warning")
    assert "RuntimeError" in exception["exception"]
    assert exception["request_id"] == "r-1"
    assert SECRET not in json.dumps([request, exception])


async def test_a_stream_has_the_time_of_its_first_event(configure: Configure) -> None:
    [line] = await logged(configure, "/stream?kind=text")
    assert 0 < line["ttft_seconds"] <= line["duration_seconds"]
    [line] = await logged(configure, "/stream?kind=error")
    assert "ttft_seconds" not in line


async def test_probes_are_logged_for_debugging_alone(configure: Configure) -> None:
    assert await logged(configure, "/healthz") == []
    [line] = await logged(configure, "/healthz", level="debug")
    assert line["level"] == "debug"


async def test_the_service_logs_what_a_generation_was(service: Deployment, configure: Configure) -> None:
    async def ready() -> bool | None:
        return (await service.client.get("/readyz")).status_code == 200 or None

    await eventually(ready)
    stream = configure()
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    body = {
        "stream": True,
        "attention": "exact",
        "fake": {"events": [{"choices": []}, {"choices": [], "usage": usage}]},
    }
    await service.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "r-2"})

    async def logged() -> dict[str, Any] | None:
        return next((line for line in lines(stream) if line.get("request_id") == "r-2"), None)

    # The client has its answer before the line is written.
    line = await eventually(logged)
    assert line.pop("ttft_seconds") <= line.pop("duration_seconds")
    del line["time"]
    assert line == {
        "level": "info",
        "logger": "winnow_service.request_log",
        "message": "POST /v1/chat/completions: 200",
        "request_id": "r-2",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "model": "needle",
        "policy": "dense",
        "policy_name": "exact",
        "outcome": "finished",
        "prompt_tokens": 7,
        "output_tokens": 3,
    }
