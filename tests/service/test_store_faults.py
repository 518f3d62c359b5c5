"""Stores that fail: what was acknowledged is there, what failed said so, and what was away comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tests.ports import free_port
from tests.service.redis_servers import DURABLE, RedisServer, redis_server
from tests.service.waiting import eventually
from winnow_service.errors import StoreUnavailable
from winnow_service.store.documents import Conflict, Store
from winnow_service.store.mirror import Mirror
from winnow_service.store.open import open_store, parse_store_url
from winnow_service.store.redis import RedisStore
from winnow_service.store.redis_connection import RedisAddress, RedisConnection
from winnow_service.store.sqlite import SqliteStore


@contextlib.asynccontextmanager
async def opened(url: str, password: str | None = None) -> AsyncIterator[Store]:
    store = open_store(parse_store_url(url, password), "test")
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def following(store: Store) -> AsyncIterator[Mirror]:
    mirror = Mirror(store)
    task = asyncio.create_task(mirror.run())
    try:
        yield mirror
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def health(mirror: Mirror, healthy: bool) -> None:
    async def look() -> bool | None:
        return mirror.health.healthy is healthy or None

    await eventually(look)


# SQLite.


async def test_a_full_disk_loses_nothing_and_heals(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/control.db") as store:
        assert isinstance(store, SqliteStore)
        await store.write("policies", "a", {"n": 1}, "absent", "me")
        before = await store.changes(0)
        # SQLite's own bound on the file: the same error as of a disk without space.
        assert store._connection is not None
        store._connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(StoreUnavailable, match="disk is full; nothing was written"):
            await store.write("policies", "big", {"text": "x" * 100_000}, "absent", "me")
        assert await store.changes(0) == before
        await store.write("policies", "big", {"text": "x" * 100_000}, "absent", "me")
        assert len((await store.changes(0)).documents) == 2


async def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "control.db").write_text("hello, this is not a database" * 100)
    async with opened(f"sqlite:///{tmp_path}/control.db") as store:
        with pytest.raises(StoreUnavailable, match="not a database"):
            await store.changes(0)


async def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "control.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    async with opened(f"sqlite:///{tmp_path}/control.db") as store:
        with pytest.raises(StoreUnavailable, match="later version of Winnow"):
            await store.write("policies", "a", {}, "absent", "me")


async def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with opened(f"sqlite:///{tmp_path}/file/control.db") as store:
        with pytest.raises(StoreUnavailable, match=r"Not a directory|File exists"):
            await store.changes(0)


async def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/new/control.db") as store:
        await store.write("keys", "a", {}, "absent", "me")
        files = list((tmp_path / "new").iterdir())
        assert len(files) > 1
        assert {file.stat().st_mode & 0o077 for file in [*files, tmp_path / "new"]} == {0}


async def test_a_store_put_back_from_a_copy_is_read_anew(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/control.db") as store:
        await store.write("policies", "a", {"n": 1}, "absent", "me")
        ahead = await store.changes(7)
        assert ahead.complete
        assert [document.name for document in ahead.documents] == ["a"]


# Redis.


async def test_what_redis_acknowledged_survives_being_killed_under_load(tmp_path: Path) -> None:
    acknowledged: dict[str, int] = {}
    failures = 0
    async with redis_server(tmp_path) as server, opened(server.url) as store:

        async def write(name: str, killed: asyncio.Event) -> None:
            """Write until the server is gone. A disk that is busy may fail a write before, with or without effect."""
            nonlocal failures
            exists = False
            for number in itertools.count(1):
                try:
                    await store.write("policies", name, {"n": number}, "present" if exists else "absent", "me")
                except Conflict:
                    exists = not exists
                except StoreUnavailable:
                    if killed.is_set():
                        failures += 1
                        return
                else:
                    exists = True
                    acknowledged[name] = number

        for kill in range(3):
            killed = asyncio.Event()
            writers = [asyncio.create_task(write(f"p{kill}-{writer}", killed)) for writer in range(20)]

            async def all_write(expected: int = 20 * (kill + 1)) -> bool | None:
                return len(acknowledged) == expected or None

            await eventually(all_write, timeout_seconds=60)
            killed.set()
            await server.kill()
            await asyncio.gather(*writers)
            await server.start()
        assert failures == 60
        found = {document.name: document.value for document in (await store.changes(0)).documents}
    for name, number in acknowledged.items():
        value = found[name]
        assert value is not None
        assert value["n"] >= number


async def test_a_mirror_goes_on_while_redis_is_away_and_heals(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.url) as store, following(store) as mirror:
        await health(mirror, healthy=True)
        await mirror.write("policies", "a", {"n": 1}, "absent", "me")
        await server.kill()
        await health(mirror, healthy=False)
        assert str(server.port) in mirror.health.reason
        with pytest.raises(StoreUnavailable):
            await mirror.write("policies", "b", {}, "absent", "me")
        kept = mirror.get("policies", "a")
        assert kept is not None
        assert kept.value == {"n": 1}

        await server.start()
        await health(mirror, healthy=True)
        await mirror.write("policies", "b", {"n": 2}, "absent", "me")
        assert [document.name for document in mirror.all("policies")] == ["a", "b"]


async def test_a_mirror_follows_a_redis_that_lost_writes(tmp_path: Path) -> None:
    memory = ("--save", "", "--appendonly", "no")
    async with redis_server(tmp_path, memory) as server, opened(server.url) as store, following(store) as mirror:
        await health(mirror, healthy=True)
        await mirror.write("policies", "lost", {}, "absent", "me")
        await server.kill()
        await server.start()
        # As many writes as were lost, and more: the version alone does not tell.
        async with opened(server.url) as other:
            for name in ("x", "y"):
                await other.write("policies", name, {}, "absent", "me")

        async def found() -> bool | None:
            return [document.name for document in mirror.all("policies")] == ["x", "y"] or None

        await eventually(found)
        assert mirror.has_had("policies")


async def test_a_document_of_somebody_else_is_said_and_the_last_state_stays(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.url) as store, following(store) as mirror:
        await health(mirror, healthy=True)
        await mirror.write("policies", "a", {"n": 1}, "absent", "me")
        async with server.client() as client:
            await client.hset("{test}:documents", "policies/b", "hello")
            await client.zadd("{test}:changes", {"policies/b": 2})
            await client.set("{test}:version", 2)
            await health(mirror, healthy=False)
            assert "'policies/b' that Winnow has not written" in mirror.health.reason
            assert [document.name for document in mirror.all("policies")] == ["a"]
            await client.hdel("{test}:documents", "policies/b")
            await client.zrem("{test}:changes", "policies/b")
        await health(mirror, healthy=True)


async def test_a_redis_that_hangs_is_away(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.url) as store, following(store) as mirror:
        await health(mirror, healthy=True)
        async with server.client() as client:
            await client.client_pause(4000, all=True)
        await health(mirror, healthy=False)
        await health(mirror, healthy=True)


async def test_a_redis_without_memory_refuses_writes_and_serves_reads(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.url) as store:
        await store.write("policies", "a", {}, "absent", "me")
        async with server.client() as client:
            await client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="memory"):
            await store.write("policies", "b", {}, "absent", "me")
        assert len((await store.changes(0)).documents) == 1


async def test_redis_is_asked_to_wait_where_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with redis_server(tmp_path, ("--appendonly", "no")) as server, opened(server.url) as store:
        await store.changes(0)
        assert "keeps no append-only file" in caplog.text
    async with redis_server(tmp_path / "durable") as server, opened(server.url) as store:
        assert isinstance(store, RedisStore)
        await store.changes(0)
        async with server.client() as client:
            try:
                await execute(client, "WAITAOF", 0, 0, 0)
                known = True
            except ResponseError:
                known = False
        assert store._can_wait is known
        await store.write("policies", "a", {}, "absent", "me")


async def test_a_redis_that_reads_its_file_is_away_and_keeps_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with redis_server(tmp_path) as server, opened(server.url) as store:
        await store.write("policies", "a", {}, "absent", "me")
        async with server.client() as client:
            # It looks for clients once in 1,024 commands of the file.
            pipeline = client.pipeline(transaction=False)
            for number in range(30_000):
                pipeline.set("other", number)
            await pipeline.execute()
        await server.kill()
        # Microseconds for each command of the file.
        server.arguments = (*DURABLE, "--key-load-delay", "50")
        starting = asyncio.create_task(server.start())
        reasons = set()

        async def read() -> int | None:
            try:
                return len((await store.changes(0)).documents)
            except StoreUnavailable as error:
                reasons.add(error.message)
                return None

        assert await eventually(read, timeout_seconds=30) == 1
        await starting
        assert any("loading" in reason for reason in reasons), reasons
        assert "keeps no append-only file" not in caplog.text


async def connections(server: RedisServer) -> int:
    """How many there are beside the one that asks."""
    async with server.client() as client:
        return len(await client.client_list()) - 1


async def test_a_failed_operation_takes_no_connection_from_another(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server:
        address = parse_store_url(server.url)
        assert isinstance(address, RedisAddress)
        connection = RedisConnection(address, "test")

        async def fail(error: Exception) -> None:
            async with connection.use() as failing:
                assert await failing.ping()
                raise error

        async with connection.use() as lasting:
            for error in (ConnectionResetError("reset"), RuntimeError("the handler is closed")):
                with pytest.raises(StoreUnavailable, match=str(error)):
                    await fail(error)
                async with connection.use() as fresh:
                    assert await fresh.ping()
                assert await lasting.ping()
            # That of the lasting operation, and that of the last one.
            assert await connections(server) == 2
        assert fresh is not lasting
        assert await connections(server) == 1
        await connection.close()
        assert await connections(server) == 0


async def test_a_password(tmp_path: Path) -> None:
    async with redis_server(tmp_path, password="s3cret/@") as server:
        async with opened(server.url, "s3cret/@") as store:
            await store.write("policies", "a", {}, "absent", "me")
        async with opened(server.url) as store:
            with pytest.raises(StoreUnavailable, match="authenticat"):
                await store.changes(0)
        async with opened(server.url, "wr0ng") as store:
            with pytest.raises(StoreUnavailable) as caught:
                await store.changes(0)
            assert "wr0ng" not in str(caught.value)


def certificate(folder: Path) -> tuple[Path, Path]:
    key, crt = folder / "key.pem", folder / "crt.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", str(key), "-out", str(crt)], check=True, capture_output=True)
    return key, crt


async def test_tls(tmp_path: Path) -> None:
    key, crt = certificate(tmp_path)
    port = free_port()
    tls = ("--tls-port", str(port), "--tls-cert-file", str(crt), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    async with redis_server(tmp_path, tls):
        async with opened(f"rediss://127.0.0.1:{port}?ssl_ca_certs={crt}") as store, following(store) as mirror:
            await health(mirror, healthy=True)
            await mirror.write("policies", "a", {}, "absent", "me")
        async with opened(f"rediss://127.0.0.1:{port}") as store:
            with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
                await store.changes(0)


async def test_sentinels_lead_to_the_primary_after_a_failover(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        primary = await stack.enter_async_context(redis_server(tmp_path / "primary"))
        follows = (*DURABLE, "--replicaof", "127.0.0.1", str(primary.port))
        replica = await stack.enter_async_context(redis_server(tmp_path / "replica", follows))
        configuration = tmp_path / "sentinel.conf"
        configuration.write_text(
            f"sentinel monitor main 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )
        sentinel = RedisServer(tmp_path / "sentinel", (str(configuration), "--sentinel"))
        await start_sentinel(sentinel, configuration)
        stack.push_async_callback(sentinel.stop)
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
        store = await stack.enter_async_context(opened(url))
        mirror = await stack.enter_async_context(following(store))
        await health(mirror, healthy=True)
        await mirror.write("policies", "a", {"n": 1}, "absent", "me")

        async def replicated() -> bool | None:
            async with replica.client() as client, sentinel.client() as watching:
                known = [other["port"] for other in await watching.sentinel_slaves("main")]
                return (int(await client.get("{test}:version") or 0) == 1 and replica.port in known) or None

        await eventually(replicated, timeout_seconds=20)
        await primary.kill()

        async def written() -> bool | None:
            try:
                await mirror.write("policies", "b", {"n": 2}, "absent", "me")
            except StoreUnavailable:
                return None
            return True

        await eventually(written, timeout_seconds=30)
        await health(mirror, healthy=True)
        assert [document.name for document in mirror.all("policies")] == ["a", "b"]
        async with replica.client() as client:
            assert await client.get("{test}:version") == "2"


async def start_sentinel(sentinel: RedisServer, configuration: Path) -> None:
    sentinel.folder.mkdir()
    sentinel.process = await asyncio.create_subprocess_exec(
        "redis-server",
        *(str(configuration), "--sentinel", "--port", str(sentinel.port), "--bind", "127.0.0.1"),
        *("--dir", str(sentinel.folder)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    await sentinel.answers()


async def test_a_cluster_is_followed_to_the_node_that_has_the_slot(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for first, last in ((0, 5000), (5001, 11000), (11001, 16383)):
            bus = free_port()
            arguments = (*DURABLE, "--cluster-enabled", "yes", "--cluster-port", str(bus))
            servers.append(await stack.enter_async_context(redis_server(tmp_path / str(first), arguments)))
            async with servers[-1].client() as client:
                await execute(client, "CLUSTER", "ADDSLOTSRANGE", first, last)
            async with servers[0].client() as client:
                await execute(client, "CLUSTER", "MEET", "127.0.0.1", servers[-1].port, bus)

        async def agreed() -> bool | None:
            states = []
            for server in servers:
                async with server.client() as client:
                    states.append((await info(client))["cluster_state"])
            return states == ["ok"] * 3 or None

        await eventually(agreed, timeout_seconds=20)
        url = f"redis+cluster://127.0.0.1:{servers[0].port},127.0.0.1:{servers[1].port}"
        writer = await stack.enter_async_context(opened(url))
        mirror = await stack.enter_async_context(following(await stack.enter_async_context(opened(url))))
        written = await writer.write("policies", "a", {"n": 1}, "absent", "me")

        async def seen() -> bool | None:
            return mirror.get("policies", "a") == written or None

        await eventually(seen)
        await writer.write("policies", "a", {"n": 2}, 1, "me")
        assert len(await writer.revisions("policies", "a")) == 2


async def info(client: Redis) -> dict[str, str]:
    answer = await execute(client, "CLUSTER", "INFO")
    return answer if isinstance(answer, dict) else dict(line.split(":") for line in str(answer).split())


async def execute(client: Redis, *command: str | int) -> Any:
    return await client.execute_command(*command)  # type: ignore[no-untyped-call]
