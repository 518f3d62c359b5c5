"""Reading a request body: bounded in size, and a JSON object before the runtime sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from winnow_service.errors import ClientDisconnected, ServiceError

_JSON_TYPES: Final = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
}


class Form(StrEnum):
    """The form of a request's body."""

    NATIVE = "native"
    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True)
class JsonBody:
    """A JSON object: the bytes that were sent, and what they say."""

    content: bytes
    members: dict[str, Any]


async def read_json_object(request: Request, limit_bytes: int) -> JsonBody:
    """Read the request's body.

    Raises:
        ServiceError: it is longer than ``limit_bytes``, not JSON (the message names line and column), or not an object.
        ClientDisconnected: the client left before it had sent all of it.
    """
    body = await _read(request, limit_bytes)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ServiceError("invalid_json", problem=error) from None
    if not isinstance(value, dict):
        raise ServiceError("not_an_object", found=_JSON_TYPES[type(value)])
    return JsonBody(body, value)


async def _read(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise ServiceError("body_too_large", limit=limit_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit_bytes:
                raise ServiceError("body_too_large", limit=limit_bytes)
    except ClientDisconnect:
        raise ClientDisconnected from None
    return bytes(body)
