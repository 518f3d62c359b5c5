"""The application: its parts, put together."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import FastAPI

from winnow_service.admission.drain import Drain
from winnow_service.admission.queue import AdmissionQueue, QueueBounds
from winnow_service.errors import StoreUnavailable, install_error_handlers
from winnow_service.keys.keyring import Keyring
from winnow_service.limits.limiter import Limiter
from winnow_service.limits.memory import MemoryLimiter
from winnow_service.limits.redis import FallbackLimiter, RedisLimiter
from winnow_service.metrics.instruments import Metrics
from winnow_service.metrics.state import MeasuredStore, StateCollector
from winnow_service.openapi import install_documentation
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.proxy import native_routes, openai_routes
from winnow_service.proxy.entrance import EntranceMiddleware
from winnow_service.proxy.forwarder import Forwarder
from winnow_service.proxy.gate import GateMiddleware
from winnow_service.routers import console, explain, keys, operations, policies, profile
from winnow_service.runtime.runtime import Runtime
from winnow_service.settings import Settings
from winnow_service.store.documents import Store
from winnow_service.store.mirror import Mirror
from winnow_service.store.open import open_store, parse_store_url
from winnow_service.store.redis import RedisStore
from winnow_service.tracing.configuration import tracing_from_environment

logger = logging.getLogger(__name__)


def store_of(settings: Settings) -> Store:
    """The store that ``settings`` name. Nothing is read yet."""
    password = None if settings.store_password is None else settings.store_password.get_secret_value()
    return open_store(parse_store_url(settings.store_url.get_secret_value(), password), settings.store_namespace)


def create_app(settings: Settings, *, may_be_open: bool = False) -> FastAPI:
    """The service in front of the runtime that ``settings`` name. It starts, and stays up, without it and its store.

    Args:
        may_be_open: whether it answers everybody as long as there are no keys.

    Raises:
        TracingRefused: the environment asks for traces that the service cannot send.
    """
    tracing = tracing_from_environment(os.environ)
    metrics = Metrics()
    store = store_of(settings)
    mirror = Mirror(MeasuredStore(store, metrics))
    registry = PolicyRegistry(mirror)
    admin_key = None if settings.admin_key is None else settings.admin_key.get_secret_value()
    keyring = Keyring(mirror, admin_key, may_be_open=may_be_open)
    metrics.registry.register(StateCollector(mirror, registry, keyring))
    drain = Drain()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        runtime = Runtime(settings, metrics, None if tracing is None else tracing.begin_span)
        queue = _queue(settings, drain, metrics)
        limiter = _limiter(store, mirror)
        app.state.forwarder = Forwarder(runtime, metrics, settings, registry, limiter, queue)
        # A store that is away does not keep the service from starting: the mirror goes on asking.
        with suppress(StoreUnavailable):
            await mirror.refresh()
        tasks = [asyncio.create_task(each) for each in (runtime.run(), mirror.run(), limiter.run())]
        for task in tasks:
            task.add_done_callback(_log_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await store.close()
            await runtime.close()
            if tracing is not None:
                await tracing.close()

    app = FastAPI(title="Winnow", version=version("sglang-winnow"), lifespan=lifespan)
    app.state.settings = settings
    app.state.mirror = mirror
    app.state.registry = registry
    app.state.keyring = keyring
    app.state.drain = drain
    # What is added later sees requests earlier.
    app.add_middleware(GateMiddleware, drain=drain, max_head_bytes=settings.max_header_bytes, metrics=metrics)
    app.add_middleware(EntranceMiddleware, metrics=metrics)
    if tracing is not None:
        tracing.install(app)
    install_error_handlers(app, lambda code: metrics.refusals.labels(code).inc())
    # Looked through in this order, for each request.
    for routes in (openai_routes, native_routes, operations, policies, profile, keys, explain, console):
        app.include_router(routes.router)
    install_documentation(app)
    return app


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("A task of the service has ended; restart it", exc_info=error)


def _queue(settings: Settings, drain: Drain, metrics: Metrics) -> AdmissionQueue:
    bounds = QueueBounds(settings.max_queued, settings.max_queued_per_key, settings.queue_timeout_seconds)
    queue = AdmissionQueue(bounds, lambda: settings.max_running, metrics.queue_wait.observe)
    metrics.queued.set_function(lambda: queue.waiting)
    metrics.admitted.set_function(lambda: queue.running)
    metrics.draining.set_function(lambda: drain.draining)
    drain.when_begun(queue.close)
    return queue


def _limiter(store: Store, mirror: Mirror) -> Limiter:
    own = MemoryLimiter()
    return FallbackLimiter(RedisLimiter(store.connection), own, mirror) if isinstance(store, RedisStore) else own
