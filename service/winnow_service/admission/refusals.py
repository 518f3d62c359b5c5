"""The errors of requests that are not let through."""

from __future__ import annotations

import math

from winnow_service.errors import TableError


class KeyQueueFull(TableError):
    """As many requests of the key wait as may (429)."""

    def __init__(self, waiting: int, retry_seconds: float) -> None:
        message = f"{waiting} requests of this key are waiting already (WINNOW_MAX_QUEUED_PER_KEY)."
        headers = _retry_after(retry_seconds)
        super().__init__("key_queue_full", message, headers=headers)


class QueueFull(TableError):
    """As many requests wait as may (503)."""

    def __init__(self, waiting: int, retry_seconds: float) -> None:
        message = f"{waiting} requests are waiting already (WINNOW_MAX_QUEUED)."
        super().__init__("queue_full", message, headers=_retry_after(retry_seconds))


class QueueTimeout(TableError):
    """The request has waited as long as one may (503)."""

    def __init__(self, waited_seconds: float, retry_seconds: float) -> None:
        message = f"The request was not begun within {waited_seconds:g} seconds (WINNOW_QUEUE_TIMEOUT_SECONDS)."
        super().__init__("queue_timeout", message, headers=_retry_after(retry_seconds))


class Draining(TableError):
    """This replica is about to end (503). The connection is closed, so that the next request goes to another."""

    def __init__(self) -> None:
        headers = {"retry-after": "1", "connection": "close"}
        super().__init__("draining", "The service is about to end. Send the request again.", headers=headers)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
