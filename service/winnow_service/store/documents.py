"""What a store holds, and the interface that every store has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from winnow_service.errors import ServiceError

# Older revisions of a document are dropped.
KEPT_REVISIONS: Final = 100

# What a write expects to find: a revision, no document, or one at whatever revision.
Expected = int | Literal["absent", "present"]


@dataclass(frozen=True)
class Document:
    """One state of a document.

    Attributes:
        revision: 1 for the first state of this name; goes on after a deletion, so that no two states share one.
        version: the store's, after this write: every write of any document has a higher one.
        value: what was written, as JSON has it; None if the document was deleted.
        updated: seconds since 1970.
        author: who wrote it.
    """

    collection: str
    name: str
    revision: int
    version: int
    value: dict[str, Any] | None
    updated: float
    author: str

    @property
    def etag(self) -> str:
        return f'"{self.revision}"'

    @property
    def written(self) -> dict[str, Any]:
        """Revision, time and author, as operators see them."""
        at = datetime.fromtimestamp(self.updated, UTC)
        return {"revision": self.revision, "updated_at": at, "updated_by": self.author}


@dataclass(frozen=True)
class Changes:
    """What a store holds at ``version``: all of it if ``complete``, else what was written since another."""

    version: int
    documents: Sequence[Document]
    complete: bool


class Store(ABC):
    """Documents by collection and name. Every method may raise StoreUnavailable."""

    @abstractmethod
    async def changes(self, since: int) -> Changes:
        """Return what was written after version ``since``, deletions included.

        Complete when ``since`` is 0, or when the store may have lost writes that this process has seen.
        """

    @abstractmethod
    async def write(
        self, collection: str, name: str, value: dict[str, Any] | None, expected: Expected, author: str
    ) -> Document:
        """Write a document, or delete it if ``value`` is None, if it is as ``expected``.

        Once this returns, the write survives a crash as far as the store can promise that.

        Raises:
            Conflict: it is not as expected; nothing was written.
            StoreUnavailable: whether it was written is not known, unless the message says so.
        """

    @abstractmethod
    async def revisions(self, collection: str, name: str) -> list[Document]:
        """Return the last states of a document, the newest first; empty if there never was one."""

    @abstractmethod
    async def wait_for_change(self, timeout_seconds: float) -> None:
        """Return when something may have been written, by whatever process, at the latest after ``timeout_seconds``."""

    @abstractmethod
    async def close(self) -> None: ...


class Conflict(ServiceError):
    """A document is not as a write expects it. The answer has the ETag of what is there, if anything is."""

    def __init__(self, current: Document | None, problem: str | None = None) -> None:
        if current is None or current.value is None:
            super().__init__("precondition_failed", problem=problem or "It does not exist.")
        else:
            changed = f"The current revision is {current.revision}: it was changed since you read it."
            super().__init__("precondition_failed", headers={"etag": current.etag}, problem=problem or changed)
        self.current = current


def as_expected(current: Document | None, expected: Expected) -> bool:
    """Whether ``current``, the last state of a document, is what a write expects."""
    exists = current is not None and current.value is not None
    match expected:
        case "absent":
            return not exists
        case "present":
            return exists
        case revision:
            return current is not None and exists and current.revision == revision
