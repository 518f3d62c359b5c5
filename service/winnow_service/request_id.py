"""Every request has an id: the client's own ``x-request-id`` if it sent a usable one, else one of ours."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = "x-request-id"
_USABLE = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Puts the id into the request's headers, from where it is passed on to the runtime, and into the answer's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        if not _USABLE.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        headers = MutableHeaders(scope=scope)
        headers[REQUEST_ID_HEADER] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
