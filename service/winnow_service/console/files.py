"""The files of the console's page, read once. Only what is here can be asked for: no path is ever joined to another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

INDEX: Final = "index.html"
PAGE: Final = Path(__file__).parent / "page"
# Licences have no suffix.
_MEDIA_TYPES: Final = {
    "": "text/plain; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}


class PageFile(NamedTuple):
    """A file as it is served.

    Attributes:
        etag: of its content, in quotation marks.
    """

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Every file of the page, by its path below ``page/``."""
    paths = (path for path in PAGE.rglob("*") if path.is_file())
    return MappingProxyType({path.relative_to(PAGE).as_posix(): _read(path) for path in paths})


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
