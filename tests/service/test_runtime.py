"""The runtime behind the service: how it is named, and what happens when it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from tests.service.control import replica, runtime
from tests.service.fake_runtime import FakeRuntime
from tests.service.test_forwarding import key, samples
from tests.service.waiting import eventually
from winnow_service.cli.serve import serve
from winnow_service.settings import Settings

BREAKER_SECONDS = 0.5


async def until(client: httpx.AsyncClient, **wanted: Any) -> dict[str, Any]:
    """Wait until /readyz says that."""

    async def look() -> dict[str, Any] | None:
        state: dict[str, Any] = (await client.get("/readyz")).json()
        return state if all(state[name] == value for name, value in wanted.items()) else None

    return await eventually(look)


async def test_a_runtime_that_did_not_tell_its_model_is_asked_again(tmp_path: Path) -> None:
    async with runtime() as (fake, address):
        fake.hides_model = True
        async with replica(f"sqlite:///{tmp_path}/control.db", address) as client:
            [state] = (await until(client, ready=True))["runtimes"]
            assert state["model"] == "unknown"
            fake.hides_model = False

            async def named() -> bool | None:
                [state] = (await client.get("/readyz")).json()["runtimes"]
                return state["model"] == "needle" or None

            await eventually(named)


async def test_a_runtime_that_fails_is_left_alone_until_one_request_has_tried(tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"breaker_failures": 3, "breaker_open_seconds": BREAKER_SECONDS}
    store = f"sqlite:///{tmp_path}/control.db"
    async with runtime() as (fake, address), replica(store, address, **bounds) as client:
        await until(client, ready=True)
        runtime_name = address.removeprefix("http://")

        async def state(name: str) -> float:
            return (await samples(client))[key("winnow_runtime_breaker_state", runtime=runtime_name, state=name)]

        for _ in range(3):
            assert await state("closed") == 1
            assert (await client.post("/generate", json={"fake": {"die": True}})).status_code == 502
        refused = await client.post("/generate", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "circuit_open")
        assert refused.headers["retry-after"] == "1"
        assert await state("open") == 1
        readiness = await until(client, ready=False)
        assert "failed several times in a row" in readiness["reason"]
        assert len(fake.asked) == 3

        await until(client, ready=True)
        assert await state("half_open") == 1
        trying = asyncio.create_task(client.post("/generate", json={"fake": {"hang": True}}))
        await eventually(lambda: asked(fake, 4))
        assert (await client.post("/generate", json={})).status_code == 503
        # A client that leaves tells nothing of the runtime: the next one tries.
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        await asyncio.wait_for(fake.aborted.wait(), 5)

        async def served() -> bool | None:
            return (await client.post("/generate", json={})).status_code == 200 or None

        await eventually(served)
        assert await state("closed") == 1
        refusals = (await samples(client))[key("winnow_refusals_total", code="circuit_open")]
        assert refusals >= 2


async def asked(fake: FakeRuntime, number: int) -> bool | None:
    return len(fake.asked) == number or None


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "valid URL"),
        ("http://", "valid URL"),
        ("http://user:secret@a:1", "WINNOW_RUNTIME_API_KEY"),
        ("http://a:1/base?x=1", "nothing behind the path"),
        ("ftp://a", "http"),
        ("http://a:1, http://b:1", "one address, of a runtime or of a balancer in front of several .docs/operation.md"),
        ("dns+http://a:1", "one address, of a runtime or of a balancer in front of several .docs/operation.md"),
    ],
)
def test_addresses_that_are_none_are_refused(url: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_RUNTIME_URL", url)
    with pytest.raises(ValidationError, match=says) as refused:
        Settings()
    assert "secret" not in str(refused.value)


def test_the_former_list_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_RUNTIME_URLS", "http://a:1")
    with pytest.raises(ValidationError, match="WINNOW_RUNTIME_URLS is now WINNOW_RUNTIME_URL"):
        Settings()


def test_several_addresses_on_the_command_line_are_refused() -> None:
    app = typer.Typer()
    app.command()(serve)
    result = CliRunner().invoke(app, ["--runtime-url", "http://a:1", "--runtime-url", "http://b:1"])
    assert result.exit_code == 2
    assert "error: runtime_url:" in result.output
    assert "a balancer in front of several" in result.output
