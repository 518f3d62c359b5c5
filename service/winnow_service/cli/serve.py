"""``winnow serve``: the service alone, in front of a runtime that runs elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import AnyHttpUrl, ValidationError

from winnow_service.server import run
from winnow_service.settings import Settings


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    runtime_url: Annotated[
        str | None, typer.Option(help="Address of the SGLang server [default: WINNOW_RUNTIME_URL or port 30000].")
    ] = None,
) -> None:
    """Run the service alone. It stays up, and says that it is not ready, while the runtime is away."""
    try:
        settings = Settings() if runtime_url is None else Settings(runtime_url=AnyHttpUrl(runtime_url))
    except ValidationError as error:
        for problem in error.errors():
            field = ".".join(map(str, problem["loc"])) or "runtime_url"
            typer.echo(f"error: {field}: {problem['msg']} (got {problem['input']!r})", err=True)
        raise typer.Exit(2) from None
    run(settings, host, port)


if __name__ == "__main__":
    typer.run(serve)
