"""API keys: who may do what, on every route."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from typer.testing import CliRunner

from tests.ports import free_port
from tests.service.control import ADMIN_KEY, bearer, make_key, replica, runtime
from tests.service.redis_servers import RedisServer, redis_server
from tests.service.test_policies_api import problem
from tests.service.waiting import eventually
from winnow_service.app import create_app
from winnow_service.cli import keys as cli
from winnow_service.keys import keyring, records, tokens
from winnow_service.settings import Settings
from winnow_service.store.open import open_store, parse_store_url

SCOPES = ["infer", "read", "admin"]
# Routes that anybody may ask: the probes.
PUBLIC = {("get", "/healthz"), ("get", "/readyz")}
CLI = (sys.executable, "-m", "winnow_service.cli.keys")
SERVE = (sys.executable, "-m", "winnow_service.cli.serve")


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/control.db"


@contextlib.asynccontextmanager
async def locked(folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A service with an admin key, in front of a runtime."""
    async with runtime() as (_, address), replica(url(folder), address, admin_key=ADMIN_KEY, **settings) as client:
        yield client


def secret_of(key: str) -> str:
    """Return what of a key is secret; it may have underscores of its own."""
    return key.split("_", 2)[2]


def routes() -> list[tuple[str, str, list[str]]]:
    """Every method and path of the OpenAPI document, with the scopes that it says are needed."""
    document = create_app(Settings(store_url=SecretStr("sqlite:///unused"))).openapi()
    return [
        (method, path, [scope for security in operation.get("security", []) for scope in security["key"]])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


def concrete(path: str) -> str:
    return path.replace("{name}", "mine").replace("{key_id}", "0" * 16).replace("{model}", "m")


async def test_every_route_needs_the_scope_that_its_documentation_says(tmp_path: Path) -> None:
    async with locked(tmp_path) as client:
        keys = {scope: bearer((await make_key(client, scopes=[scope]))["key"]) for scope in SCOPES}
        assert len(routes()) > 20
        for method, path, needed in routes():
            await check_route(client, keys, method, path, needed)


async def check_route(
    client: httpx.AsyncClient, keys: dict[str, dict[str, str]], method: str, path: str, needed: list[str]
) -> None:
    async def status(headers: dict[str, str]) -> int:
        # What is wrong with the body is no business of a client without a key.
        answer = await client.request(method, concrete(path), content=b'{"an unfinished body', headers=headers)
        if answer.status_code in (401, 403):
            assert answer.headers["www-authenticate"].startswith('Bearer realm="winnow"')
        return answer.status_code

    where = f"{method} {path}"
    assert (needed == []) == ((method, path) in PUBLIC), where
    if not needed:
        assert await status({}) in (200, 503), where
        return
    [scope] = needed
    assert await status({}) == 401, where
    assert await status(bearer("no such key")) == 401, where
    for other, key in keys.items():
        answered = await status(key)
        assert answered not in (401, 403) if other == scope else answered == 403, (where, other)


async def test_the_answer_says_which_scope_is_missing(tmp_path: Path) -> None:
    async with locked(tmp_path) as client:
        key = bearer((await make_key(client))["key"])
        answer = await client.get("/v1/policies", headers=key)
        assert "'read'" in problem(answer, 403, "scope_missing")
        assert 'error="insufficient_scope", scope="read"' in answer.headers["www-authenticate"]


async def test_a_key_is_made_shown_once_changed_and_revoked(tmp_path: Path) -> None:
    async with locked(tmp_path) as client:
        admin = bearer(ADMIN_KEY)
        body = {
            "name": "Team A",
            "scopes": ["infer", "read"],
            "expires_at": "2100-01-01T00:00:00Z",
            "default_policy": "balanced",
            "bounds": {"min_p": 0.8},
            "limits": {"requests_per_minute": 5},
        }
        answer = await client.post("/v1/keys", json=body, headers=admin)
        assert answer.status_code == 201
        assert answer.headers["cache-control"] == "no-store"
        made = answer.json()
        assert re.fullmatch(r"winnow_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", made["key"])
        location = answer.headers["location"]
        assert location == f"/v1/keys/{made['id']}"

        shown = (await client.get(location, headers=admin)).json()
        assert shown == {name: value for name, value in made.items() if name != "key"}
        assert sorted(shown["scopes"]) == ["infer", "read"]
        assert (shown["bounds"]["min_p"], shown["limits"]["requests_per_minute"]) == (0.8, 5)
        assert (shown["expires_at"], shown["updated_by"]) == ("2100-01-01T00:00:00Z", "environment")
        listed = await client.get("/v1/keys", headers=admin)
        assert listed.json() == {"keys": [shown], "unreadable": []}
        assert secret_of(made["key"]) not in listed.text

        problem(await client.put(location, json=body, headers=admin), 428, "precondition_required", "If-Match")
        changed = {"name": "Team B", "scopes": ["read"]}
        stale = await client.put(location, json=changed, headers={**admin, "if-match": '"9"'})
        problem(stale, 412, "precondition_failed")
        answer = await client.put(location, json=changed, headers={**admin, "if-match": answer.headers["etag"]})
        assert (answer.status_code, answer.json()["name"], answer.json()["limits"]) == (200, "Team B", None)
        assert answer.json()["created_at"] == made["created_at"]
        key = bearer(made["key"])
        assert (await client.get("/v1/policies", headers=key)).status_code == 200
        problem(await client.post("/generate", json={}, headers=key), 403, "scope_missing")

        assert (await client.delete(location, headers=admin)).status_code == 204
        answer = await client.get("/v1/policies", headers=key)
        problem(answer, 401, "invalid_key")
        assert 'error="invalid_token"' in answer.headers["www-authenticate"]
        problem(await client.delete(location, headers=admin), 404, "not_found")
        problem(await client.get(location, headers=admin), 404, "not_found")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"scopes": ["infer"]}, "name", "required"),
    ({"name": "", "scopes": ["infer"]}, "name", "at least 1"),
    ({"name": "a\nb", "scopes": ["infer"]}, "name", "pattern"),
    ({"name": "a", "scopes": []}, "scopes", "at least 1"),
    ({"name": "a", "scopes": ["all"]}, "scopes.0", "'infer', 'read' or 'admin'"),
    ({"name": "a", "scopes": ["infer"], "expires_at": "2001-01-01T00:00:00Z"}, "expires_at", "in the future"),
    ({"name": "a", "scopes": ["infer"], "expires_at": "2100-01-01T00:00:00"}, "expires_at", "timezone"),
    ({"name": "a", "scopes": ["infer"], "expires_at": "9999-12-31T23:59:59-14:00"}, "expires_at", "less than"),
    ({"name": "a", "scopes": ["infer"], "expires_at": 5}, "expires_at", "valid datetime"),
    ({"name": "a", "scopes": ["infer"], "limits": {"requests_per_minute": 0}}, "limits.requests_per_minute", "1"),
    ({"name": "a", "scopes": ["infer"], "limits": {"per_day": 5}}, "limits.per_day", "not permitted"),
    ({"name": "a", "scopes": ["infer"], "default_policy": "A"}, "default_policy", "pattern"),
    ({"name": "a", "scopes": ["infer"], "key": "mine"}, "key", "unknown field"),
]


