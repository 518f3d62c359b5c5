"""How a runtime fails that is being waited for, or is not asked any more."""

from __future__ import annotations

import math

from winnow_service.errors import RuntimeFailure, TableError


class FirstTokenTimeout(RuntimeFailure):
    """The runtime began no stream in time (504)."""

    def __init__(self, seconds: float) -> None:
        message = f"The runtime gave no token within {seconds:g} seconds (WINNOW_FIRST_TOKEN_TIMEOUT_SECONDS)."
        super().__init__("first_token_timeout", message)


class RequestTimeout(RuntimeFailure):
    """The runtime did not complete its answer in time (504)."""

    def __init__(self, seconds: float) -> None:
        message = f"The answer was not complete within {seconds:g} seconds (WINNOW_REQUEST_TIMEOUT_SECONDS)."
        super().__init__("request_timeout", message)


class CircuitOpen(TableError):
    """The runtime has failed too often just now to be asked (503)."""

    def __init__(self, retry_seconds: float) -> None:
        message = "The runtime has failed several times in a row, and is not asked for a while."
        headers = {"retry-after": str(max(1, math.ceil(retry_seconds)))}
        super().__init__("circuit_open", message, headers=headers)
