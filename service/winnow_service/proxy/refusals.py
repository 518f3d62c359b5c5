"""Counting what the service itself refuses, wherever on a request's way."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from winnow_service.errors import ClientDisconnected, RuntimeFailure, ServiceError, problem_response
from winnow_service.metrics.instruments import Metrics


def count_refusals(app: FastAPI, metrics: Metrics) -> None:
    """Count what ``app`` refuses; to be called when its error handlers are installed."""

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        if not isinstance(error, RuntimeFailure | ClientDisconnected):
            metrics.refusals.labels(error.code).inc()
        return problem_response(error)

    app.add_exception_handler(ServiceError, refuse)
