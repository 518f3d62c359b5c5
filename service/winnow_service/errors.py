"""Everything the service refuses or fails with, and the one JSON shape in which clients read it.

The shape is a problem details document (RFC 9457) with OpenAI's error object as an extension member, so that OpenAI
clients raise their own exceptions with our message::

    {"type": "urn:winnow:problem:invalid_json", "title": "Bad Request", "status": 400, "detail": "...",
     "error": {"message": "...", "type": "invalid_request_error", "param": null, "code": "invalid_json"}}
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from winnow_service.headers import REQUEST_ID_HEADER

logger = logging.getLogger(__name__)

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"

_INVALID: Final = "invalid_request_error"
_AUTHENTICATION: Final = "authentication_error"
_PERMISSION: Final = "permission_error"
_RATE_LIMIT: Final = "rate_limit_error"
_OVERLOADED: Final = "overloaded_error"
_RUNTIME: Final = "runtime_error"
_STORE: Final = "store_error"
_INTERNAL: Final = "internal_error"

_CHALLENGE: Final = 'Bearer realm="winnow"'
_CLOSE: Final = {"connection": "close"}
_RETRY: Final = {"retry-after": "{retry_seconds}"}


class _Known(NamedTuple):
    """What is known of an error by its code: the message and the headers have places for values in them.

    Attributes:
        kind: by which OpenAI clients tell errors apart.
    """

    status: int
    kind: str
    message: str = "{problem}"
    headers: Mapping[str, str] = {}


# Every code that clients may read. Metrics have it as a label.
_CODES: Final[Mapping[str, _Known]] = {
    "invalid_json": _Known(400, _INVALID, "The request body is not valid JSON: {problem}."),
    "not_an_object": _Known(400, _INVALID, "The request body must be a JSON object, not {found}."),
    # The status is that of the exception.
    "http_error": _Known(400, _INVALID),
    "missing_key": _Known(
        401, _AUTHENTICATION, "This needs a key: send Authorization: Bearer <key>.", {"www-authenticate": _CHALLENGE}
    ),
    "invalid_key": _Known(401, _AUTHENTICATION, headers={"www-authenticate": f'{_CHALLENGE}, error="invalid_token"'}),
    # The status is the runtime's.
    "runtime_refused": _Known(401, _INVALID, "The runtime refuses this request's authorization."),
    "policy_forbidden": _Known(403, _PERMISSION, "{path}: {problem} (bounds of this key)"),
    "scope_missing": _Known(
        403,
        _PERMISSION,
        "This needs a key with the scope '{scope}'.",
        {"www-authenticate": f'{_CHALLENGE}, error="insufficient_scope", scope="{{scope}}"'},
    ),
    "no_profile": _Known(
        404,
        _INVALID,
        "The runtime has no profile of its model: run `winnow calibrate profile --model MODEL`, and start the runtime"
        " with WINNOW_PROFILE=MODEL-profile.json.",
    ),
    "not_found": _Known(404, _INVALID, "There is no {what}."),
    "method_not_allowed": _Known(405, _INVALID, "{method} is not one of {allowed}.", {"allow": "{allowed}"}),
    "in_use": _Known(409, _INVALID),
    "preset": _Known(409, _INVALID, "{name!r} is a preset: it can be neither replaced nor deleted. Use another name."),
    # The answer has the current ETag, if there is one.
    "precondition_failed": _Known(412, _INVALID),
    "body_too_large": _Known(
        413, _INVALID, "The request body is larger than the limit of {limit} bytes (WINNOW_MAX_BODY_BYTES)."
    ),
    "not_json": _Known(415, _INVALID, "The body must be JSON, and content-type must say so: application/json."),
    "explain_not_served": _Known(
        422,
        _INVALID,
        "The runtime cannot explain. It must run with the attention backend winnow, without tensor parallelism, on a"
        " CPU or, on CUDA, with SGLang 0.5.16.",
    ),
    "exceeds_limit": _Known(422, _INVALID, "{path}: {problem}"),
    "invalid_field": _Known(422, _INVALID, "{path}: {problem}"),
    "invalid_policy": _Known(422, _INVALID, "{path}: {problem}"),
    "precondition_required": _Known(
        428,
        _INVALID,
        "{what} exists. To replace or delete it, send If-Match with its ETag, or If-Match: * for any.",
        {"etag": "{etag}"},
    ),
    "key_queue_full": _Known(
        429, _RATE_LIMIT, "{waiting} requests of this key are waiting already (WINNOW_MAX_QUEUED_PER_KEY).", _RETRY
    ),
    "rate_limited": _Known(429, _RATE_LIMIT),
    "headers_too_large": _Known(
        431, _INVALID, "The request's path and headers are longer than {limit} bytes (WINNOW_MAX_HEADER_BYTES).", _CLOSE
    ),
    # nginx's status. Nobody reads this body.
    "client_disconnected": _Known(499, _INVALID, "The client closed the connection."),
    "internal_error": _Known(500, _INTERNAL, "Internal error."),
    "runtime_died": _Known(502, _RUNTIME, "The runtime ended its answer before it was complete: {problem}."),
    "runtime_unusable": _Known(502, _RUNTIME, "The runtime does not tell what it serves: {problem}."),
    "circuit_open": _Known(
        503, _RUNTIME, "The runtime has failed several times in a row, and is not asked for a while.", _RETRY
    ),
    # The connection is closed, so that the next request goes to another replica.
    "draining": _Known(
        503, _OVERLOADED, "The service is about to end. Send the request again.", {"retry-after": "1", **_CLOSE}
    ),
    "queue_full": _Known(503, _OVERLOADED, "{waiting} requests are waiting already (WINNOW_MAX_QUEUED).", _RETRY),
    "queue_timeout": _Known(
        503, _OVERLOADED, "The request was not begun within {seconds:g} seconds (WINNOW_QUEUE_TIMEOUT_SECONDS).", _RETRY
    ),
    # The runtime never saw the request, so a client may send it again.
    "runtime_unavailable": _Known(503, _RUNTIME, "The runtime cannot be reached: {problem}.", {"retry-after": "5"}),
    "store_unavailable": _Known(
        503, _STORE, "The store of policies and keys is not available: {problem}.", {"retry-after": "1"}
    ),
    "first_token_timeout": _Known(
        504, _RUNTIME, "The runtime gave no token within {seconds:g} seconds (WINNOW_FIRST_TOKEN_TIMEOUT_SECONDS)."
    ),
    "request_timeout": _Known(
        504, _RUNTIME, "The answer was not complete within {seconds:g} seconds (WINNOW_REQUEST_TIMEOUT_SECONDS)."
    ),
    "runtime_timeout": _Known(504, _RUNTIME, "The runtime sent nothing for {seconds:g} seconds."),
}
# URIs by which RFC 9457 tells kinds of problems apart, where there is another than ours: the IETF's RateLimit draft's.
_TYPES: Final = {"rate_limited": "https://iana.org/assignments/http-problem-types#quota-exceeded"}


class ServiceError(Exception):
    """An answer that is an error.

    Args:
        code: in the table, which has the status, the kind, the message and the headers.
        status, message: in place of those in the table.
        param: the field that is wrong.
        headers: beside those in the table.
        values: for the places in the message and the headers.

    Attributes:
        members: further members of the problem details document.
    """

    def __init__(
        self,
        code: str,
        *,
        status: int | None = None,
        message: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        **values: object,
    ) -> None:
        known = _CODES[code]
        self.code = code
        self.kind = known.kind
        self.status = status or known.status
        self.message = known.message.format(**values) if message is None else message
        self.param = param
        self.headers = {name: value.format(**values) for name, value in known.headers.items()} | dict(headers or {})
        self.members: dict[str, Any] = {}
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        # HTTPStatus does not know nginx's 499.
        title = "Client Closed Request" if self.status == 499 else HTTPStatus(self.status).phrase
        return {
            "type": _TYPES.get(self.code, f"urn:winnow:problem:{self.code}"),
            "title": title,
            "status": self.status,
            "detail": self.message,
            **self.members,
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code},
        }


class FieldError(ServiceError):
    """A field of the request is not what it must be.

    Attributes:
        path: the field, such as ``attention.decode.budget``.
        problem: what is wrong with it.
    """

    CODE: str

    def __init__(self, path: str, problem: str, code: str | None = None) -> None:
        super().__init__(code or self.CODE, param=path, path=path, problem=problem)
        self.path = path
        self.problem = problem


class InvalidField(FieldError):
    """It is not what it must be, whoever asks (422)."""

    CODE = "invalid_field"


class InvalidPolicy(FieldError):
    """A policy that cannot be served (422)."""

    CODE = "invalid_policy"


class PolicyForbidden(FieldError):
    """A policy that the key's bounds do not allow (403)."""

    CODE = "policy_forbidden"


