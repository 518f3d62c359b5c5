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
from winnow_service.runtime.runtime import RuntimeState
from winnow_service.store.mirror import StoreState

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    """The service lives."""

    status: Literal["ok"]


class ReadyState(BaseModel):
    """Whether requests are served.

    Attributes:
        degraded: they are, but with the last known policies and keys because the store is away.
        draining: they are not any more, because the service is about to end.
        runtimes: the one address that requests are sent to: of a runtime, or of a balancer in front of several.
    """

    ready: bool
    degraded: bool
    draining: bool
    reason: str
    store: StoreState
    runtimes: list[RuntimeState]


@router.get("/healthz")
async def healthz() -> Health:
    """200 as long as the service lives, whatever the runtime does."""
    return Health(status="ok")


@router.get("/readyz", response_model=ReadyState, responses={503: {"model": ReadyState}})
async def readyz(forwarder: ForwarderDependency, mirror: MirrorDependency, request: Request) -> JSONResponse:
    """200 if requests are served: the runtime answered when last asked, and the store has been read; else 503."""
    runtime, store = forwarder.runtime.state, mirror.health
    draining = cast(Drain, request.app.state.drain).draining
    ready = runtime.usable and mirror.loaded and not draining
    if draining:
        reason = "The service is about to end."
    else:
        reason = runtime.reason if not runtime.usable or mirror.loaded else store.reason
    state = ReadyState(
        ready=ready,
        degraded=ready and not store.healthy,
        draining=draining,
        reason=reason,
        store=store,
        runtimes=[runtime],
    )
    return JSONResponse(state.model_dump(), status_code=200 if ready else 503)


@router.get("/metrics", response_class=PlainTextResponse, responses=problems(401, 403, 503))
async def metrics(_: Scrapes, forwarder: ForwarderDependency) -> Response:
    """Prometheus metrics in the text format."""
    return Response(generate_latest(forwarder.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})
