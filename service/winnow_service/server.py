"""Running the application with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import resource
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from winnow_service.app import create_app, store_of
from winnow_service.errors import StoreUnavailable
from winnow_service.keys.keyring import Keyring
from winnow_service.settings import Settings
from winnow_service.store.mirror import Mirror
from winnow_service.store.open import parse_store_url

logger = logging.getLogger(__name__)

# How long answers that are being given may go on after the service was told to stop.
GRACE_SECONDS = 10


class StartRefused(Exception):
    """The service does not start. The message says what to change."""


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until a signal says to stop.

    Raises:
        StartRefused: the store cannot be used, or everybody could reach a service without keys.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    may_be_open = settings.allow_open or _is_loopback(host)
    asyncio.run(_check_start(settings, host, may_be_open=may_be_open))
    _allow_many_connections()
    uvicorn.run(
        create_app(settings, may_be_open=may_be_open),
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
