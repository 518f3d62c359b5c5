"""What the runtime is asked: the request that it gets, and beforehand what it serves."""

from __future__ import annotations

from urllib.parse import unquote

from fastapi import Request

from winnow_service.errors import ServiceError
from winnow_service.proxy.attention_field import Given, each_policy
from winnow_service.proxy.headers import to_runtime
from winnow_service.runtime.client import RuntimeRequest
from winnow_service.runtime.served_model import ServedModelLookup


async def as_served(policies: Given, served: ServedModelLookup, authorization: str | None) -> Given:
    """Return ``policies`` as the runtime's model runs them.

    Raises:
        InvalidPolicy: it cannot serve them.
        RuntimeFailure, RuntimeRefused: it did not say what it serves.
    """
    if all(policy.is_dense for policy in (policies if isinstance(policies, list) else [policies])):
        return policies
    model = await served.get(authorization)
    return each_policy(policies, model.check) if isinstance(policies, list) else model.check(policies)


def upstream_request(
    request: Request, content: bytes, *, streams: bool = False, prefix: bytes | None = None
) -> RuntimeRequest:
    """Return what the runtime gets of ``request``, with ``content``.

    Args:
        streams: whether it asks for its answer token by token.
        prefix: how its prompt begins; None if it has none.

    Raises:
        ServiceError: its path is none that is passed on.
    """
    path: str = request.scope["raw_path"].decode("latin-1")
    # Whoever follows these comes to what the service does not pass on.
    if any(segment in (".", "..") for segment in unquote(path).split("/")):
        raise ServiceError("not_found", what=request.url.path)
    return RuntimeRequest(
        method=request.method,
        path=path,
        query=request.scope["query_string"],
        headers=to_runtime(request.headers.raw),
        body=content,
        streams=streams,
        prefix=prefix,
    )
