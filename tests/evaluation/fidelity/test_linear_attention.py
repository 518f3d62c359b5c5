"""Models with linear attention are refused where policies are measured offline, and where Δ-layers are calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_winnow.calibration.delta import calibrate
from tests.models import LINEAR_ATTENTION, Family, ModelShape, write_model, write_weights
from winnow_evaluation.offline_model import OfflineModel


@pytest.mark.parametrize("family", LINEAR_ATTENTION)
def test_models_with_linear_attention_are_refused(tmp_path: Path, family: Family) -> None:
    folder = write_model(tmp_path / "model", ModelShape(family=family, layers=2, kv_heads=2))
    write_weights(folder)
    with pytest.raises(ValueError, match="models with linear attention are not measured offline"):
        OfflineModel(folder, torch.device("cpu"))
    with pytest.raises(ValueError, match="Δ-layers cannot be calibrated of a model with linear attention"):
        calibrate(folder, ["a b c"], "cpu", steps=1, full_layers=0, words=3)
