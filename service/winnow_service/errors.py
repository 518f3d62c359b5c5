"""Everything the service refuses or fails with, and the one JSON shape in which clients read it.

The shape is OpenAI's, so that OpenAI clients raise their own exceptions with our message::

    {"error": {"message": "...", "type": "invalid_request_error", "param": null, "code": "invalid_json"}}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
RUNTIME_ERROR = "runtime_error"
INTERNAL_ERROR = "internal_error"


class ServiceError(Exception):
    """An answer that is an error: its HTTP status and the fields of its body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class InvalidBody(ServiceError):
    """The request body is not a JSON object (400)."""

    def __init__(self, message: str, code: str = "invalid_json") -> None:
        super().__init__(400, message, kind=INVALID_REQUEST, code=code)


class InvalidPolicy(ServiceError):
    """A policy that cannot be served (422).

    Attributes:
        path: the field, such as ``attention.decode.budget``.
        problem: what is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(422, f"{path}: {problem}", kind=INVALID_REQUEST, code="invalid_policy", param=path)
        self.path = path
        self.problem = problem


class BodyTooLarge(ServiceError):
    """The request body is longer than the service reads (413)."""

    def __init__(self, limit_bytes: int) -> None:
        message = f"The request body is larger than the limit of {limit_bytes} bytes (WINNOW_MAX_BODY_BYTES)."
        super().__init__(413, message, kind=INVALID_REQUEST, code="body_too_large")


class ClientDisconnected(ServiceError):
    """The client left before it had its answer. Nobody reads this body; the status is nginx's 499."""

    def __init__(self) -> None:
        super().__init__(499, "The client closed the connection.", kind=INVALID_REQUEST, code="client_disconnected")


class RuntimeFailure(ServiceError):
    """The runtime did not give an answer. ``code`` names the kind of failure and is a metric label."""


class RuntimeUnavailable(RuntimeFailure):
    """No connection: the runtime never saw the request, so a client may send it again (503)."""

    def __init__(self, detail: str) -> None:
        message = f"The runtime cannot be reached: {detail}."
        super().__init__(503, message, kind=RUNTIME_ERROR, code="runtime_unavailable", headers={"retry-after": "5"})


class RuntimeTimeout(RuntimeFailure):
    """The runtime was silent for longer than the service waits (504)."""

    def __init__(self, silence_seconds: float) -> None:
        message = f"The runtime sent nothing for {silence_seconds:g} seconds."
        super().__init__(504, message, kind=RUNTIME_ERROR, code="runtime_timeout")


class RuntimeDied(RuntimeFailure):
    """The runtime ended its answer before the answer was complete (502)."""

    def __init__(self, detail: str) -> None:
        message = f"The runtime ended its answer before it was complete: {detail}."
        super().__init__(502, message, kind=RUNTIME_ERROR, code="runtime_died")


class RuntimeUnusable(RuntimeFailure):
    """The runtime answered, but not with what the service needs of it (502)."""

    def __init__(self, detail: str) -> None:
        message = f"The runtime does not tell what it serves: {detail}."
        super().__init__(502, message, kind=RUNTIME_ERROR, code="runtime_unusable")


class RuntimeRefused(ServiceError):
    """The runtime wants an authorization that the client did not send (401 or 403)."""

    def __init__(self, status: int) -> None:
        message = "The runtime refuses this request's authorization."
        super().__init__(status, message, kind=INVALID_REQUEST, code="runtime_refused")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` in the one shape."""

    async def service_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ServiceError)
        return _response(error)

    async def http_exception(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return _response(
            ServiceError(error.status_code, error.detail, kind=INVALID_REQUEST, code=code, headers=error.headers)
        )

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        logger.error("Unexpected error", exc_info=error)
        return _response(ServiceError(500, "Internal error.", kind=INTERNAL_ERROR, code="internal_error"))

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(Exception, unexpected)


def _response(error: ServiceError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
