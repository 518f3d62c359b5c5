"""Where in a list each of a block's listed tokens goes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def ranks_of(is_listed: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return how many are listed before each, int32 [lines, tokens of a line], and how many are in all: int32."""
    # Most is added up inside of lines, for which few threads must meet.
    one = is_listed.to(tl.int32)
    of_lines = tl.sum(one, 1)
    before = tl.cumsum(of_lines, 0) - of_lines
    return before[:, None] + tl.cumsum(one, 1) - 1, tl.sum(of_lines, 0)
