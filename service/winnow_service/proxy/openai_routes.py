"""The forms of OpenAI's and Anthropic's clients."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from winnow_service.openapi import forwarded, generated, runtime_body
from winnow_service.proxy.authorization import Infers
from winnow_service.proxy.body import Form
from winnow_service.proxy.forwarder import forwarder_of

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/completions", responses=generated(), openapi_extra=runtime_body(policies="one"))
async def completions(caller: Infers, request: Request) -> Response:
    """Complete a text; with ``"stream": true`` as server-sent events.

    ``attention`` is a policy for all prompts, or the name of one.
    """
    return await forwarder_of(request).generate(caller, request, Form.COMPLETION)


@router.post("/chat/completions", responses=generated(), openapi_extra=runtime_body(policies="one"))
async def chat_completions(caller: Infers, request: Request) -> Response:
    """Answer a conversation; with ``"stream": true`` as server-sent events.

    ``attention`` is a policy, or the name of one.
    """
    return await forwarder_of(request).generate(caller, request, Form.CHAT)


@router.post("/responses", responses=generated(), openapi_extra=runtime_body(policies="one"))
async def responses(caller: Infers, request: Request) -> Response:
    """Answer an input in the form of OpenAI's Responses; with ``"stream": true`` as server-sent events.

    ``attention`` is a policy, or the name of one. Responses cannot be fetched later: ``background`` is refused.
    """
    return await forwarder_of(request).generate(caller, request, Form.RESPONSES)


@router.post("/messages", responses=generated(), openapi_extra=runtime_body(policies="one"), tags=["Anthropic"])
async def messages(caller: Infers, request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's Messages; with ``"stream": true`` as server-sent events.

    ``attention`` is a policy, or the name of one.
    """
    return await forwarder_of(request).generate(caller, request, Form.MESSAGES)


@router.post("/tokenize", responses=forwarded(), openapi_extra=runtime_body())
async def tokenize(_: Infers, request: Request) -> Response:
    """Tokenize a prompt or messages with the served model's tokenizer."""
    return await forwarder_of(request).forward_json(request)


@router.get("/models", responses=forwarded())
async def models(_: Infers, request: Request) -> Response:
    """List the served models."""
    return await forwarder_of(request).forward(request)


@router.get("/models/{model:path}", responses=forwarded())
async def model(_: Infers, _model: Annotated[str, Path(alias="model")], request: Request) -> Response:
    """Describe one served model."""
    return await forwarder_of(request).forward(request)
