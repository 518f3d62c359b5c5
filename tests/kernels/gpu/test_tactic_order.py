"""The order of long lists of clusters, and what a cap cuts off, against sorting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.cluster_tables import Tables
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.kernel_arguments import Heads, Rows
from winnow_kernels.policies.tactic.gpu.order import (
    PLACE_PROGRAMS,
    SPLITS,
    STEP_PROGRAMS,
    lost_kernel,
    place_kernel,
    step_kernel,
)
from winnow_kernels.policies.tactic.gpu.state import (
    KEPT_BLOCK,
    RUN,
    SLICE,
    Attention,
    Contexts,
    Entries,
    TacticBatch,
    TacticWorkspace,
)
from winnow_kernels.policies.tactic.reference import SHARE_STEPS, share_steps

SPAN, OF_SPAN, SPANS, GROUP = 1024, 64, 32, 3
JUNK = -7
# The share of the clusters that are needed, and the deviation of their scores in octaves.
KINDS = {"many": (0.55, 4.0), "hardly any": (0.01, 4.0), "equal": (0.4, 0.0), "beyond all steps": (0.3, 60.0)}


@dataclass
class Lists:
    """One KV head's clusters, what it needs of them, and its tokens in no cluster."""

    scores: Tensor
    """int32 [query heads, clusters]; in eighths of an octave."""
    sizes: list[int]
    is_needed: list[bool]
    total: Tensor
    """float64 [query heads]; logarithm, base 2, of all mass."""
    kept_weights: Tensor
    """[query heads, blocks]; logarithms, base 2, of mean weights."""

    @cached_property
    def shares(self) -> Tensor:
        """Of the tokens of each cluster, float64 [query heads, clusters]."""
        logarithms = self.scores / 8 - self.total[:, None]
        return logarithms.exp2().masked_fill(logarithms < -24, 0.0)

    @cached_property
    def needed(self) -> dict[int, int]:
        return {
            c: size for c, (size, is_in) in enumerate(zip(self.sizes, self.is_needed, strict=True)) if size and is_in
        }

    @cached_property
    def steps(self) -> dict[int, int]:
        steps = share_steps(self.shares.mean(0)).tolist()
        return {number: steps[number] for number in self.needed}

    @cached_property
    def kept_steps(self) -> list[int]:
        steps: list[int] = share_steps((self.kept_weights.double() - self.total[:, None]).exp2().mean(0)).tolist()
        return steps

    def targets(self, kept: int, taken: int) -> tuple[dict[int, int], list[int]]:
        """How many tokens come before each cluster, and before each block of ``kept`` tokens, if all are read."""
        blocks = -(-kept // KEPT_BLOCK)
        items = [(step, 0, block) for block, step in enumerate(self.kept_steps[:blocks])]
        items += [(step, 1, number) for number, step in self.steps.items()]
        of_clusters, of_blocks, place, left = {}, [0] * blocks, 0, taken
        for _, is_cluster, number in sorted(items):
            if is_cluster:
                of_clusters[number] = place
                place += min(self.needed[number], left)
                left -= min(self.needed[number], left)
            else:
                of_blocks[number] = place
                place += min(KEPT_BLOCK, kept - number * KEPT_BLOCK)
        return of_clusters, of_blocks

    @cached_property
    def places(self) -> dict[int, int]:
        """How many tokens come before each cluster that is needed."""
        places, place = {}, 0
        for number in sorted(self.steps, key=lambda c: (self.steps[c], c)):
            places[number] = place
            place += self.needed[number]
        return places

    def lost(self, taken: int) -> list[float]:
        """Which share of each query head's mass tokens of clusters hold that come behind the first ``taken``."""
        lost = torch.zeros(GROUP, dtype=torch.float64)
        for number, place in self.places.items():
            lost += self.shares[:, number] * (self.needed[number] - min(max(taken - place, 0), self.needed[number]))
        of_heads: list[float] = lost.tolist()
        return of_heads


def lists_of(kind: str, count: int, seed: int) -> Lists:
    generator = torch.Generator().manual_seed(seed)
    needed, deviation = KINDS[kind]
    scores = (8 * deviation * torch.randn(GROUP, count, generator=generator)).round().int()
    sizes = torch.randint(0, 2 * CLUSTER_SIZE + 1, (count,), generator=generator)
    is_needed = torch.rand(count, generator=generator) < needed
    total = (scores.double() / 8).exp2().mul(sizes).sum(1).log2()
    kept_weights = total[:, None] - 20 * torch.rand(GROUP, -(-count * 3 // 5), generator=generator)
    return Lists(scores, sizes.tolist(), is_needed.tolist(), total, kept_weights.float())


def store(lists: Lists, workspace: TacticWorkspace, row: int, kv_head: int) -> None:
    """Leave in the workspace what the union and those before it do."""
    heads = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
    count = lists.scores.shape[1]
    workspace.scored.steps[row, heads, :count] = lists.scores.to(workspace.scored.steps)
    workspace.cuts.totals[row, heads] = lists.total.to(workspace.cuts.totals)
    workspace.kept.weights[row, heads, : lists.kept_weights.shape[1]] = lists.kept_weights.to(workspace.kept.weights)
    workspace.listed.totals[row, kv_head, : -(-count // SLICE)] = 0
    of_slices: dict[int, list[int]] = {}
    for number, tokens in lists.needed.items():
        of_slice = of_slices.setdefault(number // SLICE, [])
        at = number // SLICE * SLICE + len(of_slice)
        workspace.listed.numbers[row, kv_head, at] = number
        workspace.listed.needed[row, kv_head, at] = tokens
        workspace.listed.steps[row, kv_head, at] = lists.steps[number]
        of_slice.append(number)
        workspace.listed.totals[row, kv_head, number // SLICE] += 2**18 + tokens


@pytest.mark.parametrize("kind", KINDS)
def test_order(kind: str, device: torch.device) -> None:
    # By priority; cut by a cap; neither; of another kind; of so few spans that other slices' totals are stale.
    counts = [1472, SPANS * OF_SPAN, 1472, 1472, 320]
    rows, kv_heads = len(counts), 2
    workspace = TacticWorkspace.empty(rows, kv_heads * GROUP, kv_heads, SPANS, SPAN, device)
    workspace.listed.totals.fill_(2**18 + 16)
    workspace.ordered.placed.fill_(JUNK)
    workspace.ordered.places.fill_(JUNK)
    lists = [[lists_of(kind, count, 10 * row + head) for head in range(kv_heads)] for row, count in enumerate(counts)]
    for row, of_row in enumerate(lists):
        for kv_head, of_kv_head in enumerate(of_row):
            store(of_kv_head, workspace, row, kv_head)
    clustered = torch.tensor(counts, dtype=torch.int32, device=device) * CLUSTER_SIZE
    # Long enough that nobody reads everything.
    lengths = clustered * 5 // 4
    caps, sinks = torch.zeros(2, rows, dtype=torch.int32, device=device)
    taken = 70
    caps[[1, 3]] = (lengths - clustered)[[1, 3]] + taken
    priority = torch.tensor([1, 0, 0, 1, 1], dtype=torch.int32, device=device)
    shares = torch.tensor([0.9, 0.9, 0.9, 0.0, 0.9], dtype=torch.float64, device=device)
    nowhere = sinks[:0]
    asked = TacticBatch(nowhere, clustered, sinks, shares, caps, priority)
    tables = Tables(nowhere, nowhere, nowhere, nowhere, nowhere, nowhere, 1, tl.constexpr(SPAN), tl.constexpr(OF_SPAN))
    of_rows = Rows.of(DecodeBatch.empty(rows, 16, 16, device))._replace(lengths=lengths)
    contexts, heads = Contexts(of_rows, asked, Entries(nowhere, 1), tables), Heads.sized(kv_heads * GROUP, kv_heads, 16)
    scored, kept, cuts, _, listed, ordered = workspace
    step_kernel[(STEP_PROGRAMS, kv_heads, rows)](
        contexts, heads, scored, kept, cuts, listed, ordered, group_block=4, num_warps=4
    )
    place_kernel[(PLACE_PROGRAMS, kv_heads, rows)](kept, ordered, scored.clusters, num_warps=4)
    cache = LayerCache(*torch.zeros(2, 16, kv_heads, 16, device=device))
    attention = Attention.of(torch.zeros(rows, kv_heads * GROUP, 16, device=device), cache, 0.25)
    lost_kernel[(kv_heads * GROUP, rows)](attention, heads, contexts, scored, cuts, listed, ordered, num_warps=4)
    assert workspace.ordered.placed[2:4].tolist() == [[0, 0], [0, 0]]
    assert (workspace.ordered.places[2:4] == JUNK).all()
    for row in (0, 1, 4):
        for kv_head, expected in enumerate(lists[row]):
            numbers = list(expected.needed)
            assert workspace.ordered.placed[row, kv_head] == len(numbers)
            packed = workspace.ordered.steps[row, kv_head, : len(numbers)].long()
            at = packed // SHARE_STEPS
            assert workspace.listed.numbers[row, kv_head, at].tolist() == numbers
            assert (packed % SHARE_STEPS).tolist() == [expected.steps[number] for number in numbers]
            assert workspace.ordered.places[row, kv_head, at].tolist() == [
                expected.places[number] for number in numbers
            ]
            of_kept = int(lengths[row] - clustered[row]) if priority[row] else 0
            of_clusters, of_blocks = expected.targets(of_kept, sum(expected.needed.values()))
            assert workspace.kept.placed[row, kv_head, 0] == of_kept
            assert workspace.ordered.targets[row, kv_head, at].tolist() == [of_clusters[number] for number in numbers]
            assert workspace.kept.targets[row, kv_head, : len(of_blocks)].tolist() == of_blocks
            own = workspace.cuts.lost[row, kv_head * GROUP : (kv_head + 1) * GROUP].tolist()
            lost = expected.lost(taken if row == 1 else sum(expected.needed.values()))
            assert own == pytest.approx(lost, rel=1e-4, abs=1e-7)
    assert bool(workspace.cuts.lost[1].any()) == (kind != "beyond all steps")


def test_lists_are_long_enough() -> None:
    """Runs that a program has several of, slices that are empty, a list shorter than a run."""
    longest = max(len(lists_of(kind, SPANS * OF_SPAN, 11).needed) for kind in KINDS)
    assert longest > SPLITS * RUN
    few = lists_of("hardly any", SPANS * OF_SPAN, 0).needed
    assert len(few) < RUN
    assert len({number // SLICE for number in few}) < SPANS * OF_SPAN // SLICE
