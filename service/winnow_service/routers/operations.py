"""What operators and their tools ask: is the service alive, is it ready, what has it done."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from winnow_service.routers.dependencies import ForwarderDependency

router = APIRouter(tags=["operations"])


@router.get("/healthz")
async def healthz() -> JSONResponse:
    """200 as long as the service lives, whatever the runtime does."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(forwarder: ForwarderDependency) -> JSONResponse:
    """200 if the runtime answered when last asked, else 503 with the reason."""
    readiness = forwarder.monitor.readiness
    body = {"ready": readiness.ready, "reason": readiness.reason}
    return JSONResponse(body, status_code=200 if readiness.ready else 503)


@router.get("/metrics")
async def metrics(forwarder: ForwarderDependency) -> Response:
    """Prometheus metrics in the text format."""
    return Response(generate_latest(forwarder.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})
