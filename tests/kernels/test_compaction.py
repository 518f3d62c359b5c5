"""What is kept of a prompt, moved into few slots: there each KV head finds its own tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.caches import random_cache, scattered_context
from winnow_kernels.decode.compaction import arranged, compact, room_for

SLOTS, HEADS, DIM = 1024, 3, 16


@settings(max_examples=60)
@given(
    length=st.integers(1, 500),
    counts=st.lists(st.integers(1, 500), min_size=1, max_size=3),
    first=st.integers(0, 499),
    seed=st.integers(0, 2**16),
)
def test_each_kv_head_finds_its_own_tokens(length: int, counts: list[int], first: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    context = scattered_context([length], SLOTS, seed=seed)
    caches = [random_cache(SLOTS, HEADS, DIM, seed=seed + layer) for layer in range(len(counts) + 1)]
    before = [(cache.keys.clone(), cache.values.clone()) for cache in caches]
    counts = [min(count, length) for count in counts]
    # Policies keep nothing of the first layer, as of those with a sliding window.
    kept = {
        layer: torch.stack([torch.randperm(length, generator=generator)[:count] for _ in range(HEADS)])
        for layer, count in enumerate(counts, start=1)
    }
    first = min(first, length - max(counts))
    prompt = context.slots[0]
    room = prompt[first : first + room_for(kept)]
    assert len(room) == max(counts)
    places = compact(kept, caches, prompt, first)
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[room] = False
    for layer, cache in enumerate(caches):
        for ours, originals in zip((cache.keys, cache.values), before[layer], strict=True):
            assert torch.equal(ours[untouched], originals[untouched])
            if layer not in kept:
                assert torch.equal(ours, originals)
                continue
            for head in range(HEADS):
                own, now = kept[layer][head], places[layer][head]
                assert sorted(now.tolist()) == list(range(first, first + len(own)))
                assert torch.equal(ours[prompt[now], head], originals[prompt[own], head])


@settings(max_examples=60)
@given(length=st.integers(1, 200), count=st.integers(1, 200), first=st.integers(0, 199), seed=st.integers(0, 2**16))
def test_no_token_is_moved_to_where_one_lies_that_is_moved_later(
    length: int, count: int, first: int, seed: int
) -> None:
    count = min(count, length)
    first = min(first, length - count)
    own = torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:count]
    spare = torch.full((3,), -1)
    moved, places = arranged(torch.cat((own, spare)), first, length)
    assert torch.equal(moved[places[:count] - first], own)
    assert (moved[count:] == -1).all()
    for index in range(count):
        assert first + index not in moved[index + 1 : count]
