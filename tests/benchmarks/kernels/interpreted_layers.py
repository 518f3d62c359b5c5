"""Run in Triton's interpreter by ``test_gpu_layer``: compares small layers with the reference."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from benchmarks.kernels.decode_requests import Contexts, Heads
from benchmarks.kernels.layer import Contestant, Timer, check, stages_of
from benchmarks.kernels.timing import Timing
from benchmarks.model_shapes import shape_named
from tests.kernels.gpu.interpreting import patch_once

HEADS = Heads(query=4, kv=2, dim=64)
LENGTH = 90
CPU = torch.device("cpu")
CONTESTANTS = [
    Contestant("dense", {}, terminations=("none", "never settled")),
    Contestant("streaming_llm", {"window": 48}),
    Contestant("quest", {"budget": 48, "full_layers": 0}),
    Contestant("snapkv", {"budget": 48, "observation_window": 16}),
    Contestant("delta", {"budget": 48, "recency": 16}),
]
# What they always attend to alone is longer.
CODED = [
    Contestant("lowbit_top_p", {"p": 0.5, "sinks": 0}),
    Contestant("lowbit_top_k", {"budget": 112, "sinks": 0}),
]
CODED_LENGTH = 200


def time_once(calls: Sequence[Callable[[], None]], replays: int) -> Timing:
    """Instead of a CUDA graph."""
    begin = time.perf_counter()
    calls[0]()
    return Timing((time.perf_counter() - begin) * 1e6, 0.0)


def main() -> None:
    patch_once()
    errors = check(HEADS, CONTESTANTS, LENGTH, CPU, torch.float32)
    contexts = Contexts(HEADS, LENGTH, 1, 3, CPU, torch.float32)
    timer = Timer(contexts, cache_bytes=1, replays=2, time=time_once)
    stages = [stage.name for stage in stages_of(CONTESTANTS[2], "none", timer, shape_named("tiny"), [1])]
    errors |= check(HEADS, CODED, CODED_LENGTH, CPU, torch.float32)
    timer = Timer(Contexts(HEADS, CODED_LENGTH, 1, 3, CPU, torch.float32), 1, 2, time=time_once)
    coded = [asdict(stage) for stage in stages_of(CODED[0], "none", timer, shape_named("tiny"), [1])]
    sys.stdout.write(json.dumps({"errors": errors, "stages": stages, "coded": coded}) + "\n")


if __name__ == "__main__":
    main()
