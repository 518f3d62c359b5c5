"""The console: a page that uses the service's own API from a browser."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from winnow_service.console.files import INDEX, page_files
from winnow_service.errors import ServiceError
from winnow_service.routers.conditional import IfNoneMatch, is_known

# Nothing here needs a key, and nothing here is secret: what the page shows it asks of the API, with its user's key.
router = APIRouter(include_in_schema=False)

# Text of prompts, answers and names cannot become a script: there is no inline script or style, and no HTML is parsed.
_CONTENT_SECURITY_POLICY: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_HEADERS: Final = {
    # Asked for anew each time, and answered with 304: a new version of the service never meets an old module.
    "cache-control": "no-cache",
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _CONTENT_SECURITY_POLICY.items()),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@router.get("/console")
async def console(if_none_match: IfNoneMatch = None) -> Response:
    """Return the page."""
    return _answer(INDEX, if_none_match)


@router.get("/console/{path:path}")
async def console_file(path: str, if_none_match: IfNoneMatch = None) -> Response:
    """Return a file of the page."""
    # Addresses in the page are relative to the one without the slash.
    return _answer(path, if_none_match) if path else RedirectResponse("../console", 308)


def _answer(path: str, if_none_match: str | None) -> Response:
    file = page_files().get(path)
    if file is None:
        raise ServiceError("not_found", what=f"file {path!r} in the console")
    headers = {"etag": file.etag, **_HEADERS}
    if is_known(file.etag, if_none_match):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
