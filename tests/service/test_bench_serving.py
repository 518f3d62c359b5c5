"""SGLang's own benchmark, unchanged, against the service."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.overhead.process import started
from benchmarks.serving.overhead.standin import MODEL
from tests.service.test_up import ROOT

PROMPTS, TOKENS = 8, 16


BACKENDS = ("sglang-oai", "sglang-oai-chat")


async def benchmark(
    backend: str, address: str, folder: Path, model: str, *, prompts: int, tokens: int, key: str = ""
) -> dict[str, Any]:
    """Run the benchmark; returns its result."""
    output_file = folder / f"{backend}.jsonl"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", backend, "--base-url", address),
        *("--model", model, "--tokenizer", str(ROOT / "models/needle"), "--dataset-name", "random-ids"),
        *("--random-input-len", "64", "--random-output-len", str(tokens), "--random-range-ratio", "1"),
        *("--num-prompts", str(prompts), "--output-file", str(output_file), "--disable-tqdm"),
        cwd=folder,
        env={**os.environ, "OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(200):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    [line] = output_file.read_text().splitlines()
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.e2e
async def test_the_benchmark_of_sglang_runs(tmp_path: Path) -> None:
    async with started() as pair:
        result = await benchmark(
            "sglang-oai", pair.service.address, tmp_path, MODEL, prompts=PROMPTS, tokens=TOKENS, key=pair.admin_key
        )
    assert result["completed"] == PROMPTS
    assert result["total_output_tokens"] == PROMPTS * TOKENS
    assert 0 < result["median_ttft_ms"] < result["median_e2e_latency_ms"]
