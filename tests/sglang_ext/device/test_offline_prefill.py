"""Prompts that are prefilled without a server, by the kernels, beside the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import ModelShape, write_model, write_weights
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.policies.attention_policy import parse_policy

POLICY = {"prefill": {"policy": "quoka", "budget": 64, "block": 64, "queries": 32}}


SHAPES = {
    "all full": ModelShape(kv_heads=2),
    # Of six layers the third and the last see the whole context.
    "windowed": ModelShape(family="gemma3_text", layers=6, query_heads=4, kv_heads=2, sliding_window=64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels_prefill_as_the_reference(shape: ModelShape, device: torch.device, tmp_path: Path) -> None:
    write_model(tmp_path, shape)
    write_weights(tmp_path)
    model = OfflineModel(tmp_path, device, torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 512, (length,), generator=generator).tolist() for length in (203, 40, 150)]
    with torch.inference_mode():
        dense, ours, reference = (
            PrefilledBatch(model, prompts, 8, policy=policy, scored=32, chunk=128, by_kernels=by_kernels)
            for policy, by_kernels in ((None, True), (parse_policy(POLICY), True), (parse_policy(POLICY), False))
        )
    torch.testing.assert_close(ours.last, reference.last, atol=2e-3, rtol=2e-3)
    assert ours.reads == reference.reads
    assert ours.reads["attended"] < dense.reads["attended"]
    # The second prompt is shorter than a budget, the others are not.
    changed = (ours.last - dense.last).abs().amax((1, 2))
    assert (changed > 1e-2).tolist() == [True, False, True]
