"""Running the application with uvicorn."""

from __future__ import annotations

import logging
import resource

import uvicorn

from winnow_service.app import create_app
from winnow_service.settings import Settings

# How long answers that are being given may go on after the service was told to stop.
GRACE_SECONDS = 10


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until a signal says to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _allow_many_connections()
    uvicorn.run(
        create_app(settings),
        host=host,
        port=port,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )


def _allow_many_connections() -> None:
    # A forwarded request holds two sockets, and the usual soft limit is 1,024 files.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
