"""The OpenAI-compatible forms."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from winnow_service.attention.request import Form
from winnow_service.routers.dependencies import ForwarderDependency

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/completions")
async def completions(request: Request, forwarder: ForwarderDependency) -> Response:
    """Complete a text; with ``"stream": true`` as server-sent events. ``attention`` is a policy for all prompts."""
    return await forwarder.forward_generation(request, Form.OPENAI)


@router.post("/chat/completions")
async def chat_completions(request: Request, forwarder: ForwarderDependency) -> Response:
    """Answer a conversation; with ``"stream": true`` as server-sent events. ``attention`` is a policy."""
    return await forwarder.forward_generation(request, Form.OPENAI)


@router.post("/tokenize")
async def tokenize(request: Request, forwarder: ForwarderDependency) -> Response:
    """Tokenize a prompt or messages with the served model's tokenizer."""
    return await forwarder.forward_json(request)


@router.get("/models")
async def models(request: Request, forwarder: ForwarderDependency) -> Response:
    """List the served models."""
    return await forwarder.forward(request)


@router.get("/models/{model:path}")
async def model(request: Request, forwarder: ForwarderDependency) -> Response:
    """Describe one served model."""
    return await forwarder.forward(request)
