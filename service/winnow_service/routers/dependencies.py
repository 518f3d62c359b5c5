"""What routes need of the application they belong to, and of the request: who sends it, and its body."""

from __future__ import annotations

from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from pydantic import BaseModel, SecretStr, ValidationError

from winnow_service.errors import InvalidField, NotJson, ScopeMissing
from winnow_service.keys.keyring import ANYONE, Caller, Keyring
from winnow_service.keys.records import Scope
from winnow_service.limits.forwarding import GovernedForwarder
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.request_body import read_json_object
from winnow_service.request_log import request_facts
from winnow_service.settings import Settings
from winnow_service.store.mirror import Mirror

_AUTHORIZATION = b"authorization"
_MAX_QUOTED = 40

Model = TypeVar("Model", bound=BaseModel)

_bearer = HTTPBearer(
    auto_error=False, scheme_name="key", description="A key of the service. Not needed as long as there is none."
)


def forwarder_of(request: Request) -> GovernedForwarder:
    """The forwarder, for routes whose every microsecond is the caller's: resolving a dependency takes fifty."""
    return cast(GovernedForwarder, request.app.state.forwarder)


async def _forwarder(request: Request) -> GovernedForwarder:
    return forwarder_of(request)


async def _mirror(request: Request) -> Mirror:
    return cast(Mirror, request.app.state.mirror)


async def _registry(request: Request) -> PolicyRegistry:
    return cast(PolicyRegistry, request.app.state.registry)


async def _keyring(request: Request) -> Keyring:
    return cast(Keyring, request.app.state.keyring)


def _settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


ForwarderDependency = Annotated[GovernedForwarder, Depends(_forwarder)]
MirrorDependency = Annotated[Mirror, Depends(_mirror)]
RegistryDependency = Annotated[PolicyRegistry, Depends(_registry)]
KeyringDependency = Annotated[Keyring, Depends(_keyring)]
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


async def _authorized(request: Request, needed: SecurityScopes, credentials: _Credentials) -> Caller:
    keyring = await _keyring(request)
    if keyring.is_open:
        return ANYONE
    caller = keyring.caller(None if credentials is None else credentials.credentials)
    for scope in needed.scopes:
        if scope not in caller.scopes:
            raise ScopeMissing(scope)
    request_facts(request.scope).key_id = caller.id
    _replace_authorization(request, _settings(request).runtime_api_key)
    return caller


async def _scraper(request: Request, credentials: _Credentials) -> Caller:
    if _settings(request).metrics_public:
        return ANYONE
    return await _authorized(request, SecurityScopes([Scope.READ]), credentials)


# The caller, whose key must have the scope. Checked before anything else of the request is read.
Infers = Annotated[Caller, Security(_authorized, scopes=[Scope.INFER.value])]
Reads = Annotated[Caller, Security(_authorized, scopes=[Scope.READ.value])]
Administers = Annotated[Caller, Security(_authorized, scopes=[Scope.ADMIN.value])]
Scrapes = Annotated[Caller, Security(_scraper, scopes=[Scope.READ.value])]


async def read_resource(request: Request, model: type[Model]) -> Model:
    """Read the body of a request that writes a resource.

    Raises:
        NotJson: it is not said to be JSON.
        InvalidField: a field is not what it must be. Besides, what ``read_json_object`` raises.
    """
    # Without a key, any web page can make its reader's browser send text here, but it must ask before it sends JSON.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise NotJson
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


def _replace_authorization(request: Request, runtime_api_key: SecretStr | None) -> None:
    # The key is for the service: the runtime gets its own, or none. In place, because the request has read its headers.
    headers: list[tuple[bytes, bytes]] = request.scope["headers"]
    others = [(name, value) for name, value in headers if name != _AUTHORIZATION]
    own = (
        [] if runtime_api_key is None else [(_AUTHORIZATION, b"Bearer " + runtime_api_key.get_secret_value().encode())]
    )
    headers[:] = others + own
