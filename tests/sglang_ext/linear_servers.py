"""Servers of small models of Qwen3-Next's and Qwen3.5's shape, with Winnow's attention and with SGLang's own.

On a GPU all is as it is served. Without one, Triton interprets Winnow's kernels, and what SGLang launches for linear
attention is in torch (``linear_in_torch``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import torch

from sglang_winnow import crossover
from sglang_winnow.dense_backend import DENSE_ENVIRONMENT, TRITON
from tests.models import LINEAR_ATTENTION, Family, ModelShape, write_model, write_weights
from tests.policy_rows import ROWS, small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, TOLERANCE, TOLERANCE_OF_SELECTIONS, prompt_of
from tests.sglang_ext.reference import NARROW
from tests.sglang_ext.test_device_server import interpreted

ON_CUDA: Final = torch.cuda.is_available()
DTYPE: Final = "bfloat16" if ON_CUDA else "float32"
# All experts compute: in 16 bits rounding would choose among those that score alike.
SHAPES: Final[Mapping[Family, ModelShape]] = {
    family: ModelShape(family=family, layers=4, kv_heads=2, context_length=2048, chosen_experts=4, dtype=DTYPE)
    for family in LINEAR_ATTENTION
}


@dataclass(frozen=True)
class Deployment:
    """A model of one of ``SHAPES`` and how it is served.

    Attributes:
        family: of the model.
        options: of the server.
        attention: of transformers' model that answers alike; its own by default.
    """

    family: Family
    options: Sequence[str] = ()
    attention: str | None = None


DEPLOYMENTS: Final[Mapping[str, Deployment]] = {
    **{family: Deployment(family) for family in SHAPES},
    "qwen3_next, 8 bits": Deployment("qwen3_next", ("--kv-cache-dtype", "fp8_e4m3"), NARROW),
    **({"qwen3_next, two GPUs": Deployment("qwen3_next", ("--tp-size", "2"))} if torch.cuda.device_count() > 1 else {}),
}
LINEAR, FULL = [0, 2], [1, 3]
CHUNK, INTERVAL, STATES_EVERY, PAGE = 512, 32, 64, 16
TOKENS = 4
# Rounding to bfloat16 in another batch moves log-probabilities by hundredths.
ROUNDING = 0.1 if ON_CUDA else TOLERANCE
ROUNDING_OF_SELECTIONS = 0.3 if ON_CUDA else TOLERANCE_OF_SELECTIONS
IN_TORCH: Final = Path(__file__).parent / "linear_in_torch"

POLICIES: Final[Mapping[str, Any]] = {name: policy for name, policy in small_policies().items() if name != "dense"}
QUOKA: Final[Mapping[str, Any]] = {"prefill": {"policy": "quoka", "budget": 64, "block": 128}}
# With what they have by default these read all of a short prompt; a share may be reached sooner.
COVERED: Final[Mapping[str, Any]] = {
    name: {"decode": {"policy": name} | ({"delta_layers": [3]} if name == "delta" else {})}
    for name in POLICIES
    if "budget" in ROWS[name].defaults or "window" in ROWS[name].defaults
}

_ARGUMENTS: Final = (
    *("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384", "--max-running-requests", "4"),
    *("--page-size", str(PAGE), "--mamba-radix-cache-strategy", "extra_buffer", "--max-mamba-cache-size", "64"),
    *("--mamba-track-interval", str(INTERVAL), "--grammar-backend", "none", "--sampling-backend", "pytorch"),
)
# Otherwise SGLang prepares images on a GPU.
_ON_CPU: Final = ("--disable-fast-image-processor",)
_DEVICE: Final = ("--mem-fraction-static", "0.3", "--cuda-graph-bs-decode", "1", "2", "4") if ON_CUDA else _ON_CPU
# The same dense kernels in both servers: what differs is Winnow's.
_DENSE: Final = TRITON if ON_CUDA else "torch_native"

# The same for both shapes: neither has caps or sinks.
_INTERPRETED: Final = interpreted(SHAPES["qwen3_next"], IN_TORCH)


class Server:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=900)

    def post(self, prompt: list[int], policy: Any, tokens: int = TOKENS, **more: Any) -> httpx.Response:
        custom = {"attention": json.dumps(policy)} | more.pop("custom", {})
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": custom}
        return self.http.post("/generate", json={"input_ids": prompt, "sampling_params": parameters} | LOGPROBS | more)

    def ask(self, prompt: list[int], policy: Any, tokens: int = TOKENS, **more: Any) -> Any:
        return self.post(prompt, policy, tokens, **more).raise_for_status().json()


def written_model(folder: Path, family: Family) -> Path:
    """Write a model of one of ``SHAPES`` to ``folder``; return it."""
    write_weights(write_model(folder, SHAPES[family]))
    return folder


@contextmanager
def winnow_server(model: Path, log: Path, *options: str) -> Iterator[Server]:
    environment = {DENSE_ENVIRONMENT: TRITON} if ON_CUDA else _INTERPRETED
    with _serve(model, log, "--attention-backend", "winnow", *options, **environment) as server:
        yield server


@contextmanager
def sglang_server(model: Path, log: Path, *options: str) -> Iterator[Server]:
    """Serve with SGLang's own attention."""
    environment = {} if ON_CUDA else _INTERPRETED
    with _serve(model, log, "--attention-backend", _DENSE, *options, **environment) as server:
        yield server


@contextmanager
def _serve(model: Path, log: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    environment |= {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1", "SGLANG_MAMBA_CONV_DTYPE": DTYPE}
    with runtime_server(model, *_ARGUMENTS, *_DEVICE, *arguments, log=log, **environment) as runtime:
        yield Server(runtime.url)
    # SGLang's words. Libraries tell at exit of other things that may leak.
    assert "memory leak detected" not in log.read_text()


def prompt(seed: int, length: int) -> list[int]:
    (vocabulary,) = {shape.vocab_size for shape in SHAPES.values()}
    return prompt_of(length, seed, vocabulary)


def cached(answer: Any) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def cost(answer: Any) -> Any:
    return answer["meta_info"]["attention"]


def first_step(answer: Any) -> Any:
    """Return ``answer`` as if it were of one token."""
    information = answer["meta_info"]
    return {"meta_info": {name: information[name][:1] for name in ("output_token_logprobs", "output_top_logprobs")}}
