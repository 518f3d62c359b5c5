"""What a request of SGLang's scheduler says of itself, and how many the scheduler has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_winnow.sglang_versions.releases import KV_OF_REQUEST, runs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


def slot_of(request: Req) -> int | None:
    """Return the request's row of the pool that says where its tokens lie; None while it has none."""
    slot: int | None = request.kv.req_pool_idx if runs(KV_OF_REQUEST) else request.req_pool_idx
    return slot


def requests_of(scheduler: Scheduler) -> int:
    """Return how many requests run or wait; alike on all ranks, which schedule the same."""
    # Those that were prefilled last run with the others from the next batch on.
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    running = {request.rid for batch in batches for request in batch.reqs if not request.finished()}
    return len(running | {request.rid for request in scheduler.waiting_queue})


def committed_length(request: Req) -> int:
    """Return how many tokens of the request have keys and values."""
    return int(request.kv.kv_committed_len if runs(KV_OF_REQUEST) else request.kv_committed_len)


def allocated_length(request: Req) -> int:
    """Return how many tokens the request has slots for: on a server that verifies, for drafts that may come."""
    return int(request.kv.kv_allocated_len)


def end_row(request: Req, length: int) -> None:
    """Let the request's row end with its first ``length`` tokens: SGLang frees, and inserts, nothing behind them."""
    (request.kv if runs(KV_OF_REQUEST) else request).kv_committed_len = length
    request.kv.kv_allocated_len = length
