"""Policies as resources, and the default policies of models."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import from_json

from winnow_kernels.policies.attention_policy import AttentionPolicy, json_schema
from winnow_service.errors import InvalidField, InvalidPolicy, RuntimeFailure, RuntimeRefused, ServiceError
from winnow_service.keys.records import KEYS
from winnow_service.openapi import json_body, problems
from winnow_service.policies.names import MODEL_NAME, POLICY_NAME, POLICY_NAME_IN_WORDS
from winnow_service.policies.presets import BUILT_IN
from winnow_service.policies.registry import DEFAULTS, POLICIES, read_policy, read_stored
from winnow_service.policies.resource import (
    DefaultList,
    DefaultResource,
    DefaultSettings,
    PolicyAnswer,
    PolicyList,
    PolicyQuestion,
    PolicyResource,
    PolicyRevision,
    PolicyRevisions,
    PolicySettings,
)
from winnow_service.proxy.authorization import Reads
from winnow_service.routers.conditional import IfNoneMatch, IfNoneMatchAny, answer
from winnow_service.routers.dependencies import (
    ForwarderDependency,
    MirrorDependency,
    RegistryDependency,
    Writes,
    read_resource,
)
from winnow_service.store.documents import Document
from winnow_service.store.mirror import Mirror

router = APIRouter(prefix="/v1", tags=["policies"])

Name = Annotated[str, Path(pattern=POLICY_NAME, description=f"{POLICY_NAME_IN_WORDS.capitalize()}.")]
Model = Annotated[
    str, Path(pattern=MODEL_NAME, description="The model as requests name it; `*` for every model without its own.")
]
_READ = problems(401, 403, 503)
_WRITTEN = problems(400, 401, 403, 412, 413, 415, 422, 428, 503)


@router.get("/policies", response_model=PolicyList, responses=_READ)
async def list_policies(_: Reads, registry: RegistryDependency) -> PolicyList:
    """List all policies that can be asked for by name: presets first."""
    return PolicyList(policies=[PolicyResource.of(policy) for policy in registry.all()])


@router.get(
    "/policies:schema",
    response_class=Response,
    responses={200: {"content": {"application/schema+json": {"schema": {"type": "object"}}}}, **_READ},
)
async def policy_schema(_: Reads) -> Response:
    """Return the JSON Schema of policies. Bounds between fields are not in it."""
    return JSONResponse(json_schema(), media_type="application/schema+json")


@router.post(
    "/policies:validate",
    response_model=PolicyAnswer,
    responses=problems(400, 401, 403, 413, 415, 422, 503),
    openapi_extra=json_body(PolicyQuestion),
)
async def validate_policy(
    caller: Reads, request: Request, registry: RegistryDependency, forwarder: ForwarderDependency
) -> PolicyAnswer:
    """Tell what a request of this key with this policy would get, or refuse it as the request would be refused."""
    question = await read_resource(request, PolicyQuestion)
    policy = read_policy(question.attention, registry.named)
    changes: list[str] = []
    if caller.bounds is not None:
        policy, changes = caller.bounds.apply(policy)
    served, checked = await _as_served(policy, forwarder, request.headers.get("authorization"))
    return PolicyAnswer(
        attention=from_json(served.canonical()),
        fingerprint=served.fingerprint(),
        warnings=[*changes, *served.warnings()],
        checked_against_model=checked,
    )


@router.get("/policies/{name}", response_model=PolicyResource, responses={304: {}, **_READ, **problems(404, 422)})
async def get_policy(_: Reads, name: Name, registry: RegistryDependency, if_none_match: IfNoneMatch = None) -> Response:
    """Return a policy, with its ETag."""
    policy = registry.get(name)
    if policy is None:
        raise ServiceError("not_found", what=f"policy {name!r}")
    etag = f'"{policy.attention.fingerprint()}"' if policy.document is None else policy.document.etag
    return answer(PolicyResource.of(policy).model_dump(mode="json"), etag, if_none_match)


@router.put(
    "/policies/{name}",
    response_model=PolicyResource,
    responses={201: {"model": PolicyResource}, **_WRITTEN, **problems(409)},
    openapi_extra=json_body(PolicySettings),
)
async def put_policy(write: Writes, name: Name, if_none_match: IfNoneMatchAny = None) -> Response:
    """Make a policy, or with If-Match replace one. Requests that are being answered keep what they were given."""
    _refuse_preset(name)
    settings = await write.body(PolicySettings)
    attention = read_policy(settings.attention, write.registry.named)
    value = {"attention": from_json(attention.canonical()), "description": settings.description}
    document, created = await write.put(POLICIES, name, value, if_none_match)
    return _written(PolicyResource.of(read_stored(document)), document, created)


@router.delete("/policies/{name}", status_code=204, responses={**_WRITTEN, **problems(404, 409)})
async def delete_policy(write: Writes, name: Name) -> Response:
    """Delete a policy that is nobody's default. Its revisions stay."""
    _refuse_preset(name)
    _refuse_while_default(write.mirror, name)
    return await write.delete(POLICIES, name)