async def test_a_key_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async with locked(tmp_path) as client:
        for body, param, says in REFUSED:
            answer = await client.post("/v1/keys", json=body, headers=bearer(ADMIN_KEY))
            assert says in problem(answer, 422, "invalid_field", param)
        assert (await client.get("/v1/keys", headers=bearer(ADMIN_KEY))).json() == {"keys": [], "unreadable": []}


async def test_a_web_page_cannot_make_a_key_through_its_readers_browser(tmp_path: Path) -> None:
    async with replica(url(tmp_path)) as client:
        body = b'{"name": "theirs", "scopes": ["admin"]}'
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            answer = await client.post("/v1/keys", content=body, headers={"content-type": media_type})
            problem(answer, 415, "not_json", "content-type")
        assert (await client.get("/v1/keys")).json() == {"keys": [], "unreadable": []}


async def test_a_key_of_a_later_version_lets_nobody_in(tmp_path: Path) -> None:
    async with locked(tmp_path) as client:
        made = await make_key(client, scopes=["read"])
        store = open_store(parse_store_url(url(tmp_path)), "winnow")
        [document] = (await store.changes(0)).documents
        await store.write("keys", made["id"], {**(document.value or {}), "new_bound": 1}, "present", "later")
        await store.close()

        async def refused() -> bool | None:
            return (await client.get("/v1/policies", headers=bearer(made["key"]))).status_code == 503 or None

        await eventually(refused)
        # Whoever cleans up finds it.
        listed = (await client.get("/v1/keys", headers=bearer(ADMIN_KEY))).json()
        assert listed == {"keys": [], "unreadable": [made["id"]]}
        assert f"{made['id']}  unreadable" in (await invoke(tmp_path, "list"))[1]


