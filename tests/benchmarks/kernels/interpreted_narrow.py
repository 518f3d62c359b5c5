"""Run in Triton's interpreter by ``test_layer``: compares layers of a cache in 8 bits with the reference."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.kernels.cases import relative_error
from benchmarks.kernels.decode_requests import Contexts, Heads, Requests, reference
from benchmarks.kernels.dense_decode import TritonDecode
from benchmarks.kernels.layer import Contestant, check
from tests.kernels.gpu.interpreting import patch_once
from winnow_kernels.policies.attention_policy import AttentionPolicy

HEADS = Heads(query=4, kv=2, dim=64)
LENGTH = 90
CPU = torch.device("cpu")


def error_of_triton_decode(cache_dtype: torch.dtype) -> float:
    """Return the relative error of SGLang's Triton kernels beside the reference."""
    contexts, dense = Contexts(HEADS, LENGTH, 2, 1, CPU, torch.float32, cache_dtype=cache_dtype), AttentionPolicy()
    step = Requests(contexts, dense, ordered=True).step
    decode = TritonDecode(contexts.queries, contexts.caches, step.batch, HEADS.scale)
    decode.call(0)()
    [expected], _ = reference(contexts, dense)
    return relative_error(decode.output, expected)


def main() -> None:
    patch_once()
    quest = Contestant("quest", {"budget": 48, "full_layers": 0})
    errors = check(HEADS, [quest], LENGTH, CPU, torch.float32, torch.float8_e4m3fn)
    triton = [error_of_triton_decode(dtype) for dtype in (torch.float32, torch.float8_e4m3fn)]
    sys.stdout.write(json.dumps({"errors": errors, "triton": triton}) + "\n")


if __name__ == "__main__":
    main()
