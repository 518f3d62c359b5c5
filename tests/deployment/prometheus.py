"""A real Prometheus with our configuration, and a stand-in for what a scraped SGLang tells of itself."""

from __future__ import annotations

import ast
import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
import prometheus_client
import yaml

from tests.deployment.repository import ROOT, read_yaml
from tests.ports import free_port
from tests.service.waiting import eventually

CONFIGURATION: Final = "deploy/prometheus/prometheus.yml"
RULES: Final = ROOT / "deploy/prometheus/rules"
_KINDS: Final = {"Gauge", "Counter", "Histogram", "Summary"}


class SGLangStandIn:
    """An exporter with SGLang's metrics, by the names and kinds in SGLang's source. What they say is made up."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._metrics = [
            getattr(prometheus_client, kind)(name, name, ["model_name"], registry=self.registry)
            for name, kind in sglang_metrics().items()
        ]

    @property
    def app(self) -> Any:
        """Made as SGLang makes its own: the colons of names are underscores for Prometheus 2."""
        return prometheus_client.make_asgi_app(self.registry)

    def work(self) -> None:
        """Move every metric."""
        for metric in self._metrics:
            child = metric.labels("needle")
            child.observe(0.5) if hasattr(child, "observe") else child.inc()


def sglang_metrics() -> dict[str, str]:
    """The kind of each metric that SGLang makes. Read off the source: importing SGLang imports torch."""
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "srt/observability/metrics_collector.py").read_text()
    found = {}
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _KINDS:
            names = [ast.literal_eval(word.value) for word in call.keywords if word.arg == "name"]
            found.update({str(name): call.func.id for name in names})
    return found


@contextlib.asynccontextmanager
async def prometheus(folder: Path, targets: Mapping[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """Prometheus with our jobs and rules, in a hurry; yields a client of it, once it has scraped all jobs.

    Args:
        targets: the address that each job scrapes.
    """
    configuration = read_yaml(CONFIGURATION)
    configuration["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    configuration["rule_files"] = [str(RULES / "*.yml")]
    port = free_port()
    own = f"127.0.0.1:{port}"
    for job in configuration["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": [targets.get(job["job_name"], own)]}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    process = await asyncio.create_subprocess_exec(
        *("prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={own}"),
        cwd=folder,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{own}", timeout=20) as client:

            async def ready() -> bool | None:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/-/ready")).status_code == 200 or None
                return None

            await eventually(ready, timeout_seconds=30)

            # It looks for its targets five seconds after it has started.
            async def scrapes() -> bool | None:
                answer = await client.get("/api/v1/query", params={"query": "up == 1"})
                return len(answer.json()["data"]["result"]) == len(configuration["scrape_configs"]) or None

            await eventually(scrapes, timeout_seconds=30)
            yield client
    finally:
        process.terminate()
        await process.wait()
