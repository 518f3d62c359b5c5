"""Everything the service refuses or fails with, and the one JSON shape in which clients read it.

The shape is a problem details document (RFC 9457) with OpenAI's error object as an extension member, so that OpenAI
clients raise their own exceptions with our message::

    {"type": "urn:winnow:problem:invalid_json", "title": "Bad Request", "status": 400, "detail": "...",
     "error": {"message": "...", "type": "invalid_request_error", "param": null, "code": "invalid_json"}}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from winnow_service.headers import REQUEST_ID_HEADER

logger = logging.getLogger(__name__)

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION_ERROR = "authentication_error"
PERMISSION_ERROR = "permission_error"
RATE_LIMIT_ERROR = "rate_limit_error"
OVERLOADED = "overloaded_error"
RUNTIME_ERROR = "runtime_error"
STORE_ERROR = "store_error"
INTERNAL_ERROR = "internal_error"


class ServiceError(Exception):
    """An answer that is an error: its HTTP status and the fields of its body.

    Attributes:
        problem_type: the URI by which RFC 9457 tells kinds of problems apart; one of ours, from ``code``, by default.
        members: further members of the problem details document.
    """

    problem_type: str | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.members = dict(members or {})

    def body(self) -> dict[str, Any]:
        return {
            "type": self.problem_type or f"urn:winnow:problem:{self.code}",
            "title": _title(self.status),
            "status": self.status,
            "detail": self.message,
            **self.members,
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code},
        }


# Every code that clients may read, with its status and the kind by which OpenAI clients tell errors apart. Metrics have
# the code as a label.
CODES: Final[Mapping[str, tuple[int, str]]] = {
    "invalid_json": (400, INVALID_REQUEST),
    "not_an_object": (400, INVALID_REQUEST),
    "missing_key": (401, AUTHENTICATION_ERROR),
    "invalid_key": (401, AUTHENTICATION_ERROR),
    "policy_forbidden": (403, PERMISSION_ERROR),
    "scope_missing": (403, PERMISSION_ERROR),
    "not_found": (404, INVALID_REQUEST),
    "in_use": (409, INVALID_REQUEST),
    "preset": (409, INVALID_REQUEST),
    "precondition_failed": (412, INVALID_REQUEST),
    "body_too_large": (413, INVALID_REQUEST),
    "not_json": (415, INVALID_REQUEST),
    "exceeds_limit": (422, INVALID_REQUEST),
    "invalid_field": (422, INVALID_REQUEST),
    "invalid_policy": (422, INVALID_REQUEST),
    "precondition_required": (428, INVALID_REQUEST),
    "key_queue_full": (429, RATE_LIMIT_ERROR),
    "rate_limited": (429, RATE_LIMIT_ERROR),
    # nginx's.
    "client_disconnected": (499, INVALID_REQUEST),
    "runtime_died": (502, RUNTIME_ERROR),
    "runtime_unusable": (502, RUNTIME_ERROR),
    "circuit_open": (503, RUNTIME_ERROR),
    "draining": (503, OVERLOADED),
    "queue_full": (503, OVERLOADED),
    "queue_timeout": (503, OVERLOADED),
    "runtime_unavailable": (503, RUNTIME_ERROR),
    "store_unavailable": (503, STORE_ERROR),
    "first_token_timeout": (504, RUNTIME_ERROR),
    "request_timeout": (504, RUNTIME_ERROR),
    "runtime_timeout": (504, RUNTIME_ERROR),
}


class TableError(ServiceError):
    """An error whose status and kind are those of its ``code`` in the table."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        status, kind = CODES[code]
        super().__init__(status, message, kind=kind, code=code, param=param, headers=headers, members=members)


class InvalidBody(TableError):
    """The request body is not a JSON object (400)."""

    def __init__(self, message: str, code: str = "invalid_json") -> None:
        super().__init__(code, message)


class InvalidField(TableError):
    """A field of the request is not what it must be (422)."""

    def __init__(self, path: str, problem: str, code: str = "invalid_field") -> None:
        super().__init__(code, f"{path}: {problem}", param=path)


class NotFound(TableError):
    """There is no such thing (404)."""

    def __init__(self, what: str) -> None:
        super().__init__("not_found", f"There is no {what}.")


