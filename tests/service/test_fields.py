"""An upstream that loses fields of requests is refused, and none other is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AnyUrl
from typer.testing import CliRunner

from tests.ports import free_port
from tests.service.control import replica, runtime
from tests.service.servers import serving
from tests.service.test_attention import SERVED
from tests.service.test_runtime import until
from winnow_kernels.policies.registry import DECODE_POLICIES
from winnow_service.cli import doctor
from winnow_service.policies.presets import PRESETS
from winnow_service.runtime.client import RuntimeClient
from winnow_service.runtime.fields import FieldsCheck, FieldsVerdict, check_fields
from winnow_service.settings import Settings

PATHS = ["/generate", "/v1/chat/completions"]
# As a gateway that knows SGLang's own fields, and no others.
KNOWN = {"text", "messages", "model", "sampling_params", "max_tokens", "stream"}


@asynccontextmanager
async def typed_gateway(address: str) -> AsyncIterator[str]:
    """A gateway that reads requests into types of its own, and writes them anew for the runtime at ``address``."""
    app = FastAPI()
    runtime = httpx.AsyncClient(base_url=address)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def rewrite(path: str, request: Request) -> Response:
        if request.method == "GET":
            answer = await runtime.get(f"/{path}", headers={"x-asked": "gateway"})
        else:
            body = {name: value for name, value in (await request.json()).items() if name in KNOWN}
            body.get("sampling_params", {}).pop("custom_params", None)
            answer = await runtime.post(f"/{path}", json=body)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async with runtime, serving(app, free_port(), grace_seconds=1) as gateway:
        yield gateway


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[RuntimeClient]:
    client = RuntimeClient(AnyUrl(address), "runtime", Settings(), None)
    try:
        yield client
    finally:
        await client.close()


async def test_a_gateway_that_writes_requests_anew_is_not_ready_and_gets_nothing(tmp_path: Path) -> None:
    async with (
        runtime() as (fake, address),
        typed_gateway(address) as gateway,
        replica(f"sqlite:///{tmp_path}/control.db", gateway) as client,
    ):

        async def refused() -> Any:
            return (await client.get("/readyz")).json()

        state = await until(client, ready=False)
        while "has not been asked" in state["reason"]:
            state = await refused()
        assert "loses fields of /generate" in state["reason"]
        assert "docs/operation.md, Several runtimes" in state["reason"]
        # It is not asked every time that its health is.
        assert len([asked for asked in fake.asked if asked.method == "POST"]) == 2
        assert (await client.get("/readyz")).status_code == 503


@pytest.mark.parametrize("plain", [False, True])
async def test_what_passes_fields_on_is_ready_and_asked_once(tmp_path: Path, plain: bool) -> None:
    async with runtime() as (fake, address):
        fake.is_plain = plain
        async with replica(f"sqlite:///{tmp_path}/control.db", address) as client:
            await until(client, ready=True)
            fake.healthy = False
            await until(client, ready=False)
            assert fake.probed == PATHS
            fake.healthy = True
            await until(client, ready=True)
            # It may be another.
            assert fake.probed == PATHS * 2
            assert fake.asked == []


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("plain", [False, True])
async def test_verdicts(loses: bool, plain: bool) -> None:
    async with runtime() as (fake, address), client_of(address) as client:
        fake.loses_fields, fake.is_plain = loses, plain
        verdict = await check_fields(client, {})
        assert verdict.certain
        assert (verdict.lost is not None) is loses


async def test_custom_params_alone_may_be_lost() -> None:
    async with runtime() as (fake, address), client_of(address) as client:
        fake.is_plain = True
        fake.server_info = {"winnow": SERVED}
        verdict = await check_fields(client, {})
        assert "loses fields of /generate: custom_params of a request" in str(verdict.lost)


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"error": "no key"}, 401),
        JSONResponse({"error": "unknown model"}, 400),
        JSONResponse({"error": "too much to do"}, 503),
        Response("not JSON"),
    ],
    ids=lambda answer: f"{answer.status_code}",
)
async def test_an_answer_that_tells_nothing_is_no_verdict(answer: Response) -> None:
    app = FastAPI()
    app.add_api_route("/{path:path}", lambda: answer, methods=["POST"], response_model=None)
    async with serving(app, free_port(), grace_seconds=1) as address, client_of(address) as client:
        assert await check_fields(client, {}) == FieldsVerdict(None, certain=False)


async def test_an_upstream_that_was_refused_is_asked_again_after_a_while() -> None:
    now = 0.0
    async with runtime() as (fake, address), client_of(address) as client:
        check = FieldsCheck(client, {}, lambda: now)
        fake.loses_fields = True
        assert await check.lost()
        fake.loses_fields = False
        assert await check.lost()
        assert fake.probed == PATHS
        now = 31.0
        assert await check.lost() is None
        now = 100.0
        assert await check.lost() is None
        assert fake.probed == PATHS * 2


@pytest.mark.parametrize(("loses", "status"), [(False, doctor.Status.OK), (True, doctor.Status.FAILED)])
async def test_the_doctor_says_so(loses: bool, status: doctor.Status) -> None:
    async with runtime() as (fake, address):
        fake.loses_fields = loses
        check = await asyncio.to_thread(doctor.upstream_check, address)
        assert check.status is status
        assert ("loses fields" in check.remedy) is loses


async def policies_check(served: dict[str, Any]) -> doctor.Check:
    async with runtime() as (fake, address):
        fake.server_info = served
        return await asyncio.to_thread(doctor.policies_check, address)


async def test_the_doctor_says_which_policies_are_served() -> None:
    served = {*DECODE_POLICIES} - {"sparq"}
    check = await policies_check({"winnow": SERVED | {"policies": sorted(served), "verifies": True}})
    assert check.status is doctor.Status.OK
    assert check.found == ", ".join(sorted(served))


async def test_the_doctor_says_which_presets_are_refused() -> None:
    check = await policies_check({"winnow": SERVED | {"policies": ["dense", "sparq"], "verifies": True}})
    assert check.status is doctor.Status.OPTIONAL
    asked = {preset.attention.decode.policy for preset in PRESETS.values()} | {"sparq"}
    setting = f"WINNOW_POLICIES={','.join(name for name in DECODE_POLICIES if name in asked - {'dense'})}"
    assert check.remedy == f"refused: balanced, fast, lossless, long-prompt, reasoning; set {setting}"


async def test_the_doctor_says_which_presets_need_a_server_that_verifies() -> None:
    check = await policies_check({"winnow": SERVED | {"policies": list(DECODE_POLICIES), "verifies": False}})
    assert check.status is doctor.Status.OPTIONAL
    assert check.remedy == "refused: lossless; start the runtime with --speculative-algorithm WINNOW"


@pytest.mark.parametrize("served", [{}, {"winnow": SERVED | {"policies": ["dense"], "prefill_policies": ["dense"]}}])
async def test_the_doctor_misses_the_backend(served: dict[str, Any]) -> None:
    check = await policies_check(served)
    assert (check.found, check.status) == ("dense", doctor.Status.OPTIONAL)
    assert "--attention-backend winnow" in check.remedy


async def test_the_doctor_says_that_the_runtime_did_not_tell() -> None:
    check = await policies_check({"winnow": 5})
    assert (check.found, check.status) == ("unknown", doctor.Status.OPTIONAL)
    assert "'winnow' in its /server_info is not as expected" in check.remedy


def test_the_doctor_reads_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_checks", list)
    monkeypatch.setattr(doctor, "device_checks", list)
    monkeypatch.setattr(doctor, "program_checks", list)
    monkeypatch.setenv("COLUMNS", "250")
    app = typer.Typer()
    app.command()(doctor.doctor)
    gone = f"http://127.0.0.1:{free_port()}"
    for arguments, environment in ((["--runtime-url", gone], {}), ([], {"WINNOW_RUNTIME_URL": gone})):
        result = CliRunner().invoke(app, arguments, env=environment)
        assert result.exit_code == 1
        assert "runtime: no answer that tells" in result.output
    refused = CliRunner().invoke(app, ["--runtime-url", "http://a,http://b"])
    assert "must be one address, of a runtime or of a balancer" in refused.output
