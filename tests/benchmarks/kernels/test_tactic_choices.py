"""Tactic's tables count what its step takes."""

from __future__ import annotations

import torch

from benchmarks.kernels.tactic_choices import Captured, PromptTables, Sums
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
        taken = step.taken(0, queries, cache)
        sizes = tables.index.read(0, step.spans).sizes.transpose(0, 1)[:, :, None].long()
        outside = (tables.context.lengths - PROMPT)[:, None, None].expand(taken.shape[:3])
        assert sums.tokens["tactic"] == int(((taken * sizes).sum(-1) + outside).sum())
        selection = step.select(0, queries, cache, Meter(STEPS, queries.device))
        assert sums.union["tactic"] == int(selection.counts.sum()) or selection.to_the_end is not None
        assert sums.tokens["optimal"] <= sums.tokens["cluster_optimal"]
