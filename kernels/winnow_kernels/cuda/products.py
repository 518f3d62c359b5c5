"""What ``products.cuh``, products of queries with keys on the matrix units, is compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from winnow_kernels.cache import NARROW

PRODUCTS: Final = Path(__file__).with_name("products.cuh")
"""The source."""
HEADS_OF_PRODUCT: Final = 8
"""Query heads whose scores one product has."""


def multiplies(stored: torch.dtype) -> bool:
    """Return whether there are products with keys that are stored in this dtype."""
    return stored in (torch.bfloat16, torch.float16, *NARROW)


def macros_of(stored: torch.dtype, head_dim: int, group: int, kv_heads: int) -> Mapping[str, object]:
    """Return what is defined for keys that are stored in a dtype, ``kv_heads`` a token, of ``group`` query heads each.

    Queries have the dtype ``widened_dtype(stored)``.
    """
    is_narrow, is_half = stored in NARROW, stored == torch.float16
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_TILES": -(-group // HEADS_OF_PRODUCT),
        "IS_NARROW": int(is_narrow),
        # As in `attend.gpu_widening`.
        "COMPUTES_IN_HALVES": int(is_narrow or is_half),
        "QUERIES_ARE_HALVES": int(is_half),
    }
