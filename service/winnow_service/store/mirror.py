"""A copy of the store in memory: what requests read, also while the store is away."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from winnow_service.errors import StoreUnavailable
from winnow_service.store.documents import Changes, Document, Expected, Store

logger = logging.getLogger(__name__)

# A change in another process is seen after this at the latest, and sooner where the store tells of it.
CHECK_SECONDS = 0.25
# Many changes in a row are fetched together.
_GATHER_SECONDS = 0.01


@dataclass(frozen=True)
class StoreState:
    """Whether policies and keys can be written, and what was last known is up to date; if not, why."""

    healthy: bool
    reason: str


class Mirror:
    """Holds the last known state of ``store`` while ``run`` runs.

    Attributes:
        loaded: whether there is a state: the store has been read at least once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._documents: dict[tuple[str, str], Document] = {}
        self._version = 0
        # Written here while a fetch was under way: a fetch that began earlier does not have them.
        self._written: list[Document] = []
        self._collections: set[str] = set()
        self._read_at = -math.inf
        self.loaded = False
        self.health = StoreState(healthy=False, reason="The store has not been read yet.")

    async def run(self) -> None:
        """Follow the store for ever; ends when cancelled."""
        own = asyncio.current_task()
        assert own is not None
        try:
            # A cancellation that meets a time-out inside redis-py is taken for the time-out.
            while not own.cancelling():
                await self._follow()
        finally:
            self.health = StoreState(healthy=False, reason="The store is not followed any more.")

    async def _follow(self) -> None:
        try:
            await self.refresh()
            await self._store.wait_for_change(CHECK_SECONDS)
            await asyncio.sleep(_GATHER_SECONDS)
        except StoreUnavailable as error:
            self._note(StoreState(healthy=False, reason=error.message))
            await asyncio.sleep(CHECK_SECONDS)

    async def refresh(self) -> None:
        """Fetch what was written since the last time.

        Raises:
            StoreUnavailable: the state stays as it was.
        """
        self._written.clear()
        self._apply(await self._store.changes(self._version))
        self._read_at = time.monotonic()
        self.loaded = True
        self._note(StoreState(healthy=True, reason="The store answers."))

    @property
    def age_seconds(self) -> float:
        """Since the store was last read; infinite if it never was."""
        return time.monotonic() - self._read_at

    def get(self, collection: str, name: str) -> Document | None:
        """The last known state of a document; None if there is none."""
        document = self._documents.get((collection, name))
        return None if document is None or document.value is None else document

    def all(self, collection: str) -> list[Document]:
        """The documents of a collection, in the order of their names."""
        return sorted(self._those(collection), key=lambda document: document.name)

    def any(self, collection: str, holds: Callable[[Document], bool]) -> Document | None:
        """A document of a collection of which ``holds`` is true."""
        return next((document for document in self._those(collection) if holds(document)), None)

    def has_had(self, collection: str) -> bool:
        """Whether a document of this collection exists, or was ever seen to."""
        return collection in self._collections

    async def write(
        self, collection: str, name: str, value: dict[str, Any] | None, expected: Expected, author: str
    ) -> Document:
        """Write through to the store, and see the change here at once. Raises as ``Store.write`` does."""
        document = await self._store.write(collection, name, value, expected, author)
        self._put(document)
        self._written.append(document)
        return document

    async def revisions(self, collection: str, name: str) -> list[Document]:
        """The last states of a document, from the store itself."""
        return await self._store.revisions(collection, name)

    def _those(self, collection: str) -> Iterator[Document]:
        return (
            document
            for (its, _), document in self._documents.items()
            if its == collection and document.value is not None
        )

    def _apply(self, changes: Changes) -> None:
        if changes.complete:
            self._documents = {}
        for document in changes.documents:
            self._put(document)
        for document in self._written:
            self._put(document)
        self._version = changes.version

    def _put(self, document: Document) -> None:
        at = (document.collection, document.name)
        known = self._documents.get(at)
        if known is None or known.version < document.version:
            self._documents[at] = document
        self._collections.add(document.collection)

    def _note(self, health: StoreState) -> None:
        if health != self.health:
            logger.log(logging.INFO if health.healthy else logging.WARNING, "Store: %s", health.reason)
        self.health = health
