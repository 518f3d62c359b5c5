"""``winnow keys``: API keys, straight in the store. Running services see what is done here within a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, TypeVar

import typer
from pydantic import ValidationError

from winnow_service.app import store_of
from winnow_service.cli.serve import refuse
from winnow_service.cli.terminal import fail
from winnow_service.errors import ServiceError
from winnow_service.keys.administration import KeyAdministration, readable_keys
from winnow_service.keys.records import KEYS, KeySettings, Scope, now
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.settings import Settings
from winnow_service.store.mirror import Mirror

app = typer.Typer(help="Make, list and revoke API keys in the store that WINNOW_STORE_URL names.", no_args_is_help=True)
_AUTHOR = "cli"

Result = TypeVar("Result")


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is; for people.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it is for; give it several times.", show_default="infer")
    ] = None,
    expires_in_days: Annotated[int | None, typer.Option(min=1, max=36_500, show_default="never")] = None,
) -> None:
    """Make a key and print it. It cannot be shown again."""
    try:
        settings = KeySettings(
            name=name,
            scopes=frozenset(scope or [Scope.INFER]),
            expires_at=None if expires_in_days is None else now() + timedelta(days=expires_in_days),
        )
    except ValidationError as error:
        refuse(error)

    async def made(mirror: Mirror) -> str:
        must_administer = not mirror.has_had(KEYS)
        _, created = await _administration(mirror).create(settings, must_administer=must_administer)
        return created.key

    typer.echo(_in_store(made))


@app.command("list")
def list_keys() -> None:
    """List the keys: id, scopes, expiry, name."""

    async def listed(mirror: Mirror) -> list[str]:
        lines = []
        readable, unreadable = readable_keys(mirror)
        for key in readable:
            expiry = "never" if key.expires_at is None else f"{key.expires_at:%Y-%m-%d}"
            lines.append(f"{key.id}  {','.join(sorted(key.scopes)):16}  {expiry:10}  {key.name}")
        return lines + [f"{key_id}  unreadable: written by another version" for key_id in unreadable]

    for line in _in_store(listed):
        typer.echo(line)


@app.command("revoke")
def revoke(key_id: Annotated[str, typer.Argument(help="The id, as `list` prints it.")]) -> None:
    """Revoke a key, for good."""

    async def revoked(mirror: Mirror) -> None:
        await _administration(mirror).revoke(key_id, "present")

    _in_store(revoked)


def _administration(mirror: Mirror) -> KeyAdministration:
    return KeyAdministration(mirror, PolicyRegistry(mirror), _AUTHOR)


def _in_store(work: Callable[[Mirror], Awaitable[Result]]) -> Result:
    async def run(settings: Settings) -> Result:
        store = store_of(settings)
        mirror = Mirror(store)
        try:
            await mirror.refresh()
            return await work(mirror)
        finally:
            await store.close()

    try:
        return asyncio.run(run(Settings()))
    except ValidationError as error:
        refuse(error)
    except ServiceError as error:
        fail(error.message)


if __name__ == "__main__":
    app()
