"""Which tokens of a request a prefill batch computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_winnow.sglang_versions.releases import CACHE_CHECKPOINTS, runs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def cached_length(req: Req) -> int:
    """Return how many of a request's first tokens need not be computed any more."""
    return int(req.prefix_len) if runs(CACHE_CHECKPOINTS) else len(req.prefix_indices)


def computed_range(req: Req) -> tuple[int, int]:
    """Return the first token that a batch computes, and the one after the last."""
    if runs(CACHE_CHECKPOINTS):
        return req.prefix_len, req.extend_end
    start, end = req.extend_range
    return start, end


def compute_until(req: Req, end: int) -> None:
    """Have a batch compute a request's tokens from where it starts to ``end``."""
    if runs(CACHE_CHECKPOINTS):
        req.extend_end = end
    else:
        req.set_extend_range(req.extend_range.start, end)
