"""Server-sent events: passing them on whole, and ending a broken stream with an event that says so."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Final, Protocol

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from winnow_service.errors import ClientDisconnected, RuntimeFailure, ServiceError
from winnow_service.proxy.body import Form
from winnow_service.proxy.client_leaving import unless_client_leaves
from winnow_service.proxy.headers import to_client
from winnow_service.proxy.incidents import Incidents
from winnow_service.runtime.runtime import Call

_END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_END = 4
_DONE = b"data: [DONE]"
# With which of their events streams end that do not end with [DONE].
_LAST_EVENTS: Final = {
    Form.RESPONSES: re.compile(rb"(?:^|[\r\n])event: response\.(?:completed|failed|incomplete)[\r\n]"),
    Form.MESSAGES: re.compile(rb"(?:^|[\r\n])event: message_stop[\r\n]"),
}


class EventSplitter:
    """Cuts a byte stream at the ends of its events, so that a client never has half of one.

    An event is passed on with the chunk that ends it; only the unfinished rest waits. ``done`` becomes true with the
    event that ends a stream of this ``form``.
    """

    def __init__(self, form: Form = Form.NATIVE) -> None:
        self._last = _LAST_EVENTS.get(form)
        self._rest = bytearray()
        self.done = False

    def feed(self, chunk: bytes) -> bytes:
        """Add ``chunk`` and return all events that are now complete, possibly none."""
        # Whole events, which is what nearly always comes.
        if not self._rest and chunk.endswith(b"\n\n"):
            last_line = chunk[chunk.rfind(b"\n", 0, -2) + 1 : -2]
            self.done = self.done or last_line == _DONE or self._ends(chunk)
            return chunk
        searched = max(0, len(self._rest) - _LONGEST_END + 1)
        self._rest += chunk
        end = 0
        for match in _END_OF_EVENT.finditer(self._rest, searched):
            end = match.end()
        events = bytes(self._rest[:end])
        del self._rest[:end]
        last_event = events.rstrip()
        is_done = last_event == _DONE or last_event.endswith((b"\n" + _DONE, b"\r" + _DONE))
        self.done = self.done or is_done or self._ends(events)
        return events

    def _ends(self, events: bytes) -> bool:
        return self._last is not None and self._last.search(events) is not None


def error_event(error: ServiceError) -> bytes:
    """``error`` as an event, in the form that OpenAI clients and SGLang's native clients know."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


class StreamObserver(Protocol):
    """Follows how a stream goes."""

    def feed(self, events: bytes) -> bytes:
        """Take whole events, as the runtime sent them, and return what the client gets of them."""

    def fail(self) -> None:
        """The runtime did not complete it."""

    def abandon(self) -> None:
        """The client left before it was complete."""

    def end(self) -> None:
        """It is over, one way or another."""


class EventStreamResponse(StreamingResponse):
    """The runtime's event stream, passed on event by event.

    If it does not end as a complete stream does, an error event follows. If the client leaves, or does not take what it
    is sent, the runtime's connection is closed, which aborts the generation.

    Args:
        form: of the request.
        stall_seconds: how long the client may take nothing.
        observer: follows it, if there is one.
        on_end: called when it has ended, one way or another.
    """

    def __init__(
        self,
        answer: Call,
        incidents: Incidents,
        *,
        form: Form = Form.NATIVE,
        stall_seconds: float,
        observer: StreamObserver | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._body = self._events()
        super().__init__(self._body, status_code=answer.status)
        self.raw_headers = to_client(answer.headers)
        self._answer = answer
        self._incidents = incidents
        self._form = form
        self._stall_seconds = stall_seconds
        self._observer = observer
        self._on_end = on_end
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Not as the base class does: the first event would wait for its task group.
            with suppress(ClientDisconnected):
                await unless_client_leaves(receive, self._stream(send))
        finally:
            if not self._complete:
                self._incidents.client_left()
            if self._observer is not None:
                if not self._complete:
                    self._observer.abandon()
                self._observer.end()
            if self._on_end is not None:
                self._on_end()
            with anyio.CancelScope(shield=True):
                # Not left to the collector, which closes it in a task of its own.
                await self._body.aclose()
                await self._answer.close()

    async def _stream(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        stall = asyncio.timeout(None)

        async def bounded_send(message: Message) -> None:
            # Sending waits when what was sent before has not been taken.
            stall.reschedule(clock() + self._stall_seconds)
            await send(message)
            stall.reschedule(None)

        with suppress(TimeoutError):
            async with stall:
                await self.stream_response(bounded_send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        splitter = EventSplitter(self._form)
        begun = False
        failure: RuntimeFailure | None = None
        try:
            async with aclosing(self._answer.chunks()) as chunks:
                async for chunk in chunks:
                    if events := splitter.feed(chunk):
                        yield events if self._observer is None else self._observer.feed(events)
                        if not begun:
                            begun = True
                            # uvloop writes when it gets its turn, which must not be after the end of a short answer.
                            await asyncio.sleep(0)
        except RuntimeFailure as error:
            failure = error
        # After its last event the client has everything; how the connection ends then is of no interest.
        if not splitter.done:
            failure = failure or RuntimeFailure("runtime_died", problem="the stream ended before its last event")
            self._incidents.runtime_failed(failure)
            if self._observer is not None:
                self._observer.fail()
            yield error_event(failure)
        self._complete = True
