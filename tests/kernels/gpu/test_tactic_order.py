"""The order of long lists of clusters, and what a cap leaves of a query head's list, against sorting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.indexes.cluster_tables import Tables
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.kernel_arguments import Heads, Rows
from winnow_kernels.policies.tactic.gpu.order import PLACE_PROGRAMS, SPLITS, STEP_PROGRAMS, place_kernel, step_kernel
from winnow_kernels.policies.tactic.gpu.order_capped import _LISTED, before_first_lost
from winnow_kernels.policies.tactic.gpu.state import (
    KEPT_BLOCK,
    RUN,
    SLICE,
    Contexts,
    Cut,
    Entries,
    Fit,
    Fitted,
    Listed,
    Ordered,
    Rank,
    Scored,
    TacticBatch,
    TacticWorkspace,
)
from winnow_kernels.policies.tactic.reference import IGNORED_BITS, SHARE_STEPS

SPAN, OF_SPAN, SPANS, GROUP = 1024, 64, 32, 3
SCALE = 0.125
LOG2_E = 1.4426950408889634
LOG2 = SCALE * LOG2_E
UNIT, CURVE = 10, 8
JUNK = -7
# Of each query head's list, the share of the tokens that are taken and the deviation of the scores.
KINDS = {
    "alike": [(0.2, 8.0), (0.15, 8.0), (0.25, 8.0)],
    "one needs few": [(0.55, 3.0), (0.002, 40.0), (0.0, 8.0)],
    "hardly any": [(0.004, 8.0), (0.001, 8.0), (0.002, 1.0)],
    "equal": [(0.4, 0.0), (0.1, 0.0), (0.2, 0.0)],
    "beyond all steps": [(0.2, 1e6), (0.25, 1e-6), (0.1, 1e30)],
}


@dataclass
class Lists:
    """One KV head's clusters, what its query heads take of them, and its tokens in no cluster.

    Logarithms are to base 2.
    """

    scores: Tensor
    sizes: list[int]
    taken: list[dict[int, int]]
    """Of each query head: how much it takes of which clusters, in the order of its list."""
    exact: list[dict[int, float]]
    """Of each query head: the logarithms of the exact masses of its first clusters."""
    last_exact: list[int]
    """Of each query head: of how many members of the last of them that is the mass."""
    total: list[float]
    """Of each query head: the logarithm of all mass."""
    windows: Tensor
    kept_weights: Tensor
    """[query heads, blocks]; logarithms of mean weights."""

    @cached_property
    def needed(self) -> dict[int, int]:
        numbers = sorted({number for of_head in self.taken for number in of_head})
        return {number: max(of_head.get(number, 0) for of_head in self.taken) for number in numbers}

    @cached_property
    def steps(self) -> dict[int, int]:
        """The best of the steps in which query heads have each cluster that is needed."""
        steps: dict[int, int] = {}
        for head, of_head in enumerate(self.taken):
            best = torch.tensor(self.total[head] - 2).float()
            of_window = float(self.scores[head, self.windows[head]].double().mean()) * LOG2
            above = self.total[head] - UNIT - CURVE - of_window
            best_score = torch.tensor((self.total[head] - 2 - above) / LOG2).float()
            for number in of_head:
                step = (best_score - self.scores[head, number]) * (torch.tensor(LOG2).float() * 4)
                if number in self.exact[head]:
                    is_last = number == list(self.exact[head])[-1]
                    members = self.last_exact[head] if is_last else self.sizes[number]
                    mean = torch.tensor(self.exact[head][number]).float() - torch.tensor(float(members)).log2()
                    step = (best - mean) * 4
                own = int(step.clamp(0, 63))
                steps[number] = min(own, steps.get(number, own))
        return steps

    @cached_property
    def kept_steps(self) -> list[int]:
        """The best steps of the blocks."""
        best = (torch.tensor(self.total) - 2).float()[:, None]
        steps: list[int] = ((best - self.kept_weights) * 4).clamp(0, 63).long().amin(0).tolist()
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

    def before_lost(self, head: int, kept: int) -> int:
        """How many tokens that a query head takes come before the first that is not among the first ``kept``."""
        before = 0
        for number, taken in self.taken[head].items():
            before += min(taken, max(0, kept - self.places[number]))
            if kept - self.places[number] < taken:
                break
        return before


def lists_of(kind: str, count: int, seed: int) -> Lists:
    generator = torch.Generator().manual_seed(seed)
    deviations = torch.tensor([deviation for _, deviation in KINDS[kind]])[:, None]
    shared = torch.randn(count, generator=generator)
    scores = deviations * (shared + 0.5 * torch.randn(GROUP, count, generator=generator))
    scores = (scores.view(torch.int32) >> IGNORED_BITS << IGNORED_BITS).view(torch.float32)
    sizes = torch.randint(0, 2 * CLUSTER_SIZE + 1, (count,), generator=generator).tolist()
    taken = []
    for head, (share, _) in enumerate(KINDS[kind]):
        of_head, left = {}, int(share * sum(sizes))
        for number in scores[head].argsort(descending=True, stable=True).tolist():
            if min(sizes[number], left) > 0:
                of_head[number] = min(sizes[number], left)
                left -= of_head[number]
        taken.append(of_head)
    exact: list[dict[int, float]] = []
    last_exact, total = [], []
    for head, of_head in enumerate(taken):
        of_scores = scores[head].double() * LOG2
        total.append(float(torch.logsumexp(of_scores * log(2), 0)) / log(2))
        first = list(of_head)[:3]
        # A cluster with exact weights may weigh much more than its centroid would.
        surplus = torch.rand(len(first), generator=generator) * 12
        exact.append({number: float(of_scores[number] + s) for number, s in zip(first, surplus.tolist(), strict=True)})
        last_exact.append(max(1, sizes[first[-1]] // 2) if first else 0)
    windows = torch.stack([torch.randperm(count, generator=generator)[:4] for _ in range(GROUP)])
    kept_weights = torch.tensor(total)[:, None] - 20 * torch.rand(GROUP, -(-count * 3 // 5), generator=generator)
    return Lists(scores, sizes, taken, exact, last_exact, total, windows, kept_weights.float())


def store(lists: Lists, workspace: TacticWorkspace, row: int, kv_head: int) -> None:
    """Leave in the workspace what the union and those before it do."""
    heads = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
    count = lists.scores.shape[1]
    workspace.scored.scores[row, heads, :count] = lists.scores.to(workspace.scored.scores)
    cuts = workspace.fitted.cuts[row, heads]
    for head, of_head in enumerate(lists.taken):
        last = list(of_head)[-1] if of_head else -1
        bits = int((lists.scores[head, last] + 0.0).view(torch.int32)) if of_head else 2**31 - 1
        cuts[head, Cut.KEY] = bits if bits >= 0 else bits ^ (2**31 - 1)
        cuts[head, Cut.LAST] = last
        cuts[head, Cut.TAKEN] = of_head.get(last, 0)
        cuts[head, Cut.TOKENS] = sum(of_head.values())
        ranks, fits = workspace.ranked.ranks[row, heads][head], workspace.fitted.fits[row, heads][head]
        known = list(lists.exact[head])
        known_bits = int((lists.scores[head, known[-1]] + 0.0).view(torch.int32)) if known else 2**31 - 1
        ranks[Rank.KNOWN_KEY] = known_bits if known_bits >= 0 else known_bits ^ (2**31 - 1)
        ranks[Rank.KNOWN_LAST] = known[-1] if known else -1
        ranks[Rank.KNOWN_START] = 1000
        ranks[Rank.KNOWN] = 1000 + lists.last_exact[head]
        ranks[Rank.NEAR_BEFORE], ranks[Rank.NEAR_TOKENS] = 100, 55
        fits[Fit.REFERENCE], fits[Fit.TOTAL] = lists.total[head] - UNIT, 2.0**UNIT
        # The curve at the window's centre, 128, is 2 to the power of -CURVE.
        fits[Fit.A], fits[Fit.B] = 128 * 2.0 ** -(CURVE + 1), 2.0 ** -(CURVE + 1)
        for number, mass in lists.exact[head].items():
            workspace.ranked.masses[row, heads][head, number] = mass
    workspace.scored.sizes[row, kv_head, :count] = torch.tensor(lists.sizes, dtype=torch.int32)
    workspace.ranked.windows[row, heads, :4] = lists.windows.to(workspace.ranked.windows)
    workspace.kept.weights[row, heads, : lists.kept_weights.shape[1]] = lists.kept_weights.to(workspace.kept.weights)
    workspace.listed.totals[row, kv_head, : -(-count // SLICE)] = 0
    of_slices: dict[int, list[int]] = {}
    for number, tokens in lists.needed.items():
        of_slice = of_slices.setdefault(number // SLICE, [])
        at = number // SLICE * SLICE + len(of_slice)
        workspace.listed.numbers[row, kv_head, at] = number
        workspace.listed.needed[row, kv_head, at] = tokens
        of_slice.append(number)
        workspace.listed.totals[row, kv_head, number // SLICE] += 2**18 + tokens


@triton.jit  # type: ignore[untyped-decorator]
def _befores_lost(
    scored: Scored,
    fitted: Fitted,
    listed: Listed,
    order: Ordered,
    of_head: tl.tensor,
    of_kv_head: tl.tensor,
    taken_ptr: tl.tensor,
    found_ptr: tl.tensor,
) -> None:
    case = tl.program_id(0)
    taken = tl.load(taken_ptr + case)
    found = before_first_lost(scored, fitted, listed, order, of_head, of_kv_head, taken)
    tl.store(found_ptr + case, found)


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
    lengths = clustered * 8 // 5
    caps, sinks = torch.zeros(2, rows, dtype=torch.int32, device=device)
    caps[[1, 3]] = (lengths - clustered)[[1, 3]] + 7
    priority = torch.tensor([1, 0, 0, 1, 1], dtype=torch.int32, device=device)
    shares = torch.tensor([0.9, 0.9, 0.9, 0.0, 0.9], dtype=torch.float64, device=device)
    nowhere = sinks[:0]
    asked = TacticBatch(nowhere, clustered, sinks, shares, caps, priority)
    tables = Tables(nowhere, nowhere, nowhere, nowhere, 1, tl.constexpr(SPAN), tl.constexpr(OF_SPAN))
    of_rows = Rows.of(DecodeBatch.empty(rows, 16, 16, device))._replace(lengths=lengths)
    step_kernel[(STEP_PROGRAMS, kv_heads, rows)](
        Contexts(of_rows, asked, Entries(nowhere, 1), tables),
        Heads.sized(kv_heads * GROUP, kv_heads, 16),
        *workspace,
        SCALE * LOG2_E,
        group_block=4,
        num_warps=4,
    )
    place_kernel[(PLACE_PROGRAMS, kv_heads, rows)](
        workspace.kept, workspace.ordered, workspace.scored.clusters, num_warps=4
    )
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
            kept = int(lengths[row] - clustered[row]) if priority[row] else 0
            of_clusters, of_blocks = expected.targets(kept, sum(expected.needed.values()))
            assert workspace.kept.placed[row, kv_head, 0] == kept
            assert workspace.ordered.targets[row, kv_head, at].tolist() == [of_clusters[number] for number in numbers]
            assert workspace.kept.targets[row, kv_head, : len(of_blocks)].tolist() == of_blocks
    for head in range(GROUP):
        check_before_lost(lists[1][1], workspace, 1, 1, head)


def check_before_lost(lists: Lists, workspace: TacticWorkspace, row: int, kv_head: int, head: int) -> None:
    total, of_head = sum(lists.needed.values()), lists.taken[head]
    kept = [1, 7, total // 3, total - 1, total]
    if of_head:
        # The cap cuts only what others need of the cluster in which this head's list ends.
        last = list(of_head)[-1]
        kept.append(lists.places[last] + of_head[last])
    kept_tokens = torch.tensor(kept, dtype=torch.int32, device=workspace.ordered.placed.device)
    found = torch.zeros_like(kept_tokens)
    scored, _, _, fitted, listed, order = workspace
    of_head_in_all, of_kv_head = (2 * row + kv_head) * GROUP + head, 2 * row + kv_head
    _befores_lost[(len(kept),)](scored, fitted, listed, order, of_head_in_all, of_kv_head, kept_tokens, found)
    tokens = sum(of_head.values())
    assert found.clamp_max(tokens).tolist() == [lists.before_lost(head, count) for count in kept]


def test_lists_are_long_enough() -> None:
    """Runs that a program has several of, slices that are empty, a list shorter than a run."""
    longest = max(len(lists_of(kind, SPANS * OF_SPAN, 11).needed) for kind in KINDS)
    assert longest > max(SPLITS * RUN, _LISTED.value)
    few = lists_of("hardly any", SPANS * OF_SPAN, 0).needed
    assert len(few) < RUN
    assert len({number // SLICE for number in few}) < SPANS * OF_SPAN // SLICE
