"""Oracles beside their definitions, in plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.evaluation.fidelity.conftest import MEMORY, TOKENS
from winnow_evaluation.fidelity.exact import Following, Scores
from winnow_evaluation.fidelity.forcing import Forcing
from winnow_evaluation.fidelity.oracles import Oracle, TopP, TopPages, TopTokens
from winnow_evaluation.fidelity.prefilled import PrefilledBatch

SINKS = 3


def _weights(context: int, sharpness: float, seed: int) -> Tensor:
    """Attention weights, [tokens, group, context], the last of each token not visible."""
    scores = sharpness * torch.randn(2, 3, context, generator=torch.Generator().manual_seed(seed))
    scores[0, :, -1] = -torch.inf
    return scores.softmax(-1)


@settings(max_examples=60)
@given(context=st.integers(4, 80), sharpness=st.floats(0, 5), share=st.floats(0.05, 0.999), seed=st.integers(0, 10_000))
def test_top_p_takes_the_fewest_tokens_that_hold_p(context: int, sharpness: float, share: float, seed: int) -> None:
    weights = _weights(context, sharpness, seed)
    always = torch.arange(context) < SINKS
    read = TopP(sinks=SINKS, share=share).choose(weights, always)
    for token in range(2):
        expected = set(range(SINKS))
        for head in weights[token].double():
            held = float(head[:SINKS].sum())
            for place in head[SINKS:].argsort(descending=True).tolist():
                # Float32 sums tell no finer.
                if held >= share - 1e-6:
                    break
                expected.add(SINKS + place)
                held += float(head[SINKS + place])
        taken = set(read[token].nonzero().flatten().tolist())
        for place in taken ^ expected:
            # Either is right where the sum is the share, to rounding, or where weights tie.
            of_heads = weights[token, :, place]
            ties = (weights[token] - of_heads[:, None]).abs().lt(1e-7).sum(-1) > 1
            sums = torch.stack(
                [head[head >= weight].sum() for head, weight in zip(weights[token], of_heads, strict=True)]
            )
            assert bool((ties | (sums - share).abs().lt(2e-6) | of_heads.lt(1e-6)).any())
        for head in weights[token]:
            assert float(head[read[token]].sum()) >= share - 2e-6


@settings(max_examples=40)
@given(context=st.integers(4, 80), budget=st.integers(3, 100), seed=st.integers(0, 10_000))
def test_top_tokens_are_the_sinks_and_the_heaviest(context: int, budget: int, seed: int) -> None:
    weights = _weights(context, 2.0, seed)
    read = TopTokens(sinks=SINKS, budget=budget).choose(weights, torch.arange(context) < SINKS)
    for token in range(2):
        mass = weights[token].sum(0).tolist()
        order = sorted(range(SINKS, context), key=lambda place: -mass[place])
        expected = [*range(SINKS), *order][:budget]
        assert read[token].nonzero().flatten().tolist() == sorted(expected)


@settings(max_examples=40)
@given(context=st.integers(4, 200), budget=st.integers(16, 200), seed=st.integers(0, 10_000))
def test_top_pages_are_that_of_the_sinks_and_the_heaviest(context: int, budget: int, seed: int) -> None:
    weights = _weights(context, 2.0, seed)
    read = TopPages(sinks=SINKS, budget=budget).choose(weights, torch.arange(context) < SINKS)
    for token in range(2):
        mass = weights[token].sum(0).double()
        pages = [float(mass[begin : begin + 16].sum()) for begin in range(0, context, 16)]
        order = [0, *sorted(range(1, len(pages)), key=lambda page: -pages[page])][: -(-budget // 16)]
        expected = [place for place in range(context) if place // 16 in order]
        assert read[token].nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("oracle", [TopP(share=0.5), TopP(share=0.9)])
def test_top_p_reaches_p_for_every_head(oracle: TopP, forcing: Forcing) -> None:
    with torch.inference_mode():
        outcome = forcing.oracle(oracle)
    assert float(outcome.true_share.min()) >= oracle.share - 1e-5
    assert (outcome.counts["attended"] < outcome.counts["context"]).all()


@pytest.mark.parametrize("oracle", [TopTokens(budget=64), TopPages(budget=64)])
def test_a_budget_is_what_a_kv_head_reads(oracle: Oracle, forcing: Forcing) -> None:
    with torch.inference_mode():
        outcome = forcing.oracle(oracle)
    # Two layers of two KV heads; the page that the context ends in may be partly filled.
    attended = outcome.counts["attended"]
    assert attended.shape == (2, TOKENS)
    assert (attended <= 4 * 64).all()
    assert (attended > 4 * 48).all()
    assert (outcome.counts["read_bytes"] == attended * 2 * 64 * 4).all()


@pytest.mark.parametrize("oracle", [TopP(share=0.05, newest=20), TopTokens(budget=60, newest=20)])
def test_the_newest_tokens_are_kept_back_to_where_a_page_begins(oracle: Oracle, batch: PrefilledBatch) -> None:
    following = Following(batch, range(2), 0, TOKENS, MEMORY)
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(2, TOKENS, 4, batch.model.head_dim, generator=generator)
    with torch.inference_mode():
        read = oracle.read(Scores.of(following, 0, queries, slice(0, 2)))
    for prompt, lengths in enumerate(following.lengths.tolist()):
        for token, length in enumerate(lengths):
            first = (length - 20) // 16 * 16
            own = read[prompt, :, token]
            assert own[:, first:length].all()
            assert own[:, :16].all()
            assert not own[:, length:].any()
            # Others are not read for being new.
            assert not own[:, :first].all()
    if isinstance(oracle, TopTokens):
        assert (read.sum(-1) == 60).all()


def test_an_oracle_that_reads_everything_is_dense(forcing: Forcing) -> None:
    with torch.inference_mode():
        dense = forcing.dense()
        for oracle in (TopP(share=1.0), TopTokens(budget=4096), TopPages(budget=4096)):
            outcome = forcing.oracle(oracle)
            torch.testing.assert_close(outcome.hidden, dense.hidden, atol=1e-4, rtol=1e-4)
            assert torch.equal(outcome.counts["attended"], dense.counts["attended"])


def test_the_best_tokens_hold_more_than_the_best_pages(forcing: Forcing) -> None:
    with torch.inference_mode():
        tokens, pages = (forcing.oracle(oracle) for oracle in (TopTokens(budget=64), TopPages(budget=64)))
    # In the first layer both see the same queries.
    assert (tokens.true_share[0].mean(-1) >= pages.true_share[0].mean(-1) - 1e-6).all()
    assert float(tokens.true_share[0].mean()) > float(pages.true_share[0].mean())
