"""Spans, as a collector gets them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from pydantic import AnyUrl

from tests.ports import free_port
from tests.service.control import ADMIN_KEY, bearer, make_key, processes, runtime
from tests.service.fake_runtime import FakeRuntime
from tests.service.otlp_receiver import Receiver, attributes
from tests.service.servers import serving
from winnow_service.errors import install_error_handlers
from winnow_service.metrics.instruments import Metrics
from winnow_service.proxy.entrance import EntranceMiddleware
from winnow_service.proxy.request_facts import request_facts
from winnow_service.runtime.client import RuntimeClient, RuntimeRequest
from winnow_service.settings import Settings
from winnow_service.tracing.configuration import TracingRefused, tracing_from_environment

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "what nobody may read"


@dataclass(frozen=True)
class Traced:
    """A traced application that forwards ``/generate`` to a runtime."""

    client: httpx.AsyncClient
    runtime: FakeRuntime
    receiver: Receiver
    close: Callable[[], Awaitable[None]]


def forwarding(to_runtime: RuntimeClient) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        request_facts(request.scope).policy = "quest"
        headers = [(name, value) for name, value in request.headers.raw if name.startswith(b"trace")]
        answer = await to_runtime.send(RuntimeRequest("POST", "/generate", b"", headers, await request.body()))

        async def events() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.chunks():
                    yield chunk
            finally:
                await answer.close()

        return StreamingResponse(events(), answer.status, media_type="text/event-stream")

    @app.get("/healthz")
    async def healthz() -> None:
        await to_runtime.get("/health", 5)

    app.add_middleware(EntranceMiddleware, metrics=Metrics())
    return app


@pytest_asyncio.fixture
async def traced(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Traced]:
    receiver, runtime = Receiver(), FakeRuntime()
    async with contextlib.AsyncExitStack() as stack:
        collector = await stack.enter_async_context(serving(receiver.app(), free_port()))
        address = await stack.enter_async_context(serving(runtime.app(), free_port()))
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        tracing = tracing_from_environment(environment)
        assert tracing is not None
        to_runtime = RuntimeClient(AnyUrl(address), "runtime", Settings(), tracing.begin_span)
        stack.push_async_callback(to_runtime.close)
        app = forwarding(to_runtime)
        tracing.install(app)
        service = await stack.enter_async_context(serving(app, free_port()))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=service))
        yield Traced(client, runtime, receiver, tracing.close)


async def post(traced: Traced, headers: dict[str, str] | None = None, **fake: object) -> httpx.Response:
    body = {"stream": True, "text": SECRET, "fake": fake}
    return await traced.client.post("/generate", json=body, headers={"x-request-id": "r-1", **(headers or {})})


async def test_a_request_in_its_clients_trace_goes_on_to_the_runtime(traced: Traced) -> None:
    traceparent = f"00-{TRACE}-{PARENT}-01"
    answer = await post(traced, {"traceparent": traceparent, "tracestate": "vendor=1"})
    assert answer.status_code == 200
    await traced.close()

    server, call = traced.receiver.named("POST /generate"), traced.receiver.named("POST runtime")
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    assert (call.trace_id, call.parent_span_id) == (server.trace_id, server.span_id)
    assert (server.kind, call.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    [asked] = traced.runtime.asked
    assert asked.headers["traceparent"] == f"00-{TRACE}-{call.span_id.hex()}-01"
    assert asked.headers["tracestate"] == "vendor=1"
    assert server.start_time_unix_nano <= call.start_time_unix_nano
    assert call.end_time_unix_nano <= server.end_time_unix_nano

    assert traced.receiver.services == {"winnow"}
    told = attributes(server.attributes)
    assert 0 < float(told.pop("winnow.ttft_seconds")) < 10
    assert told == {
        "http.request.method": "POST",
        "http.route": "/generate",
        "http.response.status_code": 200,
        "winnow.request_id": "r-1",
        "winnow.policy": "quest",
    }
    assert attributes(call.attributes)["http.response.status_code"] == 200
    assert not any(SECRET.encode() in body for body in traced.receiver.bodies)


async def test_a_request_without_a_trace_begins_one(traced: Traced) -> None:
    await post(traced, {"traceparent": "nonsense", "tracestate": "vendor=1"})
    await traced.close()
    server = traced.receiver.named("POST /generate")
    assert not server.parent_span_id
    [asked] = traced.runtime.asked
    assert asked.headers["traceparent"].split("-")[1] == server.trace_id.hex()
    assert "tracestate" not in asked.headers


async def test_a_trace_that_is_not_sampled_is_passed_on_but_not_sent(traced: Traced) -> None:
    await post(traced, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    await traced.close()
    assert traced.receiver.spans == []
    [asked] = traced.runtime.asked
    assert asked.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert asked.headers["traceparent"].endswith("-00")


async def test_the_call_lasts_as_long_as_the_stream_and_fails_with_it(traced: Traced) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await post(traced, chunks=3, die_after=1)
    await traced.close()
    call = traced.receiver.named("POST runtime")
    assert call.status.code == Status.STATUS_CODE_ERROR
    assert attributes(call.attributes)["error.type"] == "ClientPayloadError"


async def test_a_failed_answer_is_an_error_of_both(traced: Traced) -> None:
    await post(traced, status=503)
    await traced.close()
    assert {span.name: span.status.code for span in traced.receiver.spans} == {
        "POST /generate": Status.STATUS_CODE_ERROR,
        "POST runtime": Status.STATUS_CODE_ERROR,
    }


async def test_a_client_that_leaves_ends_its_spans(traced: Traced) -> None:
    asking = asyncio.create_task(post(traced, chunks=2, gated=True))
    await traced.runtime.answering.wait()
    asking.cancel()
    await asyncio.wait_for(traced.runtime.aborted.wait(), 10)
    await traced.close()
    assert {span.name for span in traced.receiver.spans} == {"POST /generate", "POST runtime"}


async def test_probes_and_what_they_ask_are_not_traced(traced: Traced) -> None:
    assert (await traced.client.get("/healthz")).status_code == 200
    await traced.close()
    assert traced.receiver.spans == []


async def test_a_collector_that_is_silent_does_not_keep_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with silent:
        address = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        tracing = tracing_from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": address})
        assert tracing is not None
        app = FastAPI()
        app.add_middleware(EntranceMiddleware, metrics=Metrics())
        tracing.install(app)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            await client.get("/")
        # Left to itself, the SDK goes on for longer.
        async with asyncio.timeout(9):
            await tracing.close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_a_wish_there_is_none(environment: dict[str, str]) -> None:
    assert tracing_from_environment(environment) is None


def test_only_http_is_spoken() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(TracingRefused, match="OTEL_EXPORTER_OTLP_PROTOCOL: must be http/protobuf, not 'grpc'"):
        tracing_from_environment(environment)


def test_the_exporter_is_loaded_only_where_it_is_wanted() -> None:
    code = (
        "import json, sys; from winnow_service.tracing.configuration import tracing_from_environment;"
        "import winnow_service.server; tracing_from_environment({});"
        "print(json.dumps([name for name in sys.modules if name.startswith('opentelemetry.exporter')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


async def test_the_service_traces_a_generation_when_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver()
    async with serving(receiver.app(), free_port()) as collector, runtime() as (fake, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector)
        async with processes(f"sqlite:///{tmp_path}/control.db", tmp_path, address, number=1) as [service]:
            made = await make_key(service.client)
            headers = {**bearer(made["key"]), "traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = {"stream": True, "messages": [{"role": "user", "content": SECRET}]}
            await service.client.post("/v1/chat/completions", json=body, headers=headers)
    server, call = receiver.named("POST /v1/chat/completions"), receiver.named("POST runtime")
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    assert call.parent_span_id == server.span_id
    assert attributes(server.attributes)["winnow.key_id"] == made["id"]
    [asked] = fake.asked
    assert asked.headers["traceparent"] == f"00-{TRACE}-{call.span_id.hex()}-01"
    for secret in (SECRET, made["key"], ADMIN_KEY):
        assert not any(secret.encode() in body for body in receiver.bodies)
