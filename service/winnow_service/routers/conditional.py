"""ETag, If-Match and If-None-Match: two operators do not overwrite each other unseen."""

from __future__ import annotations

import re
from typing import Annotated, Final

from fastapi import Header, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from winnow_service.errors import InvalidField, ServiceError
from winnow_service.store.documents import Conflict, Document, Expected

# RFC 9110, section 8.8.3. Ours are the revision in quotation marks.
_ETAG_TEXT: Final = r'(W/)?"[!#-~]*"'
_ETAG: Final = re.compile(r'(W/)?"([!#-~]*)"')
_REVISION: Final = re.compile(r"[1-9][0-9]{0,14}")

_ONE_OR_MORE: Final = rf"^(\*|{_ETAG_TEXT}([ \t]*,[ \t]*{_ETAG_TEXT})*)$"

IfMatch = Annotated[
    Annotated[str, Field(pattern=_ONE_OR_MORE)] | SkipJsonSchema[None],
    Header(description="The ETag of the state to replace or delete; `*` for whatever is there."),
]
IfNoneMatch = Annotated[str | SkipJsonSchema[None], Header(description="The ETags of states already known.")]
IfNoneMatchAny = Annotated[
    Annotated[str, Field(pattern=r"^\*$")] | SkipJsonSchema[None],
    Header(alias="if-none-match", description="`*`: only if there is none of that name yet."),
]


def expected_by_put(if_match: str | None, if_none_match: str | None, current: Document | None) -> Expected:
    """Return what a PUT expects to find. Without a condition it is a new document.

    Args:
        current: the last known state, to tell which of several ETags is meant.

    Raises:
        InvalidField: the conditions contradict each other.
        ServiceError: what they ask for cannot be.
    """
    if if_none_match is not None:
        if if_match is not None:
            raise InvalidField("If-None-Match", "must be absent where If-Match is given")
        return "absent"
    return "absent" if if_match is None else expected_by_match(if_match, current)


def expected_by_match(if_match: str, current: Document | None) -> Expected:
    """Return what ``If-Match`` expects to find. Raises as ``expected_by_put`` does."""
    if if_match.strip() == "*":
        return "present"
    revisions = [int(tag) for weak, tag in _ETAG.findall(if_match) if not weak and _REVISION.fullmatch(tag)]
    if not revisions:
        raise Conflict(current, "If-Match names no revision.")
    return current.revision if current is not None and current.revision in revisions else revisions[0]


def without_condition(what: str, conflict: Conflict, if_match: str | None, if_none_match: str | None) -> Exception:
    """Return the error for a write that met another state than it expected."""
    if if_match is None and if_none_match is None and conflict.current is not None:
        return already_exists(what, conflict.current.etag)
    if if_none_match is not None and conflict.current is not None:
        return Conflict(conflict.current, f"{what} exists.")
    return conflict


def already_exists(what: str, etag: str) -> ServiceError:
    """Return the error for a request that does not say which state of ``what`` it would replace."""
    return ServiceError("precondition_required", param="If-Match", what=what, etag=etag)


def answer(content: object, etag: str, if_none_match: str | None) -> Response:
    """Return ``content``, or 304 if the client knows it."""
    headers = {"etag": etag}
    if is_known(etag, if_none_match):
        return Response(status_code=304, headers=headers)
    return JSONResponse(content, headers=headers)


def is_known(etag: str, if_none_match: str | None) -> bool:
    """Whether ``if_none_match`` says that the client has the state with this ``etag``."""
    if if_none_match is None:
        return False
    # This comparison is weak, and what cannot be read matches nothing.
    return if_none_match.strip() == "*" or etag.strip('"') in {tag for _, tag in _ETAG.findall(if_none_match)}
