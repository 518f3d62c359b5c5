"""Making, changing and revoking keys."""

from __future__ import annotations

from winnow_service.errors import InvalidField, InvalidPolicy, StoreUnavailable
from winnow_service.keys.records import KEYS, CreatedKey, KeyRecord, KeyResource, KeySettings, Scope, now
from winnow_service.keys.tokens import digest, new_token
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.store.documents import Document, Expected
from winnow_service.store.mirror import Mirror


class KeyAdministration:
    """Writes keys to the store.

    Args:
        author: who does it.
    """

    def __init__(self, mirror: Mirror, registry: PolicyRegistry, author: str) -> None:
        self._mirror = mirror
        self._registry = registry
        self._author = author

    async def create(self, settings: KeySettings, *, must_administer: bool) -> tuple[Document, CreatedKey]:
        """Make a key. What is returned is the only thing that ever has its token.

        Args:
            must_administer: refuse a key without the scope ``admin``: it would shut out everybody.

        Raises:
            InvalidField: the key cannot be as ``settings`` say.
            StoreUnavailable: the store did not take it.
        """
        if must_administer and Scope.ADMIN not in settings.scopes:
            raise InvalidField(
                "scopes", "must have admin: this is the first key, and from now on all requests need one"
            )
        self._check(settings)
        token = new_token()
        record = KeyRecord(**settings.model_dump(), digest=digest(token.text), created_at=now())
        document = await self._mirror.write(KEYS, token.key_id, record.model_dump(mode="json"), "absent", self._author)
        return document, CreatedKey(**resource(document).model_dump(), key=token.text)

    async def change(self, document: Document, settings: KeySettings, expected: Expected) -> Document:
        """Replace everything of the key in ``document`` but its token. Raises as ``create`` does, and Conflict."""
        self._check(settings)
        known = KeyRecord.of(document)
        record = KeyRecord(**settings.model_dump(), digest=known.digest, created_at=known.created_at)
        return await self._mirror.write(KEYS, document.name, record.model_dump(mode="json"), expected, self._author)

    async def revoke(self, key_id: str, expected: Expected) -> None:
        """Delete a key: its token is refused from now on. Raises Conflict and StoreUnavailable."""
        await self._mirror.write(KEYS, key_id, None, expected, self._author)

    def _check(self, settings: KeySettings) -> None:
        if settings.expires_at is not None and settings.expires_at <= now():
            raise InvalidField("expires_at", "must be in the future")
        if settings.default_policy is None:
            return
        try:
            self._registry.named(settings.default_policy, "default_policy")
        except InvalidPolicy as error:
            raise InvalidField(error.path, error.problem) from None


def readable_keys(mirror: Mirror) -> tuple[list[KeyResource], list[str]]:
    """Return what operators see of all keys, and the ids of those that this version of the service cannot read."""
    readable, unreadable = [], []
    for document in mirror.all(KEYS):
        try:
            readable.append(resource(document))
        except StoreUnavailable:
            unreadable.append(document.name)
    return readable, unreadable


def resource(document: Document) -> KeyResource:
    """Return what operators see of the key in ``document``."""
    settings = KeyRecord.of(document).model_dump(exclude={"digest"})
    return KeyResource(**settings, id=document.name, **document.written)
