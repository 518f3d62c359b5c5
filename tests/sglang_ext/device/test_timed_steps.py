"""The decode steps that a calibration times on a GPU: they attend as those of the torch path do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.evaluation.fidelity.conftest import MEMORY, SPARSE, WINDOW, decode_policy
from tests.models import ModelShape, write_model, write_weights
from winnow_evaluation.fidelity.device_steps import DeviceSteps, time_steps
from winnow_evaluation.fidelity.forcing import DENSE, Forcing
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_evaluation.offline_model import OfflineModel

TOKENS, PROMPT = 3, 203
PLAIN = ModelShape(layers=2, kv_heads=2)
SLIDING = ModelShape(family="gemma3_text", layers=4, kv_heads=2, sliding_window=64)
# Every third layer sees everything: Δ-layers are among them.
PARAMETERS = {PLAIN: SPARSE, SLIDING: SPARSE | {"delta": SPARSE["delta"] | {"delta_layers": [2]}}}


@pytest.mark.parametrize("shape", [PLAIN, pytest.param(SLIDING, marks=pytest.mark.full)], ids=["plain", "sliding"])
def test_steps_attend_as_the_torch_path_does(shape: ModelShape, device: torch.device, tmp_path: Path) -> None:
    folder = write_model(tmp_path, shape)
    write_weights(folder)
    model = OfflineModel(folder, device)
    generator = torch.Generator().manual_seed(0)
    prompt, following = torch.randint(2, 512, (PROMPT + TOKENS,), generator=generator).split([PROMPT, TOKENS])
    policies = [DENSE, *(decode_policy(name, fields) for name, fields in PARAMETERS[shape].items())]
    with torch.inference_mode():
        batch = PrefilledBatch(model, [prompt.tolist()], TOKENS, window=WINDOW)
        forcing = Forcing(batch, following[None].to(device), MEMORY)
        queries = forcing.queries()
        expected = [[output[:, 0] for output in forcing.replay(policy, queries).outputs] for policy in policies]
        of_full_layers = [queries[layer] for layer in model.full_layers]
        steps = DeviceSteps(batch, policies, of_full_layers)
        # From then on policies have other steps behind them.
        for step in (0, 1, 0):
            for number in range(len(policies)):
                steps.prepare(number, step)
                steps.run()
                if step == 0:
                    for output, wanted in zip(steps.outputs, expected[number], strict=True):
                        torch.testing.assert_close(output, wanted, rtol=1e-3, atol=1e-4)
        # Of requests that are gone selectors let go: in this mode, as their tensors are of it.
        del steps
        if device.type == "cuda":
            seconds = time_steps(batch, policies, of_full_layers, TOKENS + 1)
            assert [len(own) for own in seconds] == [TOKENS + 1] * len(policies)
            assert all(second > 0 for own in seconds for second in own)
