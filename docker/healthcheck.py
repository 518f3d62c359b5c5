#!/usr/bin/env python3
"""Exit with 0 if the address given answers with status 200, else with 1: the images have no curl."""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 10


def main() -> None:
    """Ask the address that is the one argument."""
    address = urlsplit(sys.argv[1])
    connection = http.client.HTTPConnection(address.netloc, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", address.path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"no answer: {error}")
    if status != http.client.OK:
        sys.exit(f"status {status}")


if __name__ == "__main__":
    main()
