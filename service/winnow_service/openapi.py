"""What the OpenAPI document says beyond what FastAPI finds in the routes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field
from starlette.routing import compile_path

from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service.errors import PROBLEM_MEDIA_TYPE, ServiceError, problem_response

_REF: Final = "#/components/schemas/{model}"
POLICY: Final[dict[str, Any]] = {"$ref": "#/components/schemas/AttentionPolicy"}

_ANY_JSON: Final[dict[str, Any]] = {"application/json": {"schema": {}}}
_RETRY_AFTER: Final[dict[str, Any]] = {
    "description": "Seconds until the same request can be served.",
    "schema": {"type": "integer"},
}

# Bodies of requests: FastAPI does not know them, because routes read them after they have checked the key.
_DOCUMENTED: Final[dict[str, type[BaseModel]]] = {}

Responses = dict[int | str, dict[str, Any]]


class ErrorObject(BaseModel):
    """The error as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str


class Problem(BaseModel):
    """A problem details document (RFC 9457). Its member ``error`` is what OpenAI's clients read."""

    type: str = Field(description="A URI that tells kinds of problems apart.")
    title: str
    status: int
    detail: str
    error: ErrorObject


def problems(*statuses: int) -> Responses:
    """The answers with these statuses, as the document has them."""
    schema = {"$ref": _REF.format(model="Problem")}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {PROBLEM_MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body of a route that reads it itself, as the document has it."""
    _DOCUMENTED[model.__name__] = model
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def runtime_body(policies: Literal["one", "each"] | None = None) -> dict[str, Any]:
    """The body of a request that the runtime answers: what the service reads of it; all else is the runtime's.

    Args:
        policies: whether ``attention`` is one policy, or may be a list of one for each prompt; None for no such field.
    """
    schema: dict[str, Any] = {"type": "object"}
    if policies is not None:
        alternatives: list[dict[str, Any]] = [POLICY, {"type": "string"}, {"type": "null"}]
        if policies == "each":
            alternatives.append({"type": "array", "items": {"anyOf": alternatives[:2]}})
        schema["properties"] = {"attention": {"anyOf": alternatives}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def forwarded() -> Responses:
    """The answers of a route that asks the runtime: its own, and the service's errors."""
    refused = problems(400, 401, 403, 413, 431, 502, 503, 504)
    refused[503]["headers"] = {"Retry-After": _RETRY_AFTER}
    return {
        200: {"description": "The runtime's answer", "content": _ANY_JSON},
        "default": {
            "description": "The runtime's own errors, as it words them",
            "content": {**_ANY_JSON, PROBLEM_MEDIA_TYPE: {"schema": {}}},
        },
        **refused,
    }


def generated() -> Responses:
    """The answers of a route that generates."""
    headers = {
        "RateLimit": {"description": "What is left of the key's limits.", "schema": {"type": "string"}},
        "RateLimit-Policy": {"description": "The key's limits.", "schema": {"type": "string"}},
        "Winnow-Warning": {"description": "What the key's bounds have changed.", "schema": {"type": "string"}},
    }
    stream: dict[str, Any] = {"text/event-stream": {}}
    answered = {"description": "The runtime's answer", "content": {**_ANY_JSON, **stream}, "headers": headers}
    limited = problems(429)
    limited[429]["headers"] = {
        **{name: headers[name] for name in ("RateLimit", "RateLimit-Policy")},
        "Retry-After": _RETRY_AFTER,
    }
    return {**forwarded(), **problems(422), **limited, 200: answered}


def install_documentation(app: FastAPI) -> None:
    """Add to the document of ``app`` the schemas that its routes refer to, and answer 405 as the document says."""
    described = app.openapi

    async def method_not_allowed(request: Request, _: Exception) -> Response:
        # What is not in the document are pages.
        allowed = ", ".join(sorted(_documented_methods(app, request.url.path) or {"GET"}))
        return problem_response(ServiceError("method_not_allowed", method=request.method, allowed=allowed))

    def with_schemas() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = described()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            models: list[type[BaseModel]] = [*_DOCUMENTED.values(), Problem, AttentionPolicy]
            for model in models:
                schema = model.model_json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = with_schemas  # type: ignore[method-assign]
    # Starlette knows the methods of one route alone, and a path has several.
    app.add_exception_handler(405, method_not_allowed)


def _documented_methods(app: FastAPI, path: str) -> set[str]:
    return {
        method.upper()
        for template, operations in app.openapi()["paths"].items()
        if compile_path(template)[0].fullmatch(path)
        for method in operations
    }
