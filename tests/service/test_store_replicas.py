"""Services as processes: two on one Redis lose no update, and what any of them acknowledged survives its store."""

from __future__ import annotations

import asyncio
import random
import resource
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.control import ADMIN_KEY, Service, bearer, make_key, processes
from tests.service.redis_servers import redis_server
from tests.service.test_policies_api import problem
from tests.service.waiting import eventually

ADMIN = bearer(ADMIN_KEY)
WORKERS = 24
COUNTERS = 8


class Work:
    """Operations on two services, and what they must have led to."""

    def __init__(self, clients: list[httpx.AsyncClient]) -> None:
        self.clients = clients
        self.operations = 0
        self.sums = dict.fromkeys((f"sum-{number}" for number in range(COUNTERS)), 0)
        self.keys: set[str] = set()

    async def ask(self, client: httpx.AsyncClient, method: str, path: str, **given: Any) -> httpx.Response:
        self.operations += 1
        headers = {**ADMIN, **given.pop("headers", {})}
        return await client.request(method, f"/v1/{path}", headers=headers, **given)

    async def add_one(self, name: str) -> None:
        """Add one to the number in a policy, whatever others do."""
        while True:
            client = random.choice(self.clients)
            got = await self.ask(client, "GET", f"policies/{name}")
            if got.status_code == 404:
                headers, number = {"if-none-match": "*"}, 1
            else:
                headers, number = {"if-match": got.headers["etag"]}, int(got.json()["description"]) + 1
            body = {"attention": {}, "description": str(number)}
            answer = await self.ask(client, "PUT", f"policies/{name}", json=body, headers=headers)
            if answer.status_code in (200, 201):
                self.sums[name] += 1
                return
            assert answer.status_code == 412, answer.text

    async def make_key(self, revoke: bool) -> None:
        """Make a key on one service, change it on the other, and perhaps revoke it there."""
        one, other = random.sample(self.clients, 2)
        made = (await self.ask(one, "POST", "keys", json={"name": "made", "scopes": ["read"]})).json()
        while True:
            body = {"name": "changed", "scopes": ["read"]}
            answer = await self.ask(other, "PUT", f"keys/{made['id']}", json=body, headers={"if-match": '"1"'})
            if answer.status_code == 200:
                break
            # The other service has not seen it yet.
            assert answer.status_code == 404, answer.text
            await asyncio.sleep(0.02)
        if revoke:
            assert (await self.ask(other, "DELETE", f"keys/{made['id']}")).status_code == 204
        else:
            self.keys.add(made["id"])

    async def run(self, operations: int, seed: int) -> None:
        chance = random.Random(seed)
        while self.operations < operations:
            if chance.random() < 0.6:
                await self.add_one(chance.choice(list(self.sums)))
            else:
                await self.make_key(revoke=chance.random() < 0.5)

    async def is_seen_by(self, client: httpx.AsyncClient) -> bool | None:
        policies = (await client.get("/v1/policies", headers=ADMIN)).json()["policies"]
        sums = {each["name"]: int(each["description"]) for each in policies if not each["preset"]}
        keys = (await client.get("/v1/keys", headers=ADMIN)).json()["keys"]
        expected = {name: number for name, number in self.sums.items() if number}
        return (sums == expected and {key["id"] for key in keys} == self.keys) or None


async def check_no_update_is_lost(folder: Path, operations: int) -> None:
    async with redis_server(folder) as server, processes(server.url, folder) as services:
        work = Work([service.client for service in services])
        await asyncio.gather(*(work.run(operations, seed) for seed in range(WORKERS)))
        for client in work.clients:
            await eventually(partial(work.is_seen_by, client), timeout_seconds=5)
        for name, number in work.sums.items():
            if number:
                answer = await work.clients[0].get(f"/v1/policies/{name}/revisions", headers=ADMIN)
                assert answer.json()["revisions"][0]["revision"] == number


async def test_no_update_is_lost_over_two_processes(tmp_path: Path) -> None:
    await check_no_update_is_lost(tmp_path, 500)


