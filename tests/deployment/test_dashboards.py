"""Every panel's query returns series from a real Prometheus that scrapes a real service."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.deployment.prometheus import SGLangStandIn, prometheus, sglang_metrics
from tests.deployment.repository import ROOT, read_yaml
from tests.ports import free_port
from tests.service.control import ADMIN_KEY, bearer, make_key, replica, runtime
from tests.service.haproxy import haproxy
from tests.service.servers import serving
from tests.service.test_attention import SERVED
from tests.service.test_metrics import COST, FORMS, QUEST

FOLDER = ROOT / "deploy/grafana/dashboards"
DASHBOARDS: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
# What Grafana puts in place of its variables, for a Prometheus that scrapes twice a second.
VARIABLES = {"$__rate_interval": "10s", "$__range": "1h", "$model": ".*", "$policy": ".*"}
TRAFFIC_SECONDS = 5
CHAT = "/v1/chat/completions"


def panels() -> list[tuple[str, dict[str, Any]]]:
    return [(name, panel) for name, board in DASHBOARDS.items() for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    return [
        (f"{name}: {panel['title']} ({target['refId']})", target["expr"])
        for name, panel in panels()
        for target in panel["targets"]
    ]


def interpolated(expression: str, rate_interval: str = VARIABLES["$__rate_interval"]) -> str:
    for variable, value in (VARIABLES | {"$__rate_interval": rate_interval}).items():
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


async def ask(
    client: httpx.AsyncClient, expression: str, rate_interval: str = VARIABLES["$__rate_interval"]
) -> list[float]:
    answer = await client.get("/api/v1/query", params={"query": interpolated(expression, rate_interval)})
    assert answer.status_code == 200, answer.text
    return [float(series["value"][1]) for series in answer.json()["data"]["result"]]


async def use(client: httpx.AsyncClient, key: str, limited: str, number: int) -> None:
    """Send one request of each kind that the dashboards show."""
    sparse = {**COST, "prefill": {**COST["prefill"], "policy": "quoka", "attended_ratio": 0.2}}
    answers = [COST, sparse, {**COST, "decode": {**COST["decode"], "policy": "dense", "early_termination": None}}]
    for route, stream in itertools.product(FORMS, (False, True)):
        fake = {"events": FORMS[route]["stream"]} if stream else {"answer": FORMS[route]["whole"]}
        await client.post(route, json={"attention": QUEST, "stream": stream, "fake": fake}, headers=bearer(key))
    for cost in answers:
        body = {"fake": {"answer": {"choices": [{"attention": cost}]}}}
        await client.post(CHAT, json=body, headers=bearer(key))
    await client.post(CHAT, json={"fake": {"status": 400}}, headers=bearer(key))
    await client.post(CHAT, json={"fake": {"die": True}}, headers=bearer(key))
    await client.post(CHAT, json={"attention": "nobody"}, headers=bearer(key))
    await client.post(CHAT, json={}, headers=bearer(limited))
    with contextlib.suppress(httpx.ReadTimeout):
        await client.post(CHAT, json={"fake": {"hang": True}}, headers=bearer(key), timeout=0.05)
    policy = {"attention": {"decode": {"policy": "quest"}}, "description": str(number)}
    await client.put("/v1/policies/mine", json=policy, headers={**bearer(ADMIN_KEY), "if-match": "*"})


def without_numbers(values: list[float]) -> bool:
    return all(math.isnan(value) for value in values)


async def test_every_query_returns_series(tmp_path: Path) -> None:
    stand_in = SGLangStandIn()
    async with contextlib.AsyncExitStack() as stack:
        fake, address = await stack.enter_async_context(runtime())
        fake.server_info = {"winnow": SERVED}
        store = f"sqlite:///{tmp_path}/control.db"
        port = urlsplit(address).port
        assert port is not None
        balancer = await stack.enter_async_context(haproxy(tmp_path, [port]))
        await balancer.until_up(1)
        client = await stack.enter_async_context(
            replica(store, balancer.address, admin_key=ADMIN_KEY, metrics_public=True)
        )
        exporter = await stack.enter_async_context(serving(stand_in.app, free_port(), grace_seconds=1))
        targets = {
            "winnow-service": urlsplit(str(client.base_url)).netloc,
            "winnow-runtime": urlsplit(exporter).netloc,
            "winnow-balancer": f"127.0.0.1:{balancer.metrics_port}",
        }
        monitoring = await stack.enter_async_context(prometheus(tmp_path, targets))
        key = (await make_key(client))["key"]
        limited = (await make_key(client, limits={"requests_per_minute": 1}))["key"]
        policy = {"attention": {"decode": {"policy": "quest"}}}
        assert (await client.put("/v1/policies/mine", json=policy, headers=bearer(ADMIN_KEY))).status_code == 201
        loop = asyncio.get_running_loop()
        until = loop.time() + TRAFFIC_SECONDS
        for number in itertools.count():
            await use(client, key, limited, number)
            stand_in.work()
            await asyncio.sleep(0.2)
            if loop.time() > until:
                break

        found = {where: await ask(monitoring, expression) for where, expression in queries()}
        assert [where for where, values in found.items() if not values or without_numbers(values)] == []
        assert await ask(monitoring, 'nothing_of_the_kind{job="winnow-service"}') == []
        for board in DASHBOARDS.values():
            for variable in board["templating"]["list"]:
                [(metric, label)] = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
                answer = await monitoring.get(f"/api/v1/label/{label}/values", params={"match[]": metric})
                assert answer.json()["data"], variable["name"]


def test_the_stand_in_has_what_sglang_has() -> None:
    known = sglang_metrics()
    assert known["sglang:num_running_reqs"] == "Gauge"
    assert known["sglang:num_retracted_requests_total"] == "Counter"
    assert known["sglang:queue_time_seconds"] == "Histogram"
    named = {name for _, expression in queries() for name in re.findall(r"sglang\[:_\](\w+)", expression)}
    assert named
    assert {f"sglang:{name.removesuffix('_bucket')}" for name in named} <= known.keys()


def test_there_are_three_and_each_has_a_name_of_its_own() -> None:
    assert {board["uid"] for board in DASHBOARDS.values()} == DASHBOARDS.keys()
    assert len({board["title"] for board in DASHBOARDS.values()}) == len(DASHBOARDS) == 3


def test_panels_ask_the_provisioned_datasource() -> None:
    [source] = read_yaml("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    for _, panel in panels():
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": source["type"], "uid": source["uid"]}


def test_panels_do_not_lie_on_each_other() -> None:
    for board in DASHBOARDS.values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24
            rows, columns = range(at["y"], at["y"] + at["h"]), range(at["x"], at["x"] + at["w"])
            cells = set(itertools.product(columns, rows))
            assert not cells & taken, panel["title"]
            taken |= cells
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_jobs_are_those_that_prometheus_scrapes() -> None:
    jobs = {job["job_name"] for job in read_yaml("deploy/prometheus/prometheus.yml")["scrape_configs"]}
    named = {name for _, expression in queries() for name in re.findall(r'job="([^"]+)"', expression)}
    assert named == {"winnow-service", "winnow-runtime"} <= jobs
