"""Running the application with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn

from winnow_service.admission.drain import Drain
from winnow_service.app import create_app, store_of
from winnow_service.errors import StoreUnavailable
from winnow_service.keys.keyring import Keyring
from winnow_service.logs import configure_logging
from winnow_service.settings import Settings
from winnow_service.store.mirror import Mirror
from winnow_service.store.open import parse_store_url
from winnow_service.tracing.configuration import TracingRefused

logger = logging.getLogger(__name__)

# How long what is left after draining has to end.
_GRACE_SECONDS: Final = 2
# What a process manager takes for a start that failed.
_START_FAILED: Final = 3


class StartRefused(Exception):
    """The service does not start. The message says what to change."""


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until a signal says to stop.

    Raises:
        StartRefused: the store cannot be used, traces cannot be sent, or everybody could reach a service without keys.
    """
    configure_logging(settings.log_format, settings.log_level)
    may_be_open = settings.allow_open or _is_loopback(host)
    asyncio.run(_check_start(settings, host, may_be_open=may_be_open))
    _allow_many_connections()
    try:
        app = create_app(settings, may_be_open=may_be_open)
    except TracingRefused as error:
        raise StartRefused(str(error)) from None
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        # The one of uvicorn's that bounds a head which does not come to an end.
        http="h11",
        h11_max_incomplete_event_size=settings.max_header_bytes,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = DrainingServer(
        config, app.state.drain, settings.drain_timeout_seconds, settings.client_stall_timeout_seconds
    )
    server.run()
    if not server.started:
        raise SystemExit(_START_FAILED)


class DrainingServer(uvicorn.Server):
    """Told to stop by a signal, it goes on until what is being answered has ended, and exits with 0.

    Until then it listens: whoever comes is told to go elsewhere, and what watches it sees that it is not ready. A
    second signal ends the wait.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, timeout_seconds: float, stall_seconds: float) -> None:
        super().__init__(config)
        self._stall_seconds = stall_seconds
        self._drain = drain
        self._timeout_seconds = timeout_seconds
        self._signals = 0
        self._until = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not the base class's, which would raise the signal again after everything has ended well.
        self._signals += 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in (listening for server in self.servers for listening in server.sockets):
            # Its connections inherit it. A closed one is kept by the kernel for as long as its client takes nothing.
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._stall_seconds * 1000))

    async def on_tick(self, counter: int) -> bool:
        if self._signals and not self._drain.draining:
            self._drain.begin()
            self._until = time.monotonic() + self._timeout_seconds
            logger.info("Draining: %d requests are being answered", self._drain.active)
        return await super().on_tick(counter) or (self._drain.draining and self._has_waited_enough())

    def _has_waited_enough(self) -> bool:
        if self._drain.active and self._signals == 1 and time.monotonic() < self._until:
            return False
        if self._drain.active:
            logger.warning("Draining has not ended: %d requests are cut off", self._drain.active)
        return True


def _allow_many_connections() -> None:
    # A forwarded request holds two sockets, and the usual soft limit is 1,024 files.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _check_start(settings: Settings, host: str, *, may_be_open: bool) -> None:
    store = store_of(settings)
    mirror = Mirror(store)
    try:
        await mirror.refresh()
    except StoreUnavailable as error:
        # A file is there or is not; Redis may come later, and until then nobody is let in without the admin key.
        if isinstance(parse_store_url(settings.store_url.get_secret_value()), Path):
            raise StartRefused(f"{error.detail} (WINNOW_STORE_URL)") from None
        logger.warning("%s", error.message)
        return
    finally:
        await store.close()
    admin_key = None if settings.admin_key is None else settings.admin_key.get_secret_value()
    if not Keyring(mirror, admin_key, may_be_open=True).is_open:
        return
    if not may_be_open:
        raise StartRefused(
            f"there are no API keys, and {host} can be reached from other machines: make one with `winnow keys"
            " create`, set WINNOW_ADMIN_KEY, or say that everybody may use the service with WINNOW_ALLOW_OPEN=true"
        )
    logger.warning(
        "THERE ARE NO API KEYS: everybody who reaches %s may use the service and change its policies and keys, until "
        "the first key is made",
        host,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
