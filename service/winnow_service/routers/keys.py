"""API keys as resources."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from winnow_service.errors import ServiceError
from winnow_service.keys.administration import KeyAdministration, readable_keys, resource
from winnow_service.keys.keyring import Keyring
from winnow_service.keys.records import KEYS, CreatedKey, KeyResource, KeySettings
from winnow_service.openapi import json_body, problems
from winnow_service.proxy.authorization import Administers
from winnow_service.routers.conditional import IfNoneMatch, already_exists, answer, expected_by_match
from winnow_service.routers.dependencies import MirrorDependency, RegistryDependency, Writes, read_resource
from winnow_service.store.documents import Document
from winnow_service.store.mirror import Mirror

router = APIRouter(prefix="/v1/keys", tags=["keys"])

KeyId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="The id of a key, which is part of it.")]
_WRITTEN = problems(400, 401, 403, 413, 415, 422, 503)
_NO_STORE = {"cache-control": "no-store"}


class KeyList(BaseModel):
    """By id.

    Attributes:
        unreadable: ids of keys that another version wrote, which let nobody in and can be revoked.
    """

    keys: list[KeyResource]
    unreadable: list[str]


@router.get("", response_model=KeyList, responses=problems(401, 403, 503))
async def list_keys(_: Administers, mirror: MirrorDependency) -> KeyList:
    """List all keys that have not been revoked, without what clients send."""
    readable, unreadable = readable_keys(mirror)
    return KeyList(keys=readable, unreadable=unreadable)


@router.post("", status_code=201, response_model=CreatedKey, responses=_WRITTEN, openapi_extra=json_body(KeySettings))
async def create_key(
    caller: Administers, request: Request, mirror: MirrorDependency, registry: RegistryDependency
) -> Response:
    """Make a key. The answer is the only one that has it: what is stored cannot be turned back into it."""
    settings = await read_resource(request, KeySettings)
    is_first = cast(Keyring, request.app.state.keyring).is_open
    document, created = await KeyAdministration(mirror, registry, caller.id).create(settings, must_administer=is_first)
    headers = {"etag": document.etag, "location": f"/v1/keys/{created.id}", **_NO_STORE}
    return JSONResponse(created.model_dump(mode="json"), status_code=201, headers=headers)


@router.get("/{key_id}", response_model=KeyResource, responses={304: {}, **problems(401, 403, 404, 422, 503)})
async def get_key(
    _: Administers, key_id: KeyId, mirror: MirrorDependency, if_none_match: IfNoneMatch = None
) -> Response:
    """Return a key without what clients send, with its ETag."""
    document = _existing(mirror, key_id)
    return answer(resource(document).model_dump(mode="json"), document.etag, if_none_match)


@router.put(
    "/{key_id}",
    response_model=KeyResource,
    responses={**_WRITTEN, **problems(404, 412, 428)},
    openapi_extra=json_body(KeySettings),
)
async def put_key(write: Writes, key_id: KeyId) -> Response:
    """Replace everything that is set of a key. What clients send stays the same."""
    current = _existing(write.mirror, key_id)
    if write.if_match is None:
        raise already_exists(f"The key {key_id}", current.etag)
    settings = await write.body(KeySettings)
    document = await write.keys.change(current, settings, expected_by_match(write.if_match, current))
    return JSONResponse(resource(document).model_dump(mode="json"), headers={"etag": document.etag})


@router.delete("/{key_id}", status_code=204, responses=problems(401, 403, 404, 412, 422, 503))
async def revoke_key(write: Writes, key_id: KeyId) -> Response:
    """Revoke a key, for good. Every replica refuses it within a second. If-Match is not needed: haste may be."""
    current = _existing(write.mirror, key_id)
    await write.keys.revoke(key_id, "present" if write.if_match is None else expected_by_match(write.if_match, current))
    return Response(status_code=204)


def _existing(mirror: Mirror, key_id: str) -> Document:
    document = mirror.get(KEYS, key_id)
    if document is None:
        raise ServiceError("not_found", what=f"key {key_id}")
    return document
