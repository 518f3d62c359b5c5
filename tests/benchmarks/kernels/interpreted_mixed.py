"""Run in Triton's interpreter by ``test_mixed``: checks a small mixed batch, and asks what would be timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from benchmarks.kernels.cases import Case
from benchmarks.kernels.decode_requests import Contexts
from benchmarks.kernels.layer import Timer
from benchmarks.kernels.mixed import differing_rows, groups_of, measure
from benchmarks.kernels.timing import Timing
from tests.benchmarks.kernels.interpreted_layers import CPU, HEADS
from tests.kernels.gpu.interpreting import patch_once
from winnow_kernels.policies.attention_policy import parse_policy

LENGTH = 120
POLICIES = [
    {"policy": "quest", "budget": 48, "full_layers": 0},
    {"policy": "snapkv", "budget": 48, "observation_window": 16},
]


def main() -> None:
    patch_once()
    policies = [parse_policy({"decode": decode}) for decode in POLICIES]
    contexts = Contexts(HEADS, LENGTH, 2 * len(policies), 1, CPU, torch.float32)

    def run_with_other_queries(call: Callable[[], None]) -> None:
        contexts.queries[0].neg_()
        call()
        contexts.queries[0].neg_()

    terminating = list(groups_of(policies).values())[1]
    wrong = differing_rows(contexts, terminating, lambda call: call())
    changed = differing_rows(contexts, policies, run_with_other_queries)
    timer = Timer(contexts, cache_bytes=1, replays=2, time=lambda _calls, _replays: Timing(2.0, 0.0))
    rows = [asdict(row) for row in measure(Case(LENGTH, contexts.rows), "tiny", policies, timer)]
    sys.stdout.write(json.dumps({"wrong": wrong, "changed": changed, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
