"""``winnow serve``: the service alone, in front of a runtime that runs elsewhere."""

from __future__ import annotations

from typing import Annotated, NoReturn, get_args

import typer
from pydantic import SecretStr, ValidationError

from winnow_service.cli.terminal import HostOption, PortOption, fail
from winnow_service.server import StartRefused, run
from winnow_service.settings import Settings


def serve(
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    runtime_urls: Annotated[
        list[str] | None,
        typer.Option(
            "--runtime-url",
            help="Address of the SGLang server, or of a balancer in front of several [default: WINNOW_RUNTIME_URL or "
            "port 30000].",
        ),
    ] = None,
) -> None:
    """Run the service alone. It stays up, and says that it is not ready, while its runtime is away.

    Without any API key it answers everybody, on this machine only.
    """
    try:
        # Several are refused as one that is a list.
        given = {} if runtime_urls is None else {"runtime_url": ",".join(runtime_urls)}
        settings = Settings.model_validate(given)
    except ValidationError as error:
        refuse(error)
    try:
        run(settings, host, port)
    except StartRefused as error:
        fail(error, 2)


def refuse(error: ValidationError) -> NoReturn:
    """End the command, and say which settings are wrong, without the values of those that are secret."""
    for problem in error.errors():
        field = ".".join(map(str, problem["loc"])) or "runtime_url"
        known = Settings.model_fields.get(field)
        is_secret = known is not None and SecretStr in (known.annotation, *get_args(known.annotation))
        # An address may have a password in it, which is what may be wrong with it.
        got = "" if is_secret or field == "runtime_url" else f" (got {problem['input']!r})"
        typer.echo(f"error: {field}: {problem['msg']}{got}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(serve)
