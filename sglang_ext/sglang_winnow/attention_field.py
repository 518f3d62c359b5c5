"""``attention`` at the top of a request that a runtime is asked without the service: put where SGLang carries it.

SGLang ignores fields that it does not know: the request would be dense, and nobody told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json, to_json
from sglang.srt.plugins.hook_registry import HookType
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from sglang_winnow.hooks import Hook
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.contract.request_body import FIELD, with_policies

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NATIVE: Final = "/generate"
FORMS: Final = frozenset({NATIVE, "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
_QUOTED: Final = f'"{FIELD}"'.encode()
_BAD_REQUEST: Final = 400
_LENGTH: Final = b"content-length"


class AttentionField:
    """Middleware of SGLang's HTTP server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in FORMS:
            await self._app(scope, receive, send)
            return
        try:
            content = await Request(scope, receive).body()
            placed = placed_policies(content, is_native=scope["path"] == NATIVE)
        except ClientDisconnect:
            return
        except PolicyError as error:
            await JSONResponse(_refusal(str(error)), _BAD_REQUEST)(scope, receive, send)
            return
        if placed is not content:
            headers = [(name, value) for name, value in scope["headers"] if name != _LENGTH]
            scope = dict(scope) | {"headers": [*headers, (_LENGTH, str(len(placed)).encode())]}
        await self._app(scope, _replaying(placed, receive), send)


def placed_policies(content: bytes, *, is_native: bool) -> bytes:
    """Return the body of a request with its policies where SGLang carries them; ``content`` itself if it has none.

    Raises:
        PolicyError: it names a policy there, too, or has something else there than SGLang expects.
    """
    if _QUOTED not in content:
        return content
    try:
        body = from_json(content)
    except ValueError:
        # SGLang says what is wrong.
        return content
    if not isinstance(body, dict) or (asked := body.get(FIELD)) is None:
        return content
    policies = [_text(each) for each in asked] if is_native and isinstance(asked, list) else _text(asked)
    return to_json(with_policies(body, policies, is_native=is_native), inf_nan_mode="constants")


def _text(policy: object) -> str:
    # A name is refused as one: only the service knows names.
    return policy if isinstance(policy, str) else to_json(policy).decode()


def _refusal(message: str) -> dict[str, Any]:
    """Return an error that clients of every form find the message in."""
    error = {"message": message, "type": "invalid_request_error", "code": _BAD_REQUEST}
    return {"object": "error", "error": error} | error


def _replaying(content: bytes, receive: Receive) -> Receive:
    """Return what hands out a body that was read, and then what else the client sends."""
    waiting: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


def add_middleware(*_: object, **__: object) -> None:
    """Have SGLang's server take the field; keys are checked and bodies decompressed by its own middleware before."""
    from sglang.srt.entrypoints.http_server import app  # noqa: PLC0415

    app.user_middleware.append(Middleware(AttentionField))


HOOKS: Final = (Hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", add_middleware, HookType.BEFORE),)
