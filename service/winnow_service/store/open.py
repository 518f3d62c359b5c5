"""From the address of a store to the store."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from winnow_service.store.documents import Store
from winnow_service.store.redis import RedisStore
from winnow_service.store.redis_connection import (
    SCHEMES,
    RedisAddress,
    RedisConnection,
    StoreAddressError,
    parse_redis_url,
)
from winnow_service.store.sqlite import SqliteStore

_SQLITE: Final = "sqlite:///"


def parse_store_url(url: str, password: str | None = None) -> Path | RedisAddress:
    """Return the file of an SQLite store, or where Redis is.

    ``sqlite:///folder/file`` is relative to the working folder, ``sqlite:////folder/file`` is not.

    Args:
        password: of Redis, in place of one in the URL.

    Raises:
        StoreAddressError: it is neither.
    """
    try:
        if urlsplit(url).scheme in SCHEMES:
            return parse_redis_url(url, password)
    except ValueError as error:
        raise StoreAddressError(str(error)) from None
    if url.startswith(_SQLITE) and (path := unquote(url.removeprefix(_SQLITE))):
        return Path(path)
    raise StoreAddressError(f"must begin with {_SQLITE} and name a file, or with one of {', '.join(SCHEMES)}")


def open_store(address: Path | RedisAddress, namespace: str) -> Store:
    """Return the store at ``address``. Nothing is read yet.

    Args:
        namespace: tells apart deployments that share one Redis.
    """
    if isinstance(address, Path):
        return SqliteStore(address)
    return RedisStore(RedisConnection(address, namespace))
