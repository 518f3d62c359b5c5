"""What routes need of the application they belong to, and of a request that writes a resource: its body."""

from __future__ import annotations

from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from winnow_service.errors import InvalidField, ServiceError
from winnow_service.keys.keyring import Keyring
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.proxy.body import read_json_object
from winnow_service.proxy.forwarder import Forwarder, forwarder_of
from winnow_service.settings import Settings
from winnow_service.store.mirror import Mirror

_MAX_QUOTED = 40

Model = TypeVar("Model", bound=BaseModel)


async def _forwarder(request: Request) -> Forwarder:
    return forwarder_of(request)


async def _mirror(request: Request) -> Mirror:
    return cast(Mirror, request.app.state.mirror)


async def _registry(request: Request) -> PolicyRegistry:
    return cast(PolicyRegistry, request.app.state.registry)


async def _keyring(request: Request) -> Keyring:
    return cast(Keyring, request.app.state.keyring)


def _settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


ForwarderDependency = Annotated[Forwarder, Depends(_forwarder)]
MirrorDependency = Annotated[Mirror, Depends(_mirror)]
RegistryDependency = Annotated[PolicyRegistry, Depends(_registry)]
KeyringDependency = Annotated[Keyring, Depends(_keyring)]


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
    body = await read_json_object(request, _settings(request).max_body_bytes)
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
    return InvalidField(path or "body", _problem(first["msg"]))


def _problem(message: str) -> str:
    return message.replace("Input should be", "must be", 1).removeprefix("Value error, ")