async def test_a_key_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with locked(tmp_path) as client:
        expiry = datetime.now(UTC) + timedelta(hours=1)
        key = bearer((await make_key(client, scopes=["read"], expires_at=expiry.isoformat()))["key"])
        assert (await client.get("/v1/policies", headers=key)).status_code == 200
        monkeypatch.setattr(keyring, "now", lambda: expiry)
        assert "expired" in problem(await client.get("/v1/policies", headers=key), 401, "invalid_key")
        monkeypatch.setattr(keyring, "now", lambda: expiry - timedelta(seconds=1))
        assert (await client.get("/v1/policies", headers=key)).status_code == 200


async def test_every_replica_refuses_a_revoked_key(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        replica(server.url, admin_key=ADMIN_KEY) as one,
        replica(server.url, admin_key=ADMIN_KEY) as other,
    ):
        made = await make_key(one, scopes=["read"])

        async def status(expected: int) -> bool | None:
            answer = await other.get("/v1/policies", headers=bearer(made["key"]))
            return answer.status_code == expected or None

        await eventually(lambda: status(200))
        await one.delete(f"/v1/keys/{made['id']}", headers=bearer(ADMIN_KEY))
        await eventually(lambda: status(401))


async def test_what_is_stored_is_not_the_key(tmp_path: Path) -> None:
    async with locked(tmp_path) as client:
        made = await make_key(client)
        secret = secret_of(made["key"])
        files = await asyncio.to_thread(lambda: b"".join(file.read_bytes() for file in tmp_path.iterdir()))
    assert hashlib.sha256(made["key"].encode()).hexdigest().encode() in files
    assert secret.encode() not in files


async def test_keys_are_in_no_log_and_no_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with locked(tmp_path, metrics_public=True) as client:
        made = await make_key(client, scopes=["read", "infer"])
        unknown = made["key"][:-4] + "AAAA"
        for key in (made["key"], unknown, ADMIN_KEY):
            for path in ("/v1/policies", "/v1/models", "/v1/keys", "/nothing"):
                await client.get(path, headers=bearer(key))
            await client.post("/generate", json={"fake": {"die": True}}, headers=bearer(key))
        metrics = (await client.get("/metrics")).text
        for key in (secret_of(made["key"]), secret_of(unknown), ADMIN_KEY):
            assert key not in metrics
            for record in caplog.records:
                # The test's own client logs what it sends.
                if not record.name.startswith(("httpcore", "httpx")):
                    assert key not in record.getMessage()
        assert made["key"] not in repr(tokens.Token(made["id"], made["key"]))


async def test_the_runtime_never_sees_a_key(tmp_path: Path) -> None:
    for own in (None, SecretStr("the runtime's own")):
        async with (
            runtime() as (fake, address),
            replica(url(tmp_path), address, admin_key=ADMIN_KEY, runtime_api_key=own) as client,
        ):
            served = {"layers": 2, "context_length": 99, "delta_layers": None}
            fake.server_info = {"winnow": served | {"policies": ["quest"], "prefill_policies": ["dense"]}}
            key = bearer((await make_key(client, scopes=["infer"]))["key"])
            quest = {"decode": {"policy": "quest"}}
            assert (await client.get("/v1/models", headers=key)).status_code == 200
            assert (await client.post("/generate", json={"attention": quest}, headers=key)).status_code == 200
            seen = [asked.headers.get("authorization") for asked in fake.asked]
            seen += [asked.get("authorization") for asked in fake.server_info_asked]
            assert seen == [None if own is None else "Bearer the runtime's own"] * 3


