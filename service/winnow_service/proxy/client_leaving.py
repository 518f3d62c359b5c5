"""Noticing that a client has left while its request is being answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive

from winnow_service.errors import ClientDisconnected

_Result = TypeVar("_Result")


async def unless_client_leaves(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """Return what ``work`` returns. It is cancelled when the client leaves.

    Args:
        receive: of the request, whose body has been read.

    Raises:
        ClientDisconnected: the client has left.
    """
    clock = asyncio.get_running_loop().time
    # It has no end until the client leaves. The work needs no task of its own then, and begins at once.
    presence = asyncio.timeout(None)

    def end_presence(_: asyncio.Task[None]) -> None:
        # The work may just have ended.
        with suppress(RuntimeError):
            presence.reschedule(clock())

    leaving = asyncio.create_task(_leaves(receive))
    try:
        async with presence:
            leaving.add_done_callback(end_presence)
            return await work
    except TimeoutError:
        if presence.expired():
            raise ClientDisconnected from None
        raise
    finally:
        leaving.cancel()


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
