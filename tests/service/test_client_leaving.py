"""Noticing that a client has left."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from winnow_service.errors import ClientDisconnected
from winnow_service.proxy.client_leaving import unless_client_leaves


class Client:
    """Has sent its request, and leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self._begun = False

    async def receive(self) -> Message:
        if not self._begun:
            self._begun = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Goes on until it is told to end."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.cancelled = False

    async def __call__(self) -> str:
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "done"


async def test_the_result_is_that_of_the_work() -> None:
    work = Work()
    asyncio.get_running_loop().call_soon(work.end.set)
    assert await unless_client_leaves(Client().receive, work()) == "done"


async def test_the_work_ends_when_the_client_leaves() -> None:
    client, work = Client(), Work()
    answering = asyncio.create_task(unless_client_leaves(client.receive, work()))
    await asyncio.sleep(0.01)
    client.left.set()
    with pytest.raises(ClientDisconnected):
        await answering
    assert work.cancelled
    # What is done afterwards is not cancelled.
    assert answering.cancelling() == 0


async def test_the_work_ends_when_its_request_is_cancelled() -> None:
    work = Work()
    answering = asyncio.create_task(unless_client_leaves(Client().receive, work()))
    await asyncio.sleep(0.01)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert work.cancelled


async def test_a_timeout_of_the_work_is_no_leaving() -> None:
    async def late() -> None:
        raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        await unless_client_leaves(Client().receive, late())


@pytest.mark.parametrize("turns", range(5))
async def test_a_client_may_leave_at_the_moment_at_which_the_work_ends(turns: int) -> None:
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    client, work = Client(), Work()
    answering = asyncio.create_task(unless_client_leaves(client.receive, work()))
    await asyncio.sleep(0.01)
    client.left.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    work.end.set()
    [result] = await asyncio.gather(answering, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert result == "done" or isinstance(result, ClientDisconnected)
    assert errors == []
