"""Decode on the device with the heads that models have: dimensions, and query heads of a KV head."""

from __future__ import annotations

import pytest
import torch

from tests.sglang_ext.device.test_decode import POLICIES, Shape, compare, policies_act_at_every_length

__all__ = ["policies_act_at_every_length"]

SHAPES = [Shape(2, group, head_dim) for head_dim in (64, 80, 96, 128, 256) for group in (1, 4, 5)]
SHAPES += [Shape(1, group, 128) for group in (2, 3, 6, 7, 8, 16)]


# In the interpreter each takes minutes.
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.group} heads of {shape.head_dim}")
def test_all_policies_in_one_batch(shape: Shape, device: torch.device) -> None:
    lengths = [140 + 13 * i % 100 for i in range(len(POLICIES))]
    compare(list(POLICIES), lengths, device, shape=shape)
