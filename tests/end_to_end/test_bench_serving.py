"""SGLang's own benchmark, unchanged, against the service in front of SGLang."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.end_to_end.deployment import Deployment
from tests.service.test_bench_serving import BACKENDS, benchmark

PROMPTS, TOKENS = 4, 16


@pytest.mark.parametrize(
    "backend", [BACKENDS[0], *(pytest.param(name, marks=pytest.mark.full) for name in BACKENDS[1:])]
)
def test_the_benchmark_of_sglang_runs(deployment: Deployment, backend: str, tmp_path: Path) -> None:
    result = asyncio.run(benchmark(backend, deployment.address, tmp_path, "needle", prompts=PROMPTS, tokens=TOKENS))
    assert result["completed"] == PROMPTS
    assert result["total_output_tokens"] == PROMPTS * TOKENS
