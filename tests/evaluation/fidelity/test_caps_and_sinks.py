"""Models with soft caps (Gemma 2) and with sink logits (gpt-oss): every other layer has a sliding window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sglang_winnow.calibration.delta import has_other_softmax
from tests.evaluation.fidelity.conftest import SPARSE, decode_policy
from tests.evaluation.fidelity.test_forcing import assert_as_many, assert_same
from tests.evaluation.fidelity.test_sliding_windows import forcing_of
from tests.models import ModelShape, write_model, write_weights
from winnow_evaluation.fidelity.forcing import Outcome
from winnow_evaluation.offline_model import OfflineModel

# A cap that scores of random weights reach.
SHAPES = [
    ModelShape(family="gemma2", layers=4, kv_heads=2, logit_cap=2.0),
    ModelShape(family="gpt_oss", layers=4, kv_heads=2),
]
FULL_LAYERS = [1, 3]
BY_CODES = ("quoka", "lowbit_top_p", "lowbit_top_k")


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.family)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"), request.param)
    write_weights(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> OfflineModel:
    return OfflineModel(folder, torch.device("cpu"))


def test_dense_attention_is_that_of_transformers(
    folder: Path, model: OfflineModel, prompts: list[list[int]], following: Tensor
) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        outcome = forcing_of(model, prompts, following, chunk=61).dense()
        for row, (prompt, after) in enumerate(zip(prompts, following, strict=True)):
            logits = network(torch.tensor([[*prompt, *after[:-1].tolist()]])).logits[0, len(prompt) :]
            found = model.log_probabilities(outcome.hidden[row])
            torch.testing.assert_close(found, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dense", *SPARSE])
def test_all_at_once_is_as_step_by_step(
    name: str, model: OfflineModel, prompts: list[list[int]], following: Tensor
) -> None:
    """Outputs and shares that evaluation computes by itself are those of the policies' references."""
    parameters = {} if name == "dense" else SPARSE[name] | ({"delta_layers": [1]} if name == "delta" else {})
    policy = decode_policy(name, parameters)
    with torch.inference_mode():
        forcing = forcing_of(model, prompts, following)
        at_once, one_by_one = forcing.policy(policy), forcing.policy(policy, block=1)
    if name in BY_CODES:
        assert_near(at_once, one_by_one)
    elif name == "sparq":
        assert_as_many(at_once, one_by_one, 2e-3)
    else:
        assert_same(at_once, one_by_one)
    assert at_once.layers == FULL_LAYERS


def assert_near(found: Outcome, expected: Outcome) -> None:
    """The same, but where rounding has moved a level of a query, and with it a token across a threshold.

    Capped scores lie close together, and such a token may weigh as much as any.
    """
    for own, other in ((found.hidden, expected.hidden), (found.true_share, expected.true_share)):
        assert float((own - other).abs().mean()) < 5e-3


def test_delta_layers_are_not_calibrated_of_them(folder: Path) -> None:
    assert has_other_softmax(AutoModelForCausalLM.from_pretrained(folder))
