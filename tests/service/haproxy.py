"""HAProxy with the configuration that ships, in front of runtimes on ports of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_port
from tests.service.waiting import eventually

CONFIGURATION = Path(__file__).parents[2] / "deploy/haproxy/haproxy.cfg"


@dataclass(frozen=True)
class Balancer:
    """A running HAProxy. Its runtimes are numbered from 0."""

    ports: Sequence[int]
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"http://{self.name}"

    async def counted(self, name: str, **labels: str) -> float:
        """The sum over a metric's samples that have these labels."""
        async with httpx.AsyncClient() as client:
            page = await client.get(f"http://127.0.0.1:{self.metrics_port}/metrics")
        families = text_string_to_metric_families(page.text)
        found = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())

    async def until_up(self, number: int) -> None:
        """Wait until HAProxy knows ``number`` runtimes to be well, and of the others that they are not."""

        async def look() -> bool | None:
            with contextlib.suppress(httpx.TransportError):
                return await self.counted("haproxy_backend_active_servers", proxy="runtimes") == number or None
            return None

        await eventually(look)

    def runtimes(self) -> str:
        """The second file of the configuration, which lists the runtimes."""
        servers = (f"    server runtime{number} 127.0.0.1:{port}\n" for number, port in enumerate(self.ports))
        return "backend runtimes from winnow\n" + "".join(servers)


@contextlib.asynccontextmanager
async def haproxy(folder: Path, ports: Sequence[int]) -> AsyncIterator[Balancer]:
    """HAProxy in front of the runtimes on ``ports``."""
    balancer = Balancer(ports)
    listed = folder / "runtimes.cfg"
    listed.write_text(balancer.runtimes())
    process = await asyncio.create_subprocess_exec(
        *("haproxy", "-db", "-f", str(CONFIGURATION), "-f", str(listed)),
        env={
            **os.environ,
            "WINNOW_BALANCER_BIND": balancer.name,
            "WINNOW_BALANCER_METRICS_BIND": f"127.0.0.1:{balancer.metrics_port}",
        },
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield balancer
    finally:
        process.kill()
        await process.wait()
