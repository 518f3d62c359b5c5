"""Runs the runtime and the service together: until told to stop, or until either ends."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import httpx

from winnow_service.supervisor.child import Child, Program
from winnow_service.supervisor.display import ConsoleDisplay
from winnow_service.supervisor.orphans import adopt_orphans, kill_children

_POLL_SECONDS = 0.25
_PROBE_TIMEOUT_SECONDS = 5.0
# Answers that are being given may go on this long after a stop; then the runtime ends, and they with an error event.
_SERVICE_GRACE_SECONDS = 5.0
_RUNTIME_GRACE_SECONDS = 10.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Starts two programs, and stops both when told to or when one ends. It restarts nothing."""

    def __init__(self, runtime: Program, service: Program, display: ConsoleDisplay) -> None:
        self._runtime = runtime
        self._service = service
        self._display = display

    async def run(self) -> int:
        """Return the exit status: 0 if a signal said to stop, 1 if a program ended by itself."""
        stopped = asyncio.Event()
        hurried = asyncio.Event()

        def stop() -> None:
            (hurried if stopped.is_set() else stopped).set()

        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop)

        adopt_orphans()
        runtime = await Child.start(self._runtime, self._display.line)
        service = await Child.start(self._service, self._display.line)
        dead = await self._watch(runtime, service, stopped)
        self._display.stopping()
        await _stop(runtime, service, hurried)
        kill_children()
        if dead is None:
            return 0
        if dead.refusal is None:
            self._display.died(dead.program.name, await dead.wait(), dead.tail)
        else:
            self._display.refused(dead.refusal)
        return 1

    async def _watch(self, runtime: Child, service: Child, stopped: asyncio.Event) -> Child | None:
        """Return who ended first; None if a signal said to stop."""
        stop = asyncio.create_task(stopped.wait())
        ready = asyncio.create_task(self._announce_readiness())
        ends = {asyncio.create_task(child.wait()): child for child in (runtime, service)}
        try:
            pending: set[asyncio.Task[object]] = {stop, ready, *ends}
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    return None
                # The runtime first: if both have ended, the service has ended because of it.
                for end, child in ends.items():
                    if end in done:
                        return child
                ready.result()
        finally:
            for task in (stop, ready, *ends):
                task.cancel()

    async def _announce_readiness(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_TIMEOUT_SECONDS) as client:
            for program in (self._runtime, self._service):
                self._display.waiting_for(program.name)
                await _until_ready(client, program.ready_url)
        self._display.ready()


async def _until_ready(client: httpx.AsyncClient, url: str) -> None:
    while True:
        with suppress(httpx.HTTPError):
            if (await client.get(url)).status_code == 200:
                return
        await asyncio.sleep(_POLL_SECONDS)


async def _stop(runtime: Child, service: Child, hurry: asyncio.Event) -> None:
    async def orderly() -> None:
        # The service goes first, while the runtime can still finish what it is answering. A service that outlasts its
        # grace ends when the runtime does, because its streams do.
        service_stop = asyncio.create_task(service.stop(_SERVICE_GRACE_SECONDS + _RUNTIME_GRACE_SECONDS))
        if runtime.running:
            await asyncio.wait({service_stop}, timeout=_SERVICE_GRACE_SECONDS)
            await runtime.stop(_RUNTIME_GRACE_SECONDS)
        await service_stop

    order = asyncio.create_task(orderly())
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait({order, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not order.done():
        order.cancel()
        await asyncio.gather(runtime.kill(), service.kill())
