"""Pages that hold most in checks, against a plain float64 version; what drafts attend to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_float64 import scores_of_head
from tests.kernels.caches import random_cache, random_queries, random_softmax, scattered_context
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.policies.verified_pages.parameters import VerifiedPages
from winnow_kernels.policies.verified_pages.reference import CheckedPages, VerifiedPagesStep, page_masses

KV_HEADS, GROUP, HEAD_DIM, PAGE, SCALE = 2, 3, 64, 16, 0.3


def plain_masses(queries: Tensor, slots: Tensor, cache: LayerCache, kv_head: int) -> list[float]:
    """Each page's share of the attention, token by token and head by head, float64."""
    length = len(slots)
    masses = [0.0] * -(-length // PAGE)
    for token in range(len(queries)):
        seen = length - len(queries) + token + 1
        keys = cache.keys[slots[:seen], kv_head]
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            weights = scores_of_head(queries[token, head][None], keys, SCALE, cache.softmax.cap)[0].softmax(0)
            for position, weight in enumerate(weights.tolist()):
                masses[position // PAGE] += weight / (len(queries) * GROUP)
    return masses


@given(st.integers(1, 200), st.integers(1, 6), st.sampled_from(["plain", "cap and sinks"]), st.integers(0, 99))
def test_masses_are_those_of_attention(length: int, new_tokens: int, softmax: str, seed: int) -> None:
    length = max(length, new_tokens)
    cache = replace(random_cache(512, KV_HEADS, HEAD_DIM, seed), softmax=random_softmax(softmax, KV_HEADS * GROUP))
    slots = scattered_context([length], 512, PAGE, seed).slots[0, :length]
    queries = random_queries(new_tokens, KV_HEADS * GROUP, HEAD_DIM, seed)
    found = page_masses(queries, slots, cache, SCALE, PAGE)
    for head in range(KV_HEADS):
        torch.testing.assert_close(
            found[head].double(), torch.tensor(plain_masses(queries, slots, cache, head)).double(), rtol=1e-4, atol=1e-6
        )


@given(
    st.lists(st.integers(1, 17), min_size=1, max_size=4),
    st.integers(20, 300),
    st.integers(0, 40),
    st.integers(16, 48),
    st.integers(0, 120),
    st.integers(0, 99),
)
def test_what_held_most_in_the_last_check_is_kept(
    checks: list[int], cached: int, sinks: int, recency: int, more: int, seed: int
) -> None:
    parameters = VerifiedPages(budget=sinks + recency + more, sinks=sinks, recency=recency)
    cache = random_cache(1024, KV_HEADS, HEAD_DIM, seed)
    context = scattered_context([1000], 1024, PAGE, seed)
    state = CheckedPages(parameters, PAGE, 1, KV_HEADS, cached + 1)
    budget = max(-(-parameters.budget // PAGE), -(-recency // PAGE) + -(-sinks // PAGE))
    for number, new_tokens in enumerate(checks):
        slots = context.slots[0, : cached + new_tokens]
        queries = random_queries(new_tokens, KV_HEADS * GROUP, HEAD_DIM, seed + number)
        state.observe(0, queries, slots, cache, SCALE)
        first = max(0, cached // PAGE - -(-recency // PAGE))
        assert state.since == first * PAGE
        for head in range(KV_HEADS):
            masses = plain_masses(queries, slots, cache, head)
            always = range(min(-(-sinks // PAGE), first))
            others = sorted(range(len(always), first), key=lambda page: -masses[page])
            most = max(0, budget - -(-recency // PAGE) - -(-sinks // PAGE))
            kept = sorted([*always, *others[:most]])
            assert state.kept[0][head].tolist() == [page * PAGE + place for page in kept for place in range(PAGE)]
        cached += new_tokens


@pytest.mark.parametrize("length", [30, 65, 200])
def test_before_the_first_check_the_newest_pages_are_read(length: int) -> None:
    parameters = VerifiedPages(budget=96, sinks=16, recency=32)
    cache = random_cache(512, KV_HEADS, HEAD_DIM, 1)
    context = scattered_context([length], 512, PAGE, 1)
    state = CheckedPages(parameters, PAGE, 1, KV_HEADS, length)
    step = VerifiedPagesStep(context, SCALE, None, [state])
    selection = step.select(0, random_queries(1, KV_HEADS * GROUP, HEAD_DIM, 1), cache, Meter(1, context.device))
    newest = max(0, (length - 1) // PAGE - 5) * PAGE
    expected = {*range(min(16, newest)), *range(newest, length)}
    for head in range(KV_HEADS):
        slots = selection.slots[0, head, : int(selection.counts[0, head])]
        assert sorted(slots.tolist()) == sorted(context.slots[0, sorted(expected)].tolist())


def test_every_row_reads_what_its_own_checks_have_kept() -> None:
    cache = random_cache(1024, KV_HEADS, HEAD_DIM, 3)
    lengths = [200, 90]
    context = scattered_context(lengths, 1024, PAGE, 3)
    states = []
    for row, length in enumerate(lengths):
        state = CheckedPages(VerifiedPages(budget=96, recency=16), PAGE, 1, KV_HEADS, length)
        queries = random_queries(4, KV_HEADS * GROUP, HEAD_DIM, row)
        state.observe(0, queries, context.slots[row, : length - 1], cache, SCALE)
        states.append(state)
    own: Context = context
    step = VerifiedPagesStep(own, SCALE, None, states)
    selection = step.select(0, random_queries(2, KV_HEADS * GROUP, HEAD_DIM, 5), cache, Meter(2, own.device))
    for row, (state, length) in enumerate(zip(states, lengths, strict=True)):
        for head in range(KV_HEADS):
            positions = [*state.kept[0][head].tolist(), *range(state.since, length)]
            slots = selection.slots[row, head, : int(selection.counts[row, head])]
            assert sorted(slots.tolist()) == sorted(own.slots[row, positions].tolist())
