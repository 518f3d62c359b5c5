"""Whatever is sent to any endpoint, the service answers as its OpenAPI document says, and it never fails."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.service.control import ADMIN_KEY, processes, runtime
from tests.service.test_explain import EXPLAINED
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
SERVED = {
    "layers": 12,
    "context_length": 32768,
    "delta_layers": [2, 6],
    "policies": list(DECODE_POLICIES),
    "prefill_policies": list(PREFILL_POLICIES),
    "kv_heads": 2,
    "explains": True,
}


async def check_endpoints(folder: Path, *options: str) -> int:
    """Run schemathesis with all its checks against a service and a runtime; return how many requests it has sent."""
    report = folder / "report.json"
    async with (
        runtime() as (fake, address),
        processes(f"sqlite:///{folder}/control.db", folder, address, number=1) as [service],
    ):
        fake.server_info = {"winnow": SERVED}
        fake.explanation = {"text": "a", "meta_info": {"attention": EXPLAINED}} | {"attention": EXPLAINED}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION)),
            *("run", f"{service.client.base_url}/openapi.json", "--checks", "all", "--no-color"),
            *("--header", f"Authorization: Bearer {ADMIN_KEY}", "--warnings", "off"),
            *("--report", "json", "--report-json-path", str(report), *options),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, output
        assert (await service.client.get("/healthz")).status_code == 200
    return int(json.loads(await asyncio.to_thread(report.read_text))["test_cases"]["generated"])


async def test_every_endpoint_answers_as_documented(tmp_path: Path) -> None:
    assert await check_endpoints(tmp_path, "--phases", "fuzzing", "--max-examples", "8", "--seed", "0") > 150


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_every_endpoint_answers_as_documented_thousands_of_times(tmp_path: Path) -> None:
    assert await check_endpoints(tmp_path, "--max-examples", "150") > 5000
