"""A server on a GPU serves what the presets ask for, unless it is told what to serve."""

from __future__ import annotations

import pytest
import torch

from sglang_winnow.served_policies import served_policies
from winnow_kernels.policies.declarations import DECLARATIONS
from winnow_kernels.policies.registry import INDEXED_BY_DEFAULT, POLICIES_SETTING
from winnow_service.policies.presets import PRESETS

ASKED = {preset.attention.decode.policy for preset in PRESETS.values()}


def test_a_server_on_a_gpu_serves_every_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICIES_SETTING, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert set(served_policies(verifies=True)) >= ASKED


def test_it_makes_room_for_no_other_index() -> None:
    assert set(INDEXED_BY_DEFAULT) == {name for name in ASKED if DECLARATIONS[name].index is not None}
