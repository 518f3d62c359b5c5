"""Models whose layers see a sliding window, but for some: policies act on these, and shares are of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.evaluation.fidelity.conftest import COVERING, MEMORY, SPAN, SPARSE, TOKENS, WINDOW, decode_policy
from tests.evaluation.fidelity.test_forcing import assert_alike, assert_same
from tests.models import ModelShape, write_model, write_weights
from winnow_evaluation.fidelity.delta_layers import calibrated_layers
from winnow_evaluation.fidelity.forcing import Forcing
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_evaluation.fidelity.prompts import Continued
from winnow_evaluation.fidelity.results import Distances, Result
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

FULL_LAYERS = [2, 5]
SHAPE = ModelShape(family="gemma3_text", layers=6, kv_heads=2)


def _parameters(name: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return rows[name] | ({"delta_layers": [2]} if name == "delta" else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"), SHAPE)
    write_weights(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> OfflineModel:
    return OfflineModel(folder, torch.device("cpu"))


def forcing_of(
    model: OfflineModel,
    prompts: list[list[int]],
    following: Tensor,
    *,
    policy: AttentionPolicy | None = None,
    chunk: int | None = None,
) -> Forcing:
    batch = PrefilledBatch(model, prompts, TOKENS, policy=policy, window=WINDOW, span=SPAN, chunk=chunk)
    return Forcing(batch, following[:, :-1], MEMORY)


@pytest.mark.parametrize("chunk", [None, 61])
def test_dense_attention_is_that_of_transformers(
    folder: Path, model: OfflineModel, prompts: list[list[int]], following: Tensor, chunk: int | None
) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        outcome = forcing_of(model, prompts, following, chunk=chunk).dense()
        for row, (prompt, after) in enumerate(zip(prompts, following, strict=True)):
            logits = network(torch.tensor([[*prompt, *after[:-1].tolist()]])).logits[0, len(prompt) :]
            found = model.log_probabilities(outcome.hidden[row])
            torch.testing.assert_close(found, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dense", *SPARSE])
def test_all_at_once_is_as_step_by_step(
    name: str, model: OfflineModel, prompts: list[list[int]], following: Tensor
) -> None:
    policy = decode_policy(name, {} if name == "dense" else _parameters(name, SPARSE))
    with torch.inference_mode():
        forcing = forcing_of(model, prompts, following)
        at_once, one_by_one = forcing.policy(policy), forcing.policy(policy, block=1)
        result = Result()
        result.add(Distances.between(model, one_by_one.hidden, at_once.hidden, following[:, 1:]), [TOKENS, TOKENS])
        result.add_reads(at_once, [TOKENS, TOKENS], None)
    (assert_alike if name.startswith("lowbit_") else assert_same)(at_once, one_by_one)
    assert at_once.layers == FULL_LAYERS
    if name != "dense":
        assert bool((at_once.counts["attended"] < at_once.counts["context"]).all())
        row = result.row()
        assert row["worst_layer"]["layer"] in FULL_LAYERS
        assert len(row["true_share_by_layer"]) == len(FULL_LAYERS)
        # Layers with a window would count as wholly held.
        assert row["true_share"] == pytest.approx(float(at_once.true_share.mean()))


@pytest.mark.parametrize("name", COVERING)
def test_a_policy_that_reads_everything_is_dense(
    name: str, model: OfflineModel, prompts: list[list[int]], following: Tensor
) -> None:
    with torch.inference_mode():
        forcing = forcing_of(model, prompts, following)
        dense, found = forcing.dense(), forcing.policy(decode_policy(name, _parameters(name, COVERING)))
    torch.testing.assert_close(found.hidden, dense.hidden, atol=1e-4, rtol=1e-4)


def test_contexts_are_counted_in_the_layers_that_policies_act_on(
    model: OfflineModel, prompts: list[list[int]], following: Tensor
) -> None:
    with torch.inference_mode():
        counts = forcing_of(model, prompts, following).dense().counts
    contexts = torch.tensor([[len(prompt) + 1 + token for token in range(TOKENS)] for prompt in prompts])
    assert torch.equal(counts["context"], contexts * len(FULL_LAYERS) * SHAPE.kv_heads)


def test_a_sparse_prefill_acts_there_alone(model: OfflineModel, prompts: list[list[int]], following: Tensor) -> None:
    quoka = parse_policy({"prefill": {"policy": "quoka", "budget": 32, "block": 64}})
    everything = parse_policy({"prefill": {"policy": "quoka", "budget": 4096, "block": 64}})
    with torch.inference_mode():
        dense = forcing_of(model, prompts, following).dense()
        sparse = forcing_of(model, prompts, following, policy=quoka).dense()
        covering = forcing_of(model, prompts, following, policy=everything).dense()
    torch.testing.assert_close(covering.hidden, dense.hidden, atol=1e-4, rtol=1e-4)
    assert float((sparse.hidden - dense.hidden).abs().max()) > 1e-2


def test_delta_layers_are_chosen_among_them(model: OfflineModel, prompts: list[list[int]], following: Tensor) -> None:
    with torch.inference_mode():
        layers = calibrated_layers(model, Continued(prompts[0], following[0].tolist()), 2, MEMORY)
    assert layers[0] == FULL_LAYERS[0]
    assert set(layers) <= set(FULL_LAYERS)
