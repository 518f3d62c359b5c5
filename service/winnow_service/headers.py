"""Names and forms of HTTP headers that several rooms share."""

from __future__ import annotations

from typing import Final

REQUEST_ID_HEADER: Final = "x-request-id"
# By which a balancer between the service and several runtimes sends alike prompts to one of them.
PREFIX_HEADER: Final = b"x-winnow-prefix"
# By which that balancer says that an answer comes from one of several.
RUNTIME_HEADER: Final = b"x-winnow-runtime"

# Names and values, as they are on the wire: a value may be of any encoding.
RawHeaders = list[tuple[bytes, bytes]]
