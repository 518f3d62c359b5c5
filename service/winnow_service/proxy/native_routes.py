"""SGLang's own forms."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from winnow_service.openapi import forwarded, generated, runtime_body
from winnow_service.proxy.authorization import Infers
from winnow_service.proxy.body import Form
from winnow_service.proxy.forwarder import forwarder_of

router = APIRouter(tags=["SGLang"])


@router.post("/generate", responses=generated(), openapi_extra=runtime_body(policies="each"))
async def generate(caller: Infers, request: Request) -> Response:
    """Generate, in SGLang's native form; with ``"stream": true`` as server-sent events.

    ``attention`` is a policy or the name of one, or a list of one for each prompt.
    """
    return await forwarder_of(request).generate(caller, request, Form.NATIVE)


@router.post("/tokenize", responses=forwarded(), openapi_extra=runtime_body())
async def tokenize(_: Infers, request: Request) -> Response:
    """Tokenize a prompt or messages with the served model's tokenizer."""
    return await forwarder_of(request).forward_json(request)
