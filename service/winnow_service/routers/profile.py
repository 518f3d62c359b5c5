"""The profile of the served model, by which the runtime chooses policies."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import ValidationError

from winnow_service.errors import InvalidPolicy, RuntimeFailure, ServiceError
from winnow_service.openapi import problems
from winnow_service.policies.profile import ModelProfile
from winnow_service.proxy.authorization import Reads
from winnow_service.routers.dependencies import ForwarderDependency

router = APIRouter(prefix="/v1", tags=["policies"])


@router.get("/profile", response_model=ModelProfile, responses=problems(401, 403, 404, 502, 503, 504))
async def get_profile(_: Reads, request: Request, forwarder: ForwarderDependency) -> ModelProfile:
    """Return what policies lose and read on the served model, by length, as `winnow calibrate profile` measured it."""
    try:
        told = (await forwarder.runtime.served.get(request.headers.get("authorization"))).profile
    except InvalidPolicy:
        # Without Winnow's backend nothing is chosen.
        told = None
    if told is None:
        raise ServiceError("no_profile")
    try:
        return ModelProfile.model_validate(told)
    except ValidationError as error:
        first = ".".join(map(str, error.errors()[0]["loc"]))
        raise RuntimeFailure("runtime_unusable", problem=f"its profile is not as expected ({first})") from None
