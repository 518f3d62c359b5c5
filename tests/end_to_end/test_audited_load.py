"""A load test of the model that ships, with an audit of 1 %: a real Prometheus answers the dashboards' queries."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from sglang_winnow import audit_share, crossover
from tests.deployment.prometheus import prometheus
from tests.deployment.repository import ROOT
from tests.deployment.test_dashboards import ask, queries, without_numbers
from tests.runtime import runtime_server
from tests.service.control import replica

MODEL = "needle"
SECONDS = 60
# What this load has none of: a balancer, refusals, errors, stored policies, early termination, drafts, audits of the
# next token, ``auto``.
WITHOUT_SERIES = {
    "Retractions",
    "Runtime errors",
    "Requests that did not finish",
    "Clients that left",
    "Refusals",
    "Where requests go",
    "Runtimes behind the balancer",
    "Time of a write, 95 %",
    "Stored policies",
    "Early terminations",
    "Answers terminated early",
    "Terminated ratio",
    "Skipped ratio",
    "Tokens a check",
    "Drafts that stood",
    "KL of the next token, audited",
    "Answers without a policy that was left",
    "Answers of the quality under load",
}


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_dashboards_show_an_audited_load(tmp_path: Path) -> None:
    environment = {audit_share.ENVIRONMENT: "0.01", crossover.ENVIRONMENT: "0"}
    arguments = ["--served-model-name", MODEL, "--attention-backend", "winnow", "--enable-metrics"]
    arguments += ["--max-total-tokens", "65536", "--chunked-prefill-size", "1024"]
    with runtime_server(ROOT / "models/needle", *arguments, log=tmp_path / "log", **environment) as runtime:
        store = f"sqlite:///{tmp_path}/control.db"
        async with replica(store, runtime.url, metrics_public=True) as client:
            service = urlsplit(str(client.base_url)).netloc
            targets = {"winnow-service": service, "winnow-runtime": urlsplit(runtime.url).netloc}
            async with prometheus(tmp_path, targets) as monitoring:
                await under_load(monitoring, str(client.base_url), tmp_path)


async def under_load(monitoring: httpx.AsyncClient, address: str, folder: Path) -> None:
    command = [sys.executable, "-m", "loadtest", "--url", address, "--seconds", str(SECONDS)]
    command += ["--report", str(folder / "report.html")]
    with (folder / "loadtest").open("wb") as output:
        load = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=os.environ, stdout=output, stderr=output)
        assert await load.wait() == 0, (folder / "loadtest").read_text()[-3000:]
    # Of a whole load: with so few steps audited there need be none in its last seconds.
    found = {where: await ask(monitoring, expression, "5m") for where, expression in queries()}
    empty = {where for where, values in found.items() if not values or without_numbers(values)}
    titles = {where.partition(": ")[2].rpartition(" (")[0] for where in empty}
    assert titles <= WITHOUT_SERIES
    # Of the next token only those tell that ask.
    asked = {where for where, expression in queries() if "winnow_audited_next_token_kl" in expression}
    audits = {where for where, expression in queries() if "winnow_audit" in expression} - asked
    assert audits
    assert not audits & empty
