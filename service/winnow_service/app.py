"""The application: its parts, put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import FastAPI

from winnow_service.errors import install_error_handlers
from winnow_service.forwarding import Forwarder
from winnow_service.metrics import Metrics, MetricsMiddleware
from winnow_service.request_id import RequestIdMiddleware
from winnow_service.routers import native, openai, operations
from winnow_service.runtime.client import RuntimeClient
from winnow_service.runtime.monitor import RuntimeMonitor
from winnow_service.runtime.served_model import ServedModelLookup
from winnow_service.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The service in front of the runtime that ``settings`` name. It starts, and stays up, without the runtime."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client = RuntimeClient(settings)
        monitor = RuntimeMonitor(client, metrics, settings)
        served = ServedModelLookup(client, monitor, settings.readiness_timeout_seconds)
        app.state.forwarder = Forwarder(client, monitor, served, metrics, settings)
        monitoring = asyncio.create_task(monitor.run())
        try:
            yield
        finally:
            monitoring.cancel()
            with suppress(asyncio.CancelledError):
                await monitoring
            await client.close()

    app = FastAPI(title="Winnow", version=version("sglang-winnow"), lifespan=lifespan)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    install_error_handlers(app)
    app.include_router(operations.router)
    app.include_router(native.router)
    app.include_router(openai.router)
    return app
