"""What follows a prompt, all of it at once: beside step by step, transformers under a mask, and loops in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.evaluation.fidelity.conftest import COVERING, MEMORY, SPARSE, TOKENS, WINDOW, decode_policy
from winnow_evaluation.fidelity.exact import Following
from winnow_evaluation.fidelity.forcing import Forcing, Outcome
from winnow_evaluation.fidelity.passes import PolicyPass
from winnow_evaluation.fidelity.prefilled import PAGE_SIZE, PrefilledBatch
from winnow_evaluation.fidelity.results import Distances, Result
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.policies.snapkv.reference import SnapKVState

STOPS = {"scale": 0.5, "direction": 0.5, "patience": 1}


def _kl(model: OfflineModel, dense: Outcome, found: Outcome, following: Tensor) -> float:
    return float(Distances.between(model, dense.hidden, found.hidden, following[:, 1:]).kl.mean())


def assert_same(found: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.true_share, expected.true_share, atol=1e-4, rtol=1e-4)
    assert found.counts.keys() == expected.counts.keys()
    for name, counts in found.counts.items():
        assert torch.equal(counts, expected.counts[name]), name
    if found.reported_share is not None:
        assert expected.reported_share is not None
        torch.testing.assert_close(found.reported_share, expected.reported_share, atol=1e-4, rtol=1e-4)


def assert_as_many(found: Outcome, expected: Outcome, distance: float) -> None:
    """The same counts, and outputs and shares that are apart by less than ``distance`` on average.

    Rounding differs between CPUs, and may have exchanged tokens that score alike.
    """
    assert found.counts.keys() == expected.counts.keys()
    for name, counts in found.counts.items():
        assert torch.equal(counts, expected.counts[name]), name
    for own, other in ((found.hidden, expected.hidden), (found.true_share, expected.true_share)):
        assert float((own - other).abs().mean()) < distance


def assert_alike(found: Outcome, expected: Outcome) -> None:
    """The same, but where rounding has moved a level of a query, and with it a token across a threshold."""
    for name in ("attended", "read_bytes"):
        is_same = found.counts[name] == expected.counts[name]
        assert float(is_same.double().mean()) > 0.85, name
        torch.testing.assert_close(found.counts[name], expected.counts[name], rtol=0.02, atol=0)
    for own, other in (
        (found.hidden, expected.hidden),
        (found.true_share, expected.true_share),
        (found.reported_share, expected.reported_share),
    ):
        assert own is not None
        assert other is not None
        assert float((own - other).abs().mean()) < 1e-3


def _assert_forced_alike(name: str, found: Outcome, expected: Outcome) -> None:
    (assert_alike if name.startswith("lowbit_") else assert_same)(found, expected)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("name", ["dense", *SPARSE])
def test_all_at_once_is_as_step_by_step(name: str, forcing: Forcing, *, stops: bool) -> None:
    rest: dict[str, Any] = {"early_termination": STOPS} if stops else {}
    policy = decode_policy(name, SPARSE.get(name, {}), **rest)
    with torch.inference_mode():
        _assert_forced_alike(name, forcing.policy(policy), forcing.policy(policy, block=1))


@pytest.mark.parametrize("name", SPARSE)
def test_all_at_once_is_as_in_blocks_and_prompt_by_prompt(name: str, forcing: Forcing) -> None:
    policy = decode_policy(name, SPARSE[name])
    with torch.inference_mode():
        at_once = forcing.policy(policy)
        _assert_forced_alike(name, at_once, forcing.policy(policy, block=7))
        alone = [forcing.policy(policy, prompts=range(prompt, prompt + 1)) for prompt in range(2)]
        _assert_forced_alike(name, at_once, Outcome.joined(alone, 0))


@pytest.mark.parametrize("name", SPARSE)
def test_nothing_leaks_from_one_policy_to_the_next(name: str, forcing: Forcing) -> None:
    policy = decode_policy(name, SPARSE[name])
    with torch.inference_mode():
        before = forcing.policy(policy)
        forcing.policy(decode_policy("streaming_llm", {"sinks": 0, "window": 16}))
        assert_same(before, forcing.policy(policy))


def test_clusters_that_a_step_begins_with_are_as_step_by_step(model: OfflineModel) -> None:
    # A piece of the span is full, and clustered, when six tokens have followed the prompt.
    span, piece, newly = 4096, 1024, 6
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(2, 512, (piece - newly,), generator=generator).tolist()
    tokens = torch.randint(2, 512, (1, 12), generator=generator)
    policy = decode_policy("tactic", SPARSE["tactic"])
    with torch.inference_mode():
        forcing = Forcing(PrefilledBatch(model, [prompt], tokens.shape[1], span=span), tokens, 2**26)
        at_once = forcing.policy(policy)
        assert_same(at_once, forcing.policy(policy, block=1))
    attended, context = (at_once.counts[name][0].tolist() for name in ("attended", "context"))
    assert attended[:newly] == context[:newly]
    assert attended[newly] < context[newly]


@pytest.mark.parametrize("name", COVERING)
def test_a_policy_that_reads_everything_is_dense(
    name: str, model: OfflineModel, forcing: Forcing, following: Tensor
) -> None:
    with torch.inference_mode():
        dense, found = forcing.dense(), forcing.policy(decode_policy(name, COVERING[name]))
        assert _kl(model, dense, found, following) == pytest.approx(0, abs=1e-6)
    assert float(found.true_share.min()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(found.counts["attended"], dense.counts["attended"])


@pytest.mark.parametrize("name", SPARSE)
def test_a_policy_that_reads_little_is_not_dense(
    name: str, model: OfflineModel, forcing: Forcing, following: Tensor
) -> None:
    with torch.inference_mode():
        dense, found = forcing.dense(), forcing.policy(decode_policy(name, SPARSE[name]))
        assert _kl(model, dense, found, following) > 0.01
    assert float(found.true_share.mean()) < 0.9
    assert (found.counts["context"] == dense.counts["context"]).all()


def test_dense_once_more_is_within_rounding(model: OfflineModel, forcing: Forcing, following: Tensor) -> None:
    with torch.inference_mode():
        dense, again = forcing.dense(), forcing.dense_one_by_one()
        assert _kl(model, dense, again, following) == pytest.approx(0, abs=1e-6)
    assert torch.equal(again.counts["read_bytes"], dense.counts["context_bytes"])


def test_distances_are_those_of_transformers_under_a_mask(
    folder: Path, model: OfflineModel, prompts: list[list[int]], forcing: Forcing, following: Tensor
) -> None:
    sinks, window = SPARSE["streaming_llm"]["sinks"], SPARSE["streaming_llm"]["window"]
    with torch.inference_mode():
        dense, found = forcing.dense(), forcing.policy(decode_policy("streaming_llm", SPARSE["streaming_llm"]))
        distances = Distances.between(model, dense.hidden, found.hidden, following[:, 1:])
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    for number, prompt in enumerate(prompts):
        tokens = torch.tensor([[*prompt, *following[number, :-1].tolist()]])
        places = torch.arange(tokens.shape[1])
        causal = places <= places[:, None]
        near = causal & ((places < sinks) | (places > places[:, None] - window))
        masked = torch.where((places >= len(prompt))[:, None], near, causal)
        predicted = []
        for visible in (causal, masked):
            mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
            with torch.inference_mode():
                logits: Tensor = network(tokens, attention_mask=mask[None, None]).logits[0]
            predicted.append(logits.double().log_softmax(-1)[len(prompt) :])
        exact, sparse = predicted
        kl = (exact.exp() * (exact - sparse)).sum(-1)
        true = following[number, 1:, None]
        torch.testing.assert_close(distances.kl[number], kl, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(
            distances.loss_change[number], (exact - sparse).gather(1, true)[:, 0], atol=1e-3, rtol=1e-3
        )
        assert distances.top1[number].tolist() == (exact.argmax(-1) == sparse.argmax(-1)).double().tolist()


@pytest.mark.parametrize("stops", [False, True])
def test_true_shares_are_the_mass_of_what_was_read(batch: PrefilledBatch, *, stops: bool) -> None:
    # One calm tile is enough, and every tile is calm: two of the three tiles of 64 are read, the sinks among them.
    rest: dict[str, Any] = {"early_termination": {"scale": 1.0, "direction": 2.0, "patience": 1}} if stops else {}
    policy = decode_policy("streaming_llm", {"sinks": 2, "window": 138}, **rest)
    read = 128 if stops else 140
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(2, 1, 4, batch.model.head_dim, generator=generator) / 64
    following = Following(batch, range(2), 0, 1, MEMORY)
    slots = following.slots
    with torch.inference_mode():
        keys = torch.randn(2, 1, 2, batch.model.head_dim, generator=generator)
        batch.begin(slots)
        batch.write(0, slots, keys, keys)
        found = PolicyPass(following, policy, [batch.state(prompt, policy) for prompt in range(2)])
        found.attend(0, queries)
    for prompt, length in enumerate(batch.lengths):
        own = batch.caches[0].keys[batch.slots[prompt, : length + 1]].double()
        for head in range(4):
            weights = (own[:, head // 2] @ queries[prompt, 0, head].double() * batch.scale).softmax(0)
            held = float(weights[:2].sum() + weights[-(read - 2) :].sum())
            assert float(found.true_share[0, prompt, head]) == pytest.approx(held, rel=1e-5)


def test_a_reported_share_is_what_the_step_reports_layer_by_layer(
    model: OfflineModel, forcing: Forcing, following: Tensor
) -> None:
    result = Result()
    with torch.inference_mode():
        outcome = forcing.policy(decode_policy("tactic", {"p": 0.5, "full_layers": 1}))
        same = Distances.between(model, outcome.hidden, outcome.hidden, following[:, 1:])
    assert outcome.reported_share is not None
    result.add(same, [TOKENS, 5])
    result.add_reads(outcome, [TOKENS, 5], 0.5)
    row = result.row()
    # The first layer is full.
    assert (outcome.reported_share[0] == 1).all()
    assert (outcome.reported_share[1] < 1).any()
    told = [float(outcome.reported_share[:, 0].mean()), float(outcome.reported_share[:, 1, :5].mean())]
    assert row["reported_share"] == pytest.approx(sum(told) / 2)
    held = [outcome.true_share[:, 0], outcome.true_share[:, 1, :5]]
    assert row["true_share"] == pytest.approx(sum(float(own.mean()) for own in held) / 2)
    assert row["success"] == pytest.approx(sum(float((own >= 0.5).double().mean()) for own in held) / 2)
    errors = [
        float(outcome.reported_share[layer, prompt, token] - outcome.true_share[layer, prompt, token].mean())
        for prompt, count in enumerate((TOKENS, 5))
        for layer in range(2)
        for token in range(count)
    ]
    assert row["share_error"] == pytest.approx(sum(errors) / len(errors), abs=1e-6)
    rank = round(0.95 * len(errors)) - 1
    assert row["share_error_p95"] == pytest.approx(sorted(map(abs, errors))[rank], abs=1e-6)
    assert row["worst_layer"]["layer"] == 1
    assert row["true_share_by_layer"][0] == 1


def test_indexes_are_of_the_continuation_that_is_being_forced(batch: PrefilledBatch, following: Tensor) -> None:
    page = batch.lengths[0] // PAGE_SIZE
    slots = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
    built = []
    with torch.inference_mode():
        forcing = Forcing(batch, following[:, :-1], MEMORY)
        for budget in (48, 128):
            forcing.policy(decode_policy("quest", {"budget": budget, "full_layers": 0}))
            bounds = batch.indexes[PageBounds].bounds[1][page].clone()
            keys = batch.caches[1].keys[slots]
            assert torch.equal(bounds, torch.cat((keys.amax(0), keys.amin(0)), dim=-1))
            built.append(bounds)
    assert not torch.equal(*built)


def test_how_much_memory_there_is_changes_nothing(batch: PrefilledBatch, following: Tensor) -> None:
    policy = decode_policy("tactic", SPARSE["tactic"])
    with torch.inference_mode():
        little, much = (Forcing(batch, following[:, :-1], memory).policy(policy) for memory in (1, 2**30))
    assert_same(little, much)


def test_a_prompt_prefilled_in_chunks_keeps_the_same_queries(model: OfflineModel, prompts: list[list[int]]) -> None:
    policy = decode_policy("snapkv", SPARSE["snapkv"])
    kept = []
    with torch.inference_mode():
        for chunk in (None, 90):
            batch = PrefilledBatch(model, prompts, 1, scored=100, window=WINDOW, chunk=chunk)
            state = batch.state(0, policy)
            assert isinstance(state.kept, SnapKVState)
            kept.append((batch.last, state.kept.observation._queries[1]))
    for whole, in_chunks in zip(*kept, strict=True):
        torch.testing.assert_close(whole, in_chunks, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SPARSE)
def test_replayed_queries_attend_as_a_policys_steps_do(name: str, forcing: Forcing, batch: PrefilledBatch) -> None:
    policy = decode_policy(name, SPARSE[name])
    with torch.inference_mode():
        queries = forcing.queries()
        replayed = forcing.replay(policy, queries)
        # In the first layer nothing has been lost yet: its queries, keys and values are those of dense attention.
        following = Following(batch, range(batch.prompts), TOKENS - 1, 1, MEMORY)
        batch.use_codes(2)
        steps = PolicyPass(following, policy, [batch.state(prompt, policy) for prompt in range(batch.prompts)])
        own = steps.attend(0, queries[0][:, -1:])
    found = replayed.outputs[0][:, -1:]
    if name.startswith("lowbit_"):
        assert float((found - own).abs().mean()) < 1e-3
    else:
        torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)
    assert replayed.kv_read_ratio > 0


@pytest.mark.parametrize("name", COVERING)
def test_what_covers_the_context_replays_dense_attention(name: str, forcing: Forcing) -> None:
    with torch.inference_mode():
        queries = forcing.queries()
        found = forcing.replay(decode_policy(name, COVERING[name]), queries)
        dense = forcing.replay(decode_policy("dense", {}), queries)
    assert dense.kv_read_ratio == 1
    for own, other in zip(found.outputs, dense.outputs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_a_greedy_answer_is_what_dense_attention_says_when_it_is_forced(
    model: OfflineModel, batch: PrefilledBatch
) -> None:
    with torch.inference_mode():
        forcing, said = Forcing.greedy(batch, TOKENS, MEMORY)
        assert torch.equal(model.best(forcing.dense().hidden), said)
        assert torch.equal(forcing._tokens[:, 0], model.best(batch.last[:, -1]))
    assert torch.equal(forcing._tokens[:, 1:], said[:, :-1])


def test_times_are_of_each_policy_and_step_and_change_nothing(forcing: Forcing) -> None:
    policies = [decode_policy("dense", {}), *(decode_policy(name, SPARSE[name]) for name in ("quest", "lowbit_top_k"))]
    with torch.inference_mode():
        queries = forcing.queries()
        before = forcing.replay(policies[1], queries)
        # There are fewer tokens than steps.
        seconds = forcing.time(policies, queries, TOKENS + 2)
        after = forcing.replay(policies[1], queries)
    assert [len(own) for own in seconds] == [TOKENS + 2] * 3
    assert all(second > 0 for own in seconds for second in own)
    for own, other in zip(before.outputs, after.outputs, strict=True):
        assert torch.equal(own, other)