@router.get("/policies/{name}/revisions", response_model=PolicyRevisions, responses={**_READ, **problems(404, 422)})
async def policy_revisions(_: Reads, name: Name, mirror: MirrorDependency) -> PolicyRevisions:
    """List the last states of a policy, the newest first, also after it was deleted. A preset has none."""
    documents = [] if name in BUILT_IN else await mirror.revisions(POLICIES, name)
    if not documents and name not in BUILT_IN:
        raise ServiceError("not_found", what=f"policy {name!r}")
    return PolicyRevisions(name=name, revisions=[PolicyRevision.of(document) for document in documents])


@router.get("/policy-defaults", response_model=DefaultList, responses=_READ)
async def list_defaults(_: Reads, mirror: MirrorDependency) -> DefaultList:
    """List the policies of requests that ask for none, by model."""
    return DefaultList(defaults=[DefaultResource.of(document) for document in mirror.all(DEFAULTS)])


@router.get(
    "/policy-defaults/{model:path}", response_model=DefaultResource, responses={304: {}, **_READ, **problems(404, 422)}
)
async def get_default(_: Reads, model: Model, mirror: MirrorDependency, if_none_match: IfNoneMatch = None) -> Response:
    """Return the policy of a model's requests that ask for none, with its ETag."""
    document = mirror.get(DEFAULTS, model)
    if document is None:
        raise ServiceError("not_found", what=f"default for {model!r}")
    return answer(DefaultResource.of(document).model_dump(mode="json"), document.etag, if_none_match)


@router.put(
    "/policy-defaults/{model:path}",
    response_model=DefaultResource,
    # No path has a line break in it.
    responses={201: {"model": DefaultResource}, **_WRITTEN, **problems(404)},
    openapi_extra=json_body(DefaultSettings),
)
async def put_default(write: Writes, model: Model, if_none_match: IfNoneMatchAny = None) -> Response:
    """Set the policy of a model's requests that ask for none."""
    settings = await write.body(DefaultSettings)
    try:
        write.registry.named(settings.policy, "policy")
    except InvalidPolicy as error:
        raise InvalidField(error.path, error.problem) from None
    document, created = await write.put(DEFAULTS, model, settings.model_dump(mode="json"), if_none_match)
    return _written(DefaultResource.of(document), document, created)


@router.delete("/policy-defaults/{model:path}", status_code=204, responses={**_WRITTEN, **problems(404)})
async def delete_default(write: Writes, model: Model) -> Response:
    """Go back to dense attention, or to the default of `*`."""
    return await write.delete(DEFAULTS, model)


def _written(resource: BaseModel, document: Document, created: bool) -> Response:
    content, headers = resource.model_dump(mode="json"), {"etag": document.etag}
    return JSONResponse(content, status_code=201 if created else 200, headers=headers)


def _refuse_preset(name: str) -> None:
    if name in BUILT_IN:
        raise ServiceError("preset", name=name)


def _refuse_while_default(mirror: Mirror, name: str) -> None:
    model = mirror.any(DEFAULTS, lambda document: (document.value or {}).get("policy") == name)
    if model is not None:
        raise ServiceError("in_use", problem=f"{name!r} is the default policy of the model {model.name!r}.")
    key = mirror.any(KEYS, lambda document: (document.value or {}).get("default_policy") == name)
    if key is not None:
        raise ServiceError("in_use", problem=f"{name!r} is the default policy of the key {key.name}.")


async def _as_served(
    policy: AttentionPolicy, forwarder: ForwarderDependency, authorization: str | None
) -> tuple[AttentionPolicy, bool]:
    """Return ``policy`` as the runtime runs it, and whether that is known."""
    if policy.is_dense:
        return policy, True
    try:
        model = await forwarder.runtime.served.get(authorization)
    except (RuntimeFailure, RuntimeRefused):
        return policy, False
    return model.check(policy), True
