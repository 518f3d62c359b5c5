"""From the token of a request to who sends it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from winnow_service.errors import ServiceError, StoreUnavailable
from winnow_service.keys.records import KEYS, KeyRecord, Scope, now
from winnow_service.keys.tokens import digest, key_id_of, matches
from winnow_service.limits.limiter import Limits
from winnow_service.policies.bounds import Bounds
from winnow_service.store.documents import Document
from winnow_service.store.mirror import Mirror


@dataclass(frozen=True)
class Caller:
    """Who sends a request, and what that allows.

    Attributes:
        id: of the key; the author of what the request writes.
    """

    id: str
    scopes: frozenset[Scope]
    default_policy: str | None = None
    bounds: Bounds | None = None
    limits: Limits | None = None


ANYONE: Final = Caller("open", frozenset(Scope))
_ADMINISTRATOR: Final = Caller("environment", frozenset(Scope))


class Keyring:
    """Knows the keys of the last known state of the store.

    Args:
        admin_key: a key of the operator's own, from the environment, with every scope.
        may_be_open: whether requests need no key as long as there has never been one.
    """

    def __init__(self, mirror: Mirror, admin_key: str | None, *, may_be_open: bool) -> None:
        self._mirror = mirror
        self._admin_digest = None if admin_key is None else digest(admin_key)
        self._may_be_open = may_be_open
        self._read: dict[str, tuple[Document, KeyRecord]] = {}

    @property
    def is_open(self) -> bool:
        """Whether requests need no key. Once a key has been seen it stays shut, also when the last one is revoked."""
        return (
            self._may_be_open and self._admin_digest is None and self._mirror.loaded and not self._mirror.has_had(KEYS)
        )

    def caller(self, token: str | None) -> Caller:
        """Return who sends ``token``.

        Raises:
            ServiceError: there is none, or it is not valid (now).
            StoreUnavailable: the keys have not been read yet.
        """
        if self.is_open:
            return ANYONE
        if token is None:
            raise ServiceError("missing_key")
        if matches(token, self._admin_digest):
            return _ADMINISTRATOR
        if not self._mirror.loaded:
            raise StoreUnavailable(self._mirror.health.reason.rstrip("."))
        key_id = key_id_of(token)
        record = None if key_id is None else self._record(key_id)
        if not matches(token, None if record is None else record.digest) or record is None or key_id is None:
            raise ServiceError("invalid_key", problem="The key is not valid: it is unknown or was revoked.")
        if record.is_expired(now()):
            raise ServiceError("invalid_key", problem="The key has expired.")
        return Caller(key_id, record.scopes, record.default_policy, record.bounds, record.limits)

    def count_by_state(self) -> Counter[str]:
        """Return how many keys are in the store: valid, expired, and unreadable for this version of the service."""
        counted = Counter(valid=0, expired=0, unreadable=0)
        at = now()
        for document in self._mirror.all(KEYS):
            try:
                record = self._record(document.name)
            except StoreUnavailable:
                counted["unreadable"] += 1
                continue
            counted["expired" if record is not None and record.is_expired(at) else "valid"] += 1
        return counted

    def _record(self, key_id: str) -> KeyRecord | None:
        document = self._mirror.get(KEYS, key_id)
        if document is None:
            self._read.pop(key_id, None)
            return None
        read = self._read.get(key_id)
        if read is None or read[0] is not document:
            read = self._read[key_id] = (document, KeyRecord.of(document))
        return read[1]