class InvalidPolicy(TableError):
    """A policy that cannot be served (422).

    Attributes:
        path: the field, such as ``attention.decode.budget``.
        problem: what is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__("invalid_policy", f"{path}: {problem}", param=path)
        self.path = path
        self.problem = problem


class PolicyForbidden(TableError):
    """A policy that the key's bounds do not allow (403).

    Attributes:
        path: the field.
        problem: what it must be.
    """

    def __init__(self, path: str, problem: str) -> None:
        message = f"{path}: {problem} (bounds of this key)"
        super().__init__("policy_forbidden", message, param=path)
        self.path = path
        self.problem = problem


class AlreadyExists(TableError):
    """There is one of that name, and the request does not say which state of it it would replace (428)."""

    def __init__(self, what: str, etag: str) -> None:
        message = f"{what} exists. To replace or delete it, send If-Match with its ETag, or If-Match: * for any."
        super().__init__("precondition_required", message, param="If-Match", headers={"etag": etag})


class PreconditionFailed(TableError):
    """What If-Match or If-None-Match asks for does not hold (412). The answer has the current ETag, if there is one."""

    def __init__(self, message: str, etag: str | None) -> None:
        headers = {} if etag is None else {"etag": etag}
        super().__init__("precondition_failed", message, headers=headers)


class InUse(TableError):
    """It cannot go, or be another, while something else needs it (409)."""

    def __init__(self, message: str, code: str = "in_use") -> None:
        super().__init__(code, message)


class Unauthenticated(TableError):
    """No key, or one that is not valid (401)."""

    def __init__(self, message: str, code: str) -> None:
        challenge = 'Bearer realm="winnow"' + (', error="invalid_token"' if code == "invalid_key" else "")
        super().__init__(code, message, headers={"www-authenticate": challenge})


class ScopeMissing(TableError):
    """The key is valid, but not for this (403)."""

    def __init__(self, scope: str) -> None:
        super().__init__(
            "scope_missing",
            f"This needs a key with the scope {scope!r}.",
            headers={"www-authenticate": f'Bearer realm="winnow", error="insufficient_scope", scope="{scope}"'},
        )


class RateLimited(TableError):
    """Limits of the key are used up (429). The type is that of the IETF's RateLimit draft."""

    problem_type = "https://iana.org/assignments/http-problem-types#quota-exceeded"

    def __init__(self, limits: Sequence[str], message: str, headers: Mapping[str, str]) -> None:
        super().__init__("rate_limited", message, headers=headers, members={"violated-policies": list(limits)})


class StoreUnavailable(TableError):
    """The store of policies and keys cannot be read or written now (503).

    Attributes:
        detail: why.
    """

    def __init__(self, detail: str) -> None:
        self.detail = detail
        message = f"The store of policies and keys is not available: {detail}."
        super().__init__("store_unavailable", message, headers={"retry-after": "1"})


class BodyTooLarge(TableError):
    """The request body is longer than the service reads (413)."""

    def __init__(self, limit_bytes: int) -> None:
        message = f"The request body is larger than the limit of {limit_bytes} bytes (WINNOW_MAX_BODY_BYTES)."
        super().__init__("body_too_large", message)


class NotJson(TableError):
    """The request does not say that its body is JSON (415)."""

    def __init__(self) -> None:
        message = "The body must be JSON, and content-type must say so: application/json."
        super().__init__("not_json", message, param="content-type")


class ClientDisconnected(TableError):
    """The client left before it had its answer. Nobody reads this body; the status is nginx's 499."""

    def __init__(self) -> None:
        super().__init__("client_disconnected", "The client closed the connection.")


class RuntimeFailure(TableError):
    """The runtime did not give an answer. ``code`` names the kind of failure and is a metric label."""


class RuntimeUnavailable(RuntimeFailure):
    """No connection: the runtime never saw the request, so a client may send it again (503)."""

    def __init__(self, detail: str) -> None:
        message = f"The runtime cannot be reached: {detail}."
        super().__init__("runtime_unavailable", message, headers={"retry-after": "5"})


class RuntimeTimeout(RuntimeFailure):
    """The runtime was silent for longer than the service waits (504)."""

    def __init__(self, silence_seconds: float) -> None:
        message = f"The runtime sent nothing for {silence_seconds:g} seconds."
        super().__init__("runtime_timeout", message)


class RuntimeDied(RuntimeFailure):
    """The runtime ended its answer before the answer was complete (502)."""

    def __init__(self, detail: str) -> None:
        message = f"The runtime ended its answer before it was complete: {detail}."
        super().__init__("runtime_died", message)


class RuntimeUnusable(RuntimeFailure):
    """The runtime answered, but not with what the service needs of it (502)."""

    def __init__(self, detail: str) -> None:
        message = f"The runtime does not tell what it serves: {detail}."
        super().__init__("runtime_unusable", message)


class RuntimeRefused(ServiceError):
    """The runtime wants an authorization that the client did not send (401 or 403)."""

    def __init__(self, status: int) -> None:
        message = "The runtime refuses this request's authorization."
        super().__init__(status, message, kind=INVALID_REQUEST, code="runtime_refused")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` in the one shape."""

    async def service_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ServiceError)
        return problem_response(error)

    async def http_exception(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = "not_found" if error.status_code == 404 else "http_error"
        return problem_response(
            ServiceError(error.status_code, error.detail, kind=INVALID_REQUEST, code=code, headers=error.headers)
        )

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("Unexpected error", exc_info=error)
        # This answer does not pass through the middleware that gives others their id.
        headers = {REQUEST_ID_HEADER: request.headers.get(REQUEST_ID_HEADER, "")}
        return problem_response(
            ServiceError(500, "Internal error.", kind=INTERNAL_ERROR, code="internal_error", headers=headers)
        )

    async def invalid_parameter(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        # After the place, which is path or header, comes the name, and then what is pydantic's own.
        return problem_response(InvalidField(str(first["loc"][1]), first["msg"].replace("String should", "must", 1)))

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(RequestValidationError, invalid_parameter)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(Exception, unexpected)


def problem_response(error: ServiceError) -> JSONResponse:
    """The answer that ``error`` is."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers, media_type=PROBLEM_MEDIA_TYPE)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        # nginx's 499.
        return "Client Closed Request"
