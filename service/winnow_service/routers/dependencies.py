"""What routes need of the application they belong to, and of a request that writes a resource: its body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request, Response
from pydantic import BaseModel, ValidationError

from winnow_service.errors import InvalidField, ServiceError
from winnow_service.keys.administration import KeyAdministration
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.proxy.authorization import Administers, settings_of
from winnow_service.proxy.body import read_json_object
from winnow_service.proxy.forwarder import Forwarder, forwarder_of
from winnow_service.routers.conditional import (
    IfMatch,
    already_exists,
    expected_by_match,
    expected_by_put,
    without_condition,
)
from winnow_service.store.documents import Conflict, Document
from winnow_service.store.mirror import Mirror

_MAX_QUOTED = 40

Model = TypeVar("Model", bound=BaseModel)


async def _forwarder(request: Request) -> Forwarder:
    return forwarder_of(request)


async def _mirror(request: Request) -> Mirror:
    return cast(Mirror, request.app.state.mirror)


async def _registry(request: Request) -> PolicyRegistry:
    return cast(PolicyRegistry, request.app.state.registry)


ForwarderDependency = Annotated[Forwarder, Depends(_forwarder)]
MirrorDependency = Annotated[Mirror, Depends(_mirror)]
RegistryDependency = Annotated[PolicyRegistry, Depends(_registry)]


@dataclass(frozen=True)
class Write:
    """A request of an administrator that writes a resource.

    Attributes:
        author: who sends it.
        if_match: the state that it replaces or deletes, if it says so.
    """

    author: str
    request: Request
    mirror: Mirror
    registry: PolicyRegistry
    if_match: str | None

    @property
    def keys(self) -> KeyAdministration:
        return KeyAdministration(self.mirror, self.registry, self.author)

    async def body(self, model: type[Model]) -> Model:
        """Read what is to be written. Raises as ``read_resource`` does."""
        return await read_resource(self.request, model)

    async def put(
        self, collection: str, name: str, value: dict[str, Any], if_none_match: str | None
    ) -> tuple[Document, bool]:
        """Write a document; return it, and whether there was none."""
        expected = expected_by_put(self.if_match, if_none_match, self.mirror.get(collection, name))
        try:
            document = await self.mirror.write(collection, name, value, expected, self.author)
        except Conflict as conflict:
            raise without_condition(repr(name), conflict, self.if_match, if_none_match) from None
        return document, expected == "absent"

    async def delete(self, collection: str, name: str) -> Response:
        """Delete a document; return the answer."""
        current = self.mirror.get(collection, name)
        if current is None:
            raise ServiceError("not_found", what=repr(name))
        if self.if_match is None:
            raise already_exists(repr(name), current.etag)
        expected = expected_by_match(self.if_match, current)
        await self.mirror.write(collection, name, None, expected, self.author)
        return Response(status_code=204)


async def _write(
    caller: Administers,
    request: Request,
    mirror: MirrorDependency,
    registry: RegistryDependency,
    if_match: IfMatch = None,
) -> Write:
    return Write(caller.id, request, mirror, registry, if_match)


Writes = Annotated[Write, Depends(_write)]


async def read_resource(request: Request, model: type[Model]) -> Model:
    """Read the body of a request that writes a resource.

    Raises:
        InvalidField: a field is not what it must be.
        ServiceError: it is not said to be JSON; or as ``read_json_object``.
    """
    # Without a key, any web page can make its reader's browser send text here, but it must ask before it sends JSON.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ServiceError("not_json", param="content-type")
    body = await read_json_object(request, settings_of(request).max_body_bytes)
    try:
        return model.model_validate_json(body.content)
    except ValidationError as error:
        # What else is wrong shows when this is put right.
        raise _invalid(error, model) from None


def _invalid(error: ValidationError, model: type[BaseModel]) -> InvalidField:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    location = first["loc"]
    path = ".".join(str(part)[:_MAX_QUOTED] for part in location).encode("unicode_escape").decode()
    if first["type"] == "extra_forbidden" and len(location) == 1:
        return InvalidField(path, f"unknown field; there are {', '.join(model.model_fields)}")
    problem = first["msg"].replace("Input should be", "must be", 1).removeprefix("Value error, ")
    return InvalidField(path or "body", problem)