async def test_the_openai_client_authenticates_and_is_told(tmp_path: Path) -> None:
    async with locked(tmp_path) as client:
        key = (await make_key(client, limits={"requests_per_minute": 1}))["key"]
        messages: Any = [{"role": "user", "content": "hello"}]

        async def ask(api_key: str) -> None:
            async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key=api_key, max_retries=0) as asking:
                await asking.chat.completions.create(model="needle", messages=messages)

        with pytest.raises(openai.AuthenticationError, match="unknown or was revoked"):
            await ask("wrong")
        await ask(key)
        with pytest.raises(openai.RateLimitError, match="1 requests per minute") as caught:
            await ask(key)
        assert caught.value.code == "rate_limited"


async def test_metrics_may_be_public(tmp_path: Path) -> None:
    async with locked(tmp_path) as client:
        assert (await client.get("/metrics")).status_code == 401
    async with locked(tmp_path, metrics_public=True) as client:
        assert (await client.get("/metrics")).status_code == 200


# Open and shut.


async def test_without_keys_it_is_open_until_the_first_one(tmp_path: Path) -> None:
    async with replica(url(tmp_path)) as one, replica(url(tmp_path)) as other:
        assert (await one.get("/v1/policies")).status_code == 200
        answer = await one.post("/v1/keys", json={"name": "a", "scopes": ["infer"]})
        assert "first key" in problem(answer, 422, "invalid_field", "scopes")
        made = (await one.post("/v1/keys", json={"name": "a", "scopes": ["admin"]})).json()
        problem(await one.get("/v1/policies"), 401, "missing_key")

        async def shut() -> bool | None:
            return (await other.get("/v1/policies")).status_code == 401 or None

        await eventually(shut)
        # Nor does it open when the last key goes.
        assert (await one.delete(f"/v1/keys/{made['id']}", headers=bearer(made["key"]))).status_code == 204
        problem(await one.get("/v1/policies"), 401, "missing_key")
    async with replica(url(tmp_path)) as again:
        problem(await again.get("/v1/policies"), 401, "missing_key")


async def test_it_is_not_open_where_it_must_not_be(tmp_path: Path) -> None:
    async with replica(url(tmp_path), may_be_open=False) as client:
        problem(await client.get("/v1/policies"), 401, "missing_key")
        assert (await client.get("/healthz")).status_code == 200


