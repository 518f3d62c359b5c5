"""Who sends a request, and whether the key allows it. Checked before anything else of the request is read."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes

from winnow_service.errors import ServiceError
from winnow_service.keys.keyring import ANYONE, Caller, Keyring
from winnow_service.keys.records import Scope
from winnow_service.proxy.request_facts import request_facts
from winnow_service.settings import Settings

_AUTHORIZATION = b"authorization"

_bearer = HTTPBearer(
    auto_error=False, scheme_name="key", description="A key of the service. Not needed as long as there is none."
)
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


async def authorize(request: Request, needed: SecurityScopes, credentials: _Credentials) -> Caller:
    """Return who sends ``request``.

    Raises:
        ServiceError: there is no valid key, or it does not have a scope that is ``needed``.
        StoreUnavailable: the keys have not been read yet.
    """
    keyring = cast(Keyring, request.app.state.keyring)
    if keyring.is_open:
        return ANYONE
    caller = keyring.caller(None if credentials is None else credentials.credentials)
    for scope in needed.scopes:
        if scope not in caller.scopes:
            raise ServiceError("scope_missing", scope=scope)
    request_facts(request.scope).key_id = caller.id
    # The key is for the service: the runtime gets its own, or none. In place, because the request has read its headers.
    headers: list[tuple[bytes, bytes]] = request.scope["headers"]
    headers[:] = [(name, value) for name, value in headers if name != _AUTHORIZATION]
    if (own := settings_of(request).runtime_api_key) is not None:
        headers.append((_AUTHORIZATION, b"Bearer " + own.get_secret_value().encode()))
    return caller


async def _authorize_scraper(request: Request, credentials: _Credentials) -> Caller:
    if settings_of(request).metrics_public:
        return ANYONE
    return await authorize(request, SecurityScopes([Scope.READ]), credentials)


# The caller, whose key must have the scope.
Infers = Annotated[Caller, Security(authorize, scopes=[Scope.INFER.value])]
Reads = Annotated[Caller, Security(authorize, scopes=[Scope.READ.value])]
Administers = Annotated[Caller, Security(authorize, scopes=[Scope.ADMIN.value])]
Scrapes = Annotated[Caller, Security(_authorize_scraper, scopes=[Scope.READ.value])]


def settings_of(request: Request) -> Settings:
    """The settings of the service that got ``request``."""
    return cast(Settings, request.app.state.settings)
