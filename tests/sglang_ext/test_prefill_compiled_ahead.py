"""What passes of QUOKA launch, with its defaults, is compiled when a server starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from sglang_winnow.device.prefill import DevicePrefill, compile_defaults
from sglang_winnow.prefill_plan import Chunk
from tests.kernels.caches import random_cache, random_queries
from tests.kernels.parameters import quoka_prefill_parameters
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.quoka.prefill.selection import QuokaPrefillWorkspace

PAGE, LONGEST, KV_HEADS, GROUP, DIM = 16, 40_000, 2, 4, 64
DEFAULTS = QuokaPrefill()
QUOKA = quoka_prefill_parameters(
    budget=DEFAULTS.budget,
    block=DEFAULTS.block,
    queries=DEFAULTS.queries,
    sinks=DEFAULTS.sinks,
    recency_ratio=DEFAULTS.recency_ratio,
)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What has been launched or compiled: a kernel, and all that Triton compiles it anew for."""
    found: set[tuple[Any, ...]] = set()

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        del grid, warmup
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        kinds = tuple(_kind(p, given[p.name]) for p in kernel.params if p.name in given)
        found.add((kernel.__name__, kinds, tuple(sorted(named.items()))))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


@pytest.mark.parametrize(
    ("start", "new"), [(1280, 300), (1280, 20), (1290, 40), (1290, 90), (2048, 2048), (32_768, 50), (39_936, 64)]
)
def test_defaults_are_compiled_ahead(start: int, new: int, variants: set[tuple[Any, ...]]) -> None:
    cache = random_cache(PAGE, KV_HEADS, DIM, dtype=torch.bfloat16)
    workspace = QuokaPrefillWorkspace.empty(KV_HEADS, LONGEST, torch.device("cpu"), 2**20)
    compile_defaults(cache, KV_HEADS * GROUP, PAGE, workspace, torch.bfloat16)
    compiled = set(variants)
    variants.clear()
    _prefill(start, start + new, cache, workspace)
    assert len(variants) >= 9
    assert variants <= compiled


def _prefill(start: int, end: int, cache: Any, workspace: QuokaPrefillWorkspace) -> None:
    table = torch.zeros(3, LONGEST + PAGE, dtype=torch.int32)
    state: Any = SimpleNamespace(prompt_length=end)
    chunk = Chunk(0, state, torch.tensor([1]), table[1, :end], start, end, 0, QUOKA, range(0))
    plan: Any = SimpleNamespace(chunks=[chunk])
    batch: Any = SimpleNamespace()
    prefill = DevicePrefill(plan, batch, table, PAGE, [cache], workspace)
    queries = random_queries(end - start, KV_HEADS * GROUP, DIM).to(torch.bfloat16)
    prefill.attend(0, queries, DIM**-0.5, torch.empty_like(queries))


def _kind(parameter: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not parameter.do_not_specialize:
        return value == 1, value % 16 == 0
    return type(value)
