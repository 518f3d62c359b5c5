"""What routes need of the application they belong to."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from winnow_service.forwarding import Forwarder


def _forwarder(request: Request) -> Forwarder:
    return cast(Forwarder, request.app.state.forwarder)


ForwarderDependency = Annotated[Forwarder, Depends(_forwarder)]
