"""Sending a request to a runtime: which one, what it gets, and what it is asked beforehand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from fastapi import Request

from winnow_service.errors import NotFound, RuntimeUnavailable
from winnow_service.metrics.instruments import Metrics
from winnow_service.proxy.attention_field import Given, each_policy
from winnow_service.proxy.headers import to_runtime
from winnow_service.runtime.balancer import prefix_of
from winnow_service.runtime.client import RuntimeRequest
from winnow_service.runtime.pool import RuntimePool
from winnow_service.runtime.runtime import UNAVAILABLE, Answer
from winnow_service.runtime.served_model import not_served

logger = logging.getLogger(__name__)


class UpstreamCall:
    """One request to the runtimes, which is part of the load of one of them until it is sent and answered, or ended.

    Args:
        body: what decides which runtime is asked; None if that does not matter.

    Raises:
        CircuitOpen, RuntimeUnavailable: no runtime is asked now.
    """

    def __init__(self, runtimes: RuntimePool, metrics: Metrics, body: Mapping[str, Any] | None = None) -> None:
        self._runtimes = runtimes
        self._metrics = metrics
        self._prefix = None if body is None else prefix_of(body)
        self._call = runtimes.begin(self._prefix)

    async def as_served(self, policies: Given, authorization: str | None) -> Given:
        """Return ``policies`` as the runtime's model runs them.

        Raises:
            InvalidPolicy: it cannot serve them.
            RuntimeFailure, RuntimeRefused: it did not say what it serves.
        """
        if all(policy.is_dense for policy in (policies if isinstance(policies, list) else [policies])):
            return policies
        model = await self._call.runtime.served.get(authorization)
        if model is None:
            raise not_served()
        return each_policy(policies, model.check) if isinstance(policies, list) else model.check(policies)

    async def send(self, request: Request, content: bytes, *, streams: bool = False) -> Answer:
        """Send ``request`` with ``content``; to a second runtime, if there is one and the first has not taken it.

        Args:
            streams: whether it asks for its answer token by token.

        Returns:
            The answer, which the caller closes.

        Raises:
            NotFound: its path is none that is passed on.
            RuntimeFailure: there is no answer.
        """
        try:
            outgoing = _outgoing(request, content, streams=streams)
        except BaseException:
            self.end()
            raise
        try:
            answer = await self._call.send(outgoing)
        except RuntimeUnavailable as failure:
            other = self._runtimes.begin_elsewhere(self._prefix, self._call.runtime)
            if other is None:
                raise
            self._metrics.runtime_errors.labels(failure.code).inc()
            self._note_retry(failure.message)
            return await other.send(outgoing)
        if answer.status != UNAVAILABLE:
            return answer
        other = self._runtimes.begin_elsewhere(self._prefix, self._call.runtime)
        if other is None:
            return answer
        self._note_retry(f"It answered with status {UNAVAILABLE}.")
        try:
            await answer.close()
        except BaseException:
            other.end()
            raise
        return await other.send(outgoing)

    def end(self) -> None:
        """It is over, and was not sent."""
        self._call.end()

    def _note_retry(self, reason: str) -> None:
        runtime = self._call.runtime.name
        logger.warning("Runtime %s did not take a request, and another gets it: %s", runtime, reason)
        self._metrics.runtime_retries.inc()


def _outgoing(request: Request, content: bytes, *, streams: bool) -> RuntimeRequest:
    path: str = request.scope["raw_path"].decode("latin-1")
    # Whoever follows these comes to what the service does not pass on.
    if any(segment in (".", "..") for segment in unquote(path).split("/")):
        raise NotFound(request.url.path)
    return RuntimeRequest(
        method=request.method,
        path=path,
        query=request.scope["query_string"],
        headers=to_runtime(request.headers.raw),
        body=content,
        streams=streams,
    )
