"""Run in Triton's interpreter by ``test_gpu_prefill``: compares a small prompt with torch, and runs every stage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels import prefill
from benchmarks.kernels.dense_prefill import DenseInputs
from benchmarks.kernels.prefill import PAGE_SIZE, Prompt, check, check_dense, contestants_of, measure
from benchmarks.kernels.timing import Timing
from benchmarks.model_shapes import shape_named
from tests.kernels.gpu.interpreting import patch_once
from winnow_kernels.attend import dense

CPU = torch.device("cpu")


class TorchPrefill:
    """Dense prefill without a GPU."""

    def __init__(self, inputs: DenseInputs, chunks: Sequence[int]) -> None:
        self._inputs = inputs
        assert max(chunks) < len(inputs.chunks)

    def run(self, chunk: int) -> Tensor:
        inputs = self._inputs
        own = inputs.chunks[chunk]
        positions = torch.arange(own.end)
        slots = inputs.page_table[0, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        return dense.prefill(inputs.queries[: own.tokens], slots, inputs.cache, inputs.scale)


def call_once(calls: Sequence[Callable[[], object]], replays: int) -> Timing:
    """Instead of timing."""
    for call in calls:
        call()
    return Timing(float(len(calls)), 0.0)


def no_bytes(run: Callable[[], object]) -> int:
    """Instead of looking at device memory."""
    run()
    return 1 << 20


def main() -> None:
    patch_once()
    shape = replace(shape_named("tiny"), query_heads=2, kv_heads=1, head_dim=64)
    prompt = Prompt(shape, 150, 90, CPU, torch.float16)
    contestants = contestants_of([40], [], 64, [8])
    with patch.multiple(prefill, time_prompt=call_once, peak_bytes=no_bytes, BACKENDS={"torch": TorchPrefill}):
        errors = check(prompt, contestants) | check_dense(prompt, ["torch"])
        rows = measure(prompt, "tiny", contestants, ["torch"], 2)
    sys.stdout.write(json.dumps({"errors": errors, "rows": [asdict(row) for row in rows]}) + "\n")


if __name__ == "__main__":
    main()
