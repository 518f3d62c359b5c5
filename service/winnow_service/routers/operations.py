"""What operators and their tools ask: is the service alive, is it ready, what has it done."""

from __future__ import annotations

from typing import Literal, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from winnow_service.admission.drain import Drain
from winnow_service.openapi import problems
from winnow_service.proxy.authorization import Scrapes
from winnow_service.routers.dependencies import ForwarderDependency, MirrorDependency
from winnow_service.runtime.discovery import DiscoveryState
from winnow_service.runtime.pool import RuntimeState

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    """The service lives."""

    status: Literal["ok"]


class StoreState(BaseModel):
    """Whether policies and keys can be written, and what was last known is up to date; if not, why."""

    healthy: bool
    reason: str


class ReadyState(BaseModel):
    """Whether requests are served.

    Attributes:
        degraded: they are, but with the last known policies and keys because the store is away, or not by all runtimes,
            or by those whose addresses were known before the DNS was away.
        draining: they are not any more, because the service is about to end.
        names: of ``WINNOW_RUNTIME_URLS`` that stand for runtimes.
    """

    ready: bool
    degraded: bool
    draining: bool
    reason: str
    store: StoreState
    runtimes: list[RuntimeState]
    names: list[DiscoveryState]


@router.get("/healthz")
async def healthz() -> Health:
    """200 as long as the service lives, whatever the runtimes do."""
    return Health(status="ok")


@router.get("/readyz", response_model=ReadyState, responses={503: {"model": ReadyState}})
async def readyz(forwarder: ForwarderDependency, mirror: MirrorDependency, request: Request) -> JSONResponse:
    """200 if requests are served: a runtime answered when last asked, and the store has been read; else 503."""
    runtimes, store = forwarder.runtimes, mirror.health
    runtime = runtimes.health
    draining = cast(Drain, request.app.state.drain).draining
    ready = runtime.usable and mirror.loaded and not draining
    if draining:
        reason = "The service is about to end."
    else:
        reason = runtime.reason if not runtime.usable or mirror.loaded else store.reason
    state = ReadyState(
        ready=ready,
        degraded=ready and not (store.healthy and runtimes.all_usable),
        draining=draining,
        reason=reason,
        store=StoreState(healthy=store.healthy, reason=store.reason),
        runtimes=runtimes.states,
        names=runtimes.discovered,
    )
    return JSONResponse(state.model_dump(), status_code=200 if ready else 503)


@router.get("/metrics", response_class=PlainTextResponse, responses=problems(401, 403, 503))
async def metrics(_: Scrapes, forwarder: ForwarderDependency) -> Response:
    """Prometheus metrics in the text format."""
    return Response(generate_latest(forwarder.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})
