"""What every policy computes over a KV cache in 8 bits: the same as over one that has the same numbers in 32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.sglang_ext.device.test_decode import POLICIES, Server, by_torch, in_8_bits, policies_act_at_every_length
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.quoka.reference import quoka_prefill

__all__ = ["policies_act_at_every_length"]

LENGTHS = [208, 143]
CPU = torch.device("cpu")


def rounded(vectors: Tensor) -> Tensor:
    return in_8_bits(vectors).float()


@pytest.mark.parametrize("name", POLICIES)
def test_steps_equal_those_of_the_same_numbers_in_32_bits(name: str) -> None:
    narrow, wide = (Server([name, name], LENGTHS, CPU, stored=stored) for stored in (in_8_bits, rounded))
    for step in range(2):
        for own, expected in zip(by_torch(narrow, step), by_torch(wide, step), strict=True):
            torch.testing.assert_close(own, expected, rtol=2e-3, atol=2e-3)
        narrow.grow()
        wide.grow()
    read = [server.statistics.rows[1:3, Field.DECODE_CONTEXT_BYTES] for server in (narrow, wide)]
    assert torch.equal(4 * read[0], read[1])


def test_sparse_prefill_equals_that_of_the_same_numbers_in_32_bits() -> None:
    wide = random_cache(512, 2, 64, 1)
    slots = scattered_context([400], 512, 16, 1).slots[0]
    queries = random_queries(200, 4, 64, 1)
    parameters = QuokaPrefill(budget=64, block=64)
    own, expected = (
        quoka_prefill(queries, slots, LayerCache(stored(wide.keys), stored(wide.values)), 0.1, parameters, None)[0]
        for stored in (in_8_bits, rounded)
    )
    torch.testing.assert_close(own, expected, rtol=2e-3, atol=2e-3)