async def test_without_its_store_it_lets_in_nobody_but_the_admin_key(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    async with replica(server.url, admin_key=ADMIN_KEY) as client, replica(server.url) as without:
        token = tokens.new_token().text
        problem(await client.get("/v1/policies", headers=bearer(token)), 503, "store_unavailable")
        problem(await without.get("/v1/policies"), 401, "missing_key")
        assert (await client.get("/v1/policies", headers=bearer(ADMIN_KEY))).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        await server.start()
        try:

            async def known() -> bool | None:
                return (await client.get("/v1/policies", headers=bearer(token))).status_code == 401 or None

            await eventually(known)
        finally:
            await server.stop()


@given(st.text())
def test_no_text_is_taken_for_a_token(text: str) -> None:
    real = tokens.new_token()
    assert tokens.matches(real.text, tokens.digest(real.text))
    assert tokens.key_id_of(real.text) == real.key_id
    if text != real.text:
        assert not tokens.matches(text, tokens.digest(real.text))
    assert not tokens.matches(text, None)


def test_a_weak_admin_key_is_refused_without_being_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(admin_key=SecretStr("short and secret"))
    assert "32" in str(caught.value)
    assert "short and secret" not in str(caught.value)


def test_records_are_read_as_they_are_written() -> None:
    settings = records.KeySettings(name="a", scopes=frozenset([records.Scope.INFER]))
    record = records.KeyRecord(**settings.model_dump(), digest="0" * 64, created_at=records.now())
    assert records.KeyRecord.model_validate_json(record.model_dump_json()) == record


# As processes.


async def run(command: tuple[str, ...], *arguments: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 30)
    except TimeoutError:
        process.send_signal(signal.SIGKILL)
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def invoke(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run ``winnow keys`` in a thread of this process."""
    result = await asyncio.to_thread(
        CliRunner().invoke, cli.app, arguments, env={"WINNOW_STORE_URL": url(folder)}, catch_exceptions=False
    )
    return result.exit_code, result.output


async def test_the_command_line_makes_the_first_key(tmp_path: Path) -> None:
    code, output = await invoke(tmp_path, "create", "ops", "--scope", "infer")
    assert (code, "first key" in output) == (1, True)
    code, out, _ = await run(
        CLI, "create", "ops", "--scope", "admin", "--scope", "read", cwd=tmp_path, WINNOW_STORE_URL=url(tmp_path)
    )
    assert code == 0
    key = out.strip()
    async with replica(url(tmp_path)) as client:
        problem(await client.get("/v1/keys"), 401, "missing_key")
        [shown] = (await client.get("/v1/keys", headers=bearer(key))).json()["keys"]
        assert (shown["name"], shown["updated_by"]) == ("ops", "cli")
        code, output = await invoke(tmp_path, "list")
        assert output.split() == [shown["id"], "admin,read", "never", "ops"]
        assert (await invoke(tmp_path, "revoke", shown["id"]))[0] == 0

        async def revoked() -> bool | None:
            return (await client.get("/v1/keys", headers=bearer(key))).status_code == 401 or None

        await eventually(revoked)
    code, output = await invoke(tmp_path, "revoke", "0" * 16)
    assert (code, "does not exist" in output) == (1, True)
    code, output = await invoke(tmp_path, "create", "")
    assert (code, "name:" in output) == (2, True)
    code, output = await invoke(tmp_path, "create", "a", "--expires-in-days", "2")
    assert code == 0
    expiry = datetime.now(UTC) + timedelta(days=2)
    assert f"{expiry:%Y-%m-%d}" in (await invoke(tmp_path, "list"))[1]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "there are no API keys, and 0.0.0.0 can be reached"),
        ({"WINNOW_STORE_URL": "sqlite:////proc/nothing/control.db"}, "WINNOW_STORE_URL"),
        ({"WINNOW_STORE_URL": "redis://:hunter2@h:port"}, "store_url"),
        ({"WINNOW_ADMIN_KEY": "hunter2"}, "admin_key"),
        ({"WINNOW_RUNTIME_URL": "http://user:hunter2@h:1"}, "runtime_url"),
    ],
)
async def test_it_refuses_to_start(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    code, out, err = await run(SERVE, "--host", "0.0.0.0", "--port", str(free_port()), cwd=tmp_path, **environment)
    assert code == 2
    assert says in err
    assert "hunter2" not in out + err


@pytest.mark.parametrize(
    ("host", "environment", "loud"),
    [
        ("127.0.0.1", {}, True),
        ("0.0.0.0", {"WINNOW_ALLOW_OPEN": "true"}, True),
        ("0.0.0.0", {"WINNOW_ADMIN_KEY": ADMIN_KEY}, False),
    ],
)
async def test_it_starts_and_says_whether_it_is_open(
    tmp_path: Path, host: str, environment: dict[str, str], loud: bool
) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(*SERVE, "--host", host, "--port", str(port)),
        cwd=tmp_path,
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

            async def alive() -> int | None:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/v1/policies")).status_code
                return None

            assert await eventually(alive, timeout_seconds=30) == (200 if loud else 401)
        assert (tmp_path / ".winnow" / "control.db").exists()
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(process.communicate(), 20)
    assert ("THERE ARE NO API KEYS" in err.decode()) is loud
    assert ADMIN_KEY not in err.decode()
