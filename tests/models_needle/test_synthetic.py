"""Random tokens to copy and to recall: what is learned follows from what came before."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from needle_training.synthetic import Batch, copying, recall
from needle_training.train import Plan, SyntheticStage

FIRST, VOCABULARY = 6, 6000
seeds = st.integers(0, 2**63 - 1)
stages = st.sampled_from([stage for stage in Plan().synthetic if stage.length <= 1024])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _check_tokens(batch: Batch, rows: int, length: int) -> None:
    assert batch.tokens.shape == batch.weights.shape == (rows, length)
    assert batch.tokens.dtype == torch.int64
    assert batch.weights.dtype == torch.float32
    assert int(batch.tokens.min()) >= FIRST
    assert int(batch.tokens.max()) < VOCABULARY


@given(seeds, st.integers(10, 400))
def test_a_copied_token_equals_the_one_at_its_source(seed: int, length: int) -> None:
    batch = copying(4, length, FIRST, VOCABULARY, _generator(seed))
    _check_tokens(batch, 4, length)
    for tokens, weights in zip(batch.tokens.tolist(), batch.weights.tolist(), strict=True):
        learned = [place for place, weight in enumerate(weights) if weight]
        assert {weights[place] for place in learned} == {1.0}
        again, end = learned[0] - 1, learned[-1] + 1
        assert learned == list(range(again + 1, end))
        size = end - again
        assert 4 <= size <= length // 2
        sources = [start for start in range(again - size + 1) if tokens[start : start + size] == tokens[again:end]]
        assert sources


@given(seeds, stages, st.data())
def test_a_recalled_value_was_told_with_its_key(seed: int, stage: SyntheticStage, data: st.DataObject) -> None:
    keys = data.draw(st.sampled_from(stage.key_sizes))
    links = data.draw(st.sampled_from(stage.link_sizes))
    values = data.draw(st.sampled_from(stage.value_sizes))
    filler = data.draw(st.integers(0, stage.filler))
    batch = recall(3, stage.length, FIRST, VOCABULARY, _generator(seed), keys, links, values, filler)
    _check_tokens(batch, 3, stage.length)
    record = keys + links + values
    for tokens, weights in zip(batch.tokens.tolist(), batch.weights.tolist(), strict=True):
        first = weights.index(1.0) - keys - links
        queries = (stage.length - first) // record
        assert queries >= 2
        assert weights == [0.0] * first + ([0.0] * (keys + links) + [1.0] * values) * queries
        asked = {tuple(tokens[start : start + record]) for start in range(first, stage.length, record)}
        told = {tuple(tokens[start : start + record]) for start in range(0, first, record + filler)}
        assert len(asked) == queries
        assert asked <= told


@pytest.mark.parametrize("link_size", [0, 2])
def test_keys_of_one_token_are_told_once(link_size: int) -> None:
    """One key, one value: otherwise the value would be a guess."""
    records = 96 // (2 + link_size)
    batch = recall(50, 128, FIRST, 300, _generator(1), 1, link_size, 1, 0)
    keys = batch.tokens[:, : records * (2 + link_size) : 2 + link_size]
    assert keys.shape[1] == records
    assert all(len(set(row)) == records for row in keys.tolist())


def test_the_same_seed_gives_the_same_batch() -> None:
    seed = random.Random(3).getrandbits(32)
    one, other = (recall(5, 256, FIRST, 500, _generator(seed), 2, 1, 2, 3) for _ in range(2))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.weights, other.weights)
    assert not torch.equal(one.tokens, recall(5, 256, FIRST, 500, _generator(seed + 1), 2, 1, 2, 3).tokens)
