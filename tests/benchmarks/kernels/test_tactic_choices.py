"""Tactic's tables count what its step takes."""

from __future__ import annotations

import torch

from benchmarks.kernels.tactic_choices import Captured, PromptTables, Sums, ranked_positions
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import LayerCache

PROMPT, STEPS, SPAN = 1024, 2, 256


def captured() -> Captured:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens = PROMPT + 16
    caches = [LayerCache(random(tokens, 2, 16), random(tokens, 2, 16))]
    return Captured(PROMPT, queries=[3 * random(STEPS, 4, 16)], caches=caches, scale=0.25)


def test_every_token_that_a_head_takes_is_counted_once() -> None:
    tables = PromptTables(captured(), SPAN)
    for p in (0.3, 0.9):
        sums = Sums()
        tables.add(p, sums)
        step = tables._step(p)
        [queries], [cache] = tables.captured.queries, tables.captured.caches
        estimate = step.estimate(0, queries, cache, Meter(STEPS, queries.device))
        outside = (tables.context.lengths - PROMPT)[:, None, None].expand(estimate.tokens.shape)
        assert sums.tokens["tactic"] == int((estimate.tokens + outside).sum())
        assert sums.tokens["optimal"] <= sums.tokens["ranking_optimal"]
        of_all = tables._step(1.0)
        whole = of_all.estimate(0, queries, cache, Meter(STEPS, queries.device))
        ranked = ranked_positions(of_all, whole, 0, PROMPT)
        assert torch.equal(ranked.sort(-1).values, torch.arange(PROMPT).expand(ranked.shape))
