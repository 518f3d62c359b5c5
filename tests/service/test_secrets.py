"""Nothing that clients keep to themselves is in the log or in the metrics of a running service, whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.service.control import ADMIN_KEY, SERVE, bearer, make_key
from tests.service.fake_runtime import FakeRuntime
from tests.service.servers import serving
from tests.service.test_attention import SERVED
from tests.service.waiting import eventually

PROMPT = "zephyr-quilt-marmalade"
ANSWER = "obsidian-teaspoon"
QUERY = "velvet-anchor"
NAME = "saffron-turnstile"
RUNTIME_KEY = secrets.token_urlsafe(32)
STRANGERS_KEY = f"winnow_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"
CHAT, NATIVE = "/v1/chat/completions", "/generate"
BODY_LIMIT_BYTES = 4096


@dataclass(frozen=True)
class Watched:
    """A running service, its runtime, and its log."""

    client: httpx.AsyncClient
    runtime: FakeRuntime
    log: Path
    stop_runtime: contextlib.AsyncExitStack


@contextlib.asynccontextmanager
async def watched(folder: Path, log_format: str) -> AsyncIterator[Watched]:
    runtime = FakeRuntime(server_info={"winnow": SERVED})
    port = free_port()
    log = folder / "log"
    async with contextlib.AsyncExitStack() as stack:
        stop_runtime = await stack.enter_async_context(contextlib.AsyncExitStack())
        address = await stop_runtime.enter_async_context(serving(runtime.app(), free_port(), grace_seconds=1))
        environment = {
            "WINNOW_STORE_URL": f"sqlite:///{folder}/control.db",
            "WINNOW_ADMIN_KEY": ADMIN_KEY,
            "WINNOW_RUNTIME_URL": address,
            "WINNOW_RUNTIME_API_KEY": RUNTIME_KEY,
            "WINNOW_MAX_BODY_BYTES": str(BODY_LIMIT_BYTES),
            "WINNOW_LOG_FORMAT": log_format,
            "WINNOW_LOG_LEVEL": "debug",
        }
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(*SERVE, "--port", str(port)),
                cwd=folder,
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        try:
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)
            await stack.enter_async_context(client)

            async def ready() -> bool | None:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/readyz")).status_code == 200 or None
                return None

            await eventually(ready, timeout_seconds=60)
            yield Watched(client, runtime, log, stop_runtime)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


def asking(**members: Any) -> dict[str, Any]:
    return {"model": PROMPT, "messages": [{"role": "user", "content": PROMPT}], "text": PROMPT, **members}


async def everything_that_can_happen(service: Watched, key: str, limited: str) -> dict[str, int]:
    """Send requests of every kind; returns the status of each by its id."""
    statuses: dict[str, int] = {}

    async def send(name: str, method: str, path: str, sent_key: str | None = key, **options: Any) -> None:
        headers = {"x-request-id": name, **options.pop("headers", {}), **(bearer(sent_key) if sent_key else {})}
        try:
            statuses[name] = (await service.client.request(method, path, headers=headers, **options)).status_code
        except httpx.RemoteProtocolError:
            statuses[name] = 0

    told = {"choices": [{"index": 0, "message": {"content": ANSWER}}], "usage": {"prompt_tokens": 3}}
    chunks = [{"choices": [{"index": 0, "delta": {"content": ANSWER}}]}]
    await send("whole", "POST", CHAT, json=asking(fake={"answer": told}))
    await send("streamed", "POST", f"{CHAT}?q={QUERY}", json=asking(stream=True, fake={"events": chunks}))
    await send("native", "POST", NATIVE, json=asking(attention="fast", fake={"answer": {"text": ANSWER}}))
    await send("no-key", "POST", CHAT, None, json=asking())
    await send("wrong-key", "POST", CHAT, STRANGERS_KEY, json=asking())
    await send("no-scope", "GET", "/v1/keys")
    await send("limited", "POST", CHAT, limited, json=asking())
    await send("limited-again", "POST", CHAT, limited, json=asking())
    await send("no-json", "POST", CHAT, content=f'{{"a": "{PROMPT}" {PROMPT}')
    await send("no-object", "POST", CHAT, content=json.dumps([PROMPT]))
    await send("no-utf8", "POST", CHAT, content=PROMPT.encode() + b"\xff")
    await send("too-large", "POST", CHAT, json=asking(padding="x" * BODY_LIMIT_BYTES))
    await send("no-policy", "POST", CHAT, json=asking(attention=PROMPT))
    await send("bad-policy", "POST", CHAT, json=asking(attention={"decode": {"policy": PROMPT}}))
    await send("bad-field", "POST", NATIVE, json=asking(attention={PROMPT: PROMPT}))
    await send("bad-kind", "POST", NATIVE, json=asking(attention={}, sampling_params=PROMPT))
    await send("no-route", "POST", f"/v1/{PROMPT}", json=asking())
    await send("no-model", "GET", f"/v1/models/{QUERY}")
    await send("no-method", "PATCH", CHAT, json=asking())
    await send("bad-name", "PUT", f"/v1/policies/{NAME}!", ADMIN_KEY, json={"attention": {}})
    await send("policy", "PUT", f"/v1/policies/{NAME}", ADMIN_KEY, json={"attention": {"decode": {"policy": PROMPT}}})
    await send("key-in-header", "GET", "/v1/models", None, headers={"x-api-key": key})
    await send("key-in-query", "GET", f"/v1/models?key={key}", None)
    await send("refused", "POST", CHAT, json=asking(fake={"status": 400}))
    await send("failed", "POST", CHAT, json=asking(fake={"status": 500}))
    await send("broken-off", "POST", CHAT, json=asking(fake={"die": True}))
    await send("stream-broken-off", "POST", CHAT, json=asking(stream=True, fake={"die_after": 1}))
    with contextlib.suppress(httpx.ReadTimeout):
        await send("left", "POST", CHAT, json=asking(fake={"hang": True}), timeout=0.5)
    await service.stop_runtime.aclose()
    await send("away", "POST", CHAT, json=asking())
    return statuses


@pytest.mark.parametrize("log_format", ["json", "text"])
async def test_the_log_and_the_metrics_have_no_secrets(tmp_path: Path, log_format: str) -> None:
    async with watched(tmp_path, log_format) as service:
        made = await make_key(service.client)
        limited = await make_key(service.client, limits={"requests_per_minute": 1})
        statuses = await everything_that_can_happen(service, made["key"], limited["key"])
        metrics = (await service.client.get("/metrics", headers=bearer(ADMIN_KEY))).text
    # Both sides of what can happen did.
    assert {statuses[name] for name in ("whole", "streamed", "native", "limited", "stream-broken-off")} == {200}
    assert {
        name: statuses[name]
        for name in ("no-key", "wrong-key", "no-scope", "limited-again", "no-json", "too-large", "no-policy", "away")
    } == {
        "no-key": 401,
        "wrong-key": 401,
        "no-scope": 403,
        "limited-again": 429,
        "no-json": 400,
        "too-large": 413,
        "no-policy": 422,
        "away": 503,
    }
    log = service.log.read_text()
    for name in (*statuses, "left"):
        assert f'"request_id": "{name}"' in log if log_format == "json" else f"request_id={name} " in log, name
    kept = (PROMPT, ANSWER, QUERY, NAME, ADMIN_KEY, RUNTIME_KEY, STRANGERS_KEY, made["key"], limited["key"])
    for where, text in (("log", log), ("metrics", metrics)):
        for secret in kept:
            # Nor a part of a key that would be enough to tell whose it is.
            tail = secret[-20:]
            assert [line for line in text.splitlines() if tail in line] == [], where


async def test_every_line_of_the_log_is_json(tmp_path: Path) -> None:
    async with watched(tmp_path, "json") as service:
        made = await make_key(service.client)
        await service.client.post(CHAT, json=asking(), headers={**bearer(made["key"]), "x-request-id": "mine"})
    lines = [json.loads(line) for line in service.log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert any(line["logger"].startswith("uvicorn") for line in lines)
    [mine] = [line for line in lines if line.get("request_id") == "mine" and "status" in line]
    assert mine["key_id"] == made["id"]
