"""SGLang's own forms."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from winnow_service.attention.request import Form
from winnow_service.routers.dependencies import ForwarderDependency

router = APIRouter(tags=["SGLang"])


@router.post("/generate")
async def generate(request: Request, forwarder: ForwarderDependency) -> Response:
    """Generate, in SGLang's native form; with ``"stream": true`` as server-sent events.

    ``attention`` is a policy, or a list of one for each prompt.
    """
    return await forwarder.forward_generation(request, Form.NATIVE)


@router.post("/tokenize")
async def tokenize(request: Request, forwarder: ForwarderDependency) -> Response:
    """Tokenize a prompt or messages with the served model's tokenizer."""
    return await forwarder.forward_json(request)
