"""Where tokens lie in the KV cache, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def slots_at(table_ptr: tl.tensor, positions: tl.tensor, is_token: tl.tensor, page_size: tl.constexpr) -> tl.tensor:
    """Return the slots at ``positions`` of a row, where ``is_token``; ``table_ptr`` is its page table."""
    page = tl.load(table_ptr + positions // page_size, mask=is_token, other=0)
    return page * page_size + positions % page_size