@pytest.mark.full
async def test_no_update_of_ten_thousand_is_lost_over_two_processes(tmp_path: Path) -> None:
    await check_no_update_is_lost(tmp_path, 10_000)


async def test_what_was_acknowledged_survives_redis_being_killed_under_load(tmp_path: Path) -> None:
    acknowledged: dict[str, int] = {}
    refused: list[int] = []
    async with redis_server(tmp_path) as server, processes(server.url, tmp_path) as services:
        clients = [service.client for service in services]
        stop = asyncio.Event()

        async def write(name: str, client: httpx.AsyncClient) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                body = {"attention": {}, "description": str(number)}
                condition = {"if-match": "*"} if name in acknowledged else {}
                answer = await client.put(f"/v1/policies/{name}", json=body, headers={**ADMIN, **condition})
                if answer.status_code in (200, 201):
                    acknowledged[name] = number
                else:
                    # 428: a first write that was not acknowledged was made all the same.
                    refused.append(answer.status_code)
                    if answer.status_code == 428:
                        acknowledged[name] = 0
                    await asyncio.sleep(0.05)

        writers = [asyncio.create_task(write(f"p{number}", clients[number % 2])) for number in range(10)]
        for _ in range(2):
            before = len(refused)

            async def progressed() -> bool | None:
                return len(acknowledged) == 10 or None

            await eventually(progressed)
            await server.kill()

            async def failed(before: int = before) -> bool | None:
                return len(refused) >= before + 10 or None

            await eventually(failed)
            assert (await clients[0].get("/v1/policies/exact", headers=ADMIN)).status_code == 200
            await server.start()
            at = dict(acknowledged)

            async def goes_on(at: dict[str, int] = at) -> bool | None:
                return all(acknowledged[name] > number for name, number in at.items()) or None

            await eventually(goes_on)
        stop.set()
        await asyncio.gather(*writers)
        assert set(refused) <= {503, 428}

        async def there(client: httpx.AsyncClient) -> bool | None:
            found = (await client.get("/v1/policies", headers=ADMIN)).json()["policies"]
            numbers = {each["name"]: int(each["description"]) for each in found if not each["preset"]}
            return numbers == acknowledged or None

        for client in clients:
            await eventually(partial(there, client), timeout_seconds=5)


async def test_a_full_disk_is_said_and_healed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/control.db"
    async with processes(url, tmp_path, number=1) as [service]:

        async def put(name: str) -> httpx.Response:
            body = {"attention": {}, "description": "x" * 400}
            return await service.client.put(f"/v1/policies/{name}", json=body, headers=ADMIN)

        assert (await put("before")).status_code == 201
        # From here on the kernel refuses to let the process's files grow, as on a disk without space.
        largest = max(path.stat().st_size for path in (tmp_path / "control.db", tmp_path / "control.db-wal"))
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
        answers = [await put(f"p{number}") for number in range(40)]
        refused = [answer for answer in answers if answer.status_code != 201]
        assert refused
        for answer in refused:
            assert "nothing was written" in problem(answer, 503, "store_unavailable")
        there = {f"p{number}" for number, answer in enumerate(answers) if answer.status_code == 201} | {"before"}
        assert await names(service) == there
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert (await put("after")).status_code == 201
    async with processes(url, tmp_path, number=1) as [service]:
        assert await names(service) == there | {"after"}


async def names(service: Service) -> set[str]:
    listed = (await service.client.get("/v1/policies", headers=ADMIN)).json()["policies"]
    return {each["name"] for each in listed if not each["preset"]}


async def test_killing_the_service_loses_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/control.db"
    async with processes(url, tmp_path, number=1) as [service]:
        made = await make_key(service.client, scopes=["read"])
        await service.client.put("/v1/policies/mine", json={"attention": {}}, headers=ADMIN)
        service.process.kill()
        await service.process.wait()
    async with processes(url, tmp_path, number=1) as [service]:
        got = await service.client.get("/v1/policies/mine", headers=bearer(made["key"]))
        assert got.json()["revision"] == 1
