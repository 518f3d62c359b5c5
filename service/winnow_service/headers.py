"""Names and forms of HTTP headers that several rooms share."""

from __future__ import annotations

from typing import Final

REQUEST_ID_HEADER: Final = "x-request-id"

# Names and values, as they are on the wire: a value may be of any encoding.
RawHeaders = list[tuple[bytes, bytes]]
