"""What a server chooses of its indexes, on its way to them."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.caches import bytes_allocated, random_cache
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import KEY_BITS, IndexSettings

SLOTS, PAGE, DIM = 256, 16, 32


@pytest.mark.parametrize("bits", KEY_BITS)
def test_codes_have_the_bits_of_the_server_and_take_what_is_predicted(bits: int) -> None:
    settings = IndexSettings(key_bits=bits)
    caches = [random_cache(SLOTS, 2, DIM, dtype=torch.float16) for _ in range(3)]
    indexes = Indexes(caches, PAGE, torch.device("cpu"), settings)
    codes = indexes[KeyCodes]
    assert codes.bits == bits
    predicted = KeyCodes.bytes_per_slot(PoolShape.of(caches), PAGE, settings)
    assert bytes_allocated(codes) == predicted * SLOTS
    assert indexes[KeyCodes] is codes
    assert indexes[PageBounds].shape == codes.shape


@pytest.mark.parametrize("bits", [1, 5, 0])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=rf"^key_bits: must be one of 2, 3, 4; it is {bits}$"):
        IndexSettings(key_bits=bits)
