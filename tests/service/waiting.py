"""Waiting for what can only be seen by looking again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


async def eventually(look: Callable[[], Awaitable[Result | None]], timeout_seconds: float = 10) -> Result:
    """Look until there is something; raises TimeoutError after ``timeout_seconds``."""
    async with asyncio.timeout(timeout_seconds):
        while True:
            if (result := await look()) is not None:
                return result
            await asyncio.sleep(0.01)