class RateLimited(ServiceError):
    """Limits of the key are used up (429)."""

    def __init__(self, limits: Sequence[str], problem: str, headers: Mapping[str, str]) -> None:
        super().__init__("rate_limited", problem=problem, headers=headers)
        self.members = {"violated-policies": list(limits)}


class StoreUnavailable(ServiceError):
    """The store of policies and keys cannot be read or written now (503); ``detail`` says why."""

    def __init__(self, detail: str) -> None:
        super().__init__("store_unavailable", problem=detail)
        self.detail = detail


class ClientDisconnected(ServiceError):
    """The client left before it had its answer."""

    def __init__(self) -> None:
        super().__init__("client_disconnected")


class RuntimeFailure(ServiceError):
    """The runtime did not give an answer. ``code`` names the kind of failure and is a metric label."""


class RuntimeRefused(ServiceError):
    """The runtime wants an authorization that the client did not send (401 or 403)."""

    def __init__(self, status: int) -> None:
        super().__init__("runtime_refused", status=status)


def install_error_handlers(app: FastAPI, refused: Callable[[str], object] = lambda _: None) -> None:
    """Answer every error of ``app`` in the one shape.

    Args:
        refused: called with the code of what the service itself refuses, which failures of the runtime are not.
    """

    async def service_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ServiceError)
        if not isinstance(error, RuntimeFailure | ClientDisconnected):
            refused(error.code)
        return problem_response(error)

    async def http_exception(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = "not_found" if error.status_code == 404 else "http_error"
        return problem_response(
            ServiceError(code, status=error.status_code, message=error.detail, headers=error.headers)
        )

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("Unexpected error", exc_info=error)
        # This answer does not pass through the middleware that gives others their id.
        request_id = {REQUEST_ID_HEADER: request.headers.get(REQUEST_ID_HEADER, "")}
        return problem_response(ServiceError("internal_error", headers=request_id))

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
