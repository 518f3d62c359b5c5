"""What is kept of a key, and what operators see and set of it."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from winnow_service.errors import StoreUnavailable
from winnow_service.limits.limiter import Limits
from winnow_service.policies.bounds import Bounds
from winnow_service.policies.names import POLICY_NAME
from winnow_service.store.documents import Document

KEYS: Final = "keys"
_LATEST: Final = datetime(3000, 1, 1, tzinfo=UTC)


class Scope(StrEnum):
    """What a key is for. None includes another."""

    INFER = "infer"
    READ = "read"
    ADMIN = "admin"


def _may_repeat(schema: dict[str, Any]) -> None:
    del schema["uniqueItems"]


class KeySettings(BaseModel):
    """What an operator sets of a key.

    Attributes:
        name: for people; several keys may share one.
        expires_at: with its offset from UTC; null for never.
        default_policy: for requests that ask for none; null for the default of the model.
        bounds: on the policies of its requests; null for none.
        limits: on what it may use; null for none.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]
    scopes: Annotated[frozenset[Scope], Field(min_length=1, json_schema_extra=_may_repeat)]
    expires_at: Annotated[AwareDatetime, Field(lt=_LATEST)] | None = None
    default_policy: Annotated[str, Field(pattern=POLICY_NAME)] | None = None
    bounds: Bounds | None = None
    limits: Limits | None = None


class KeyRecord(KeySettings):
    """A key as it is stored: with the digest of its token."""

    digest: str
    created_at: AwareDatetime

    @classmethod
    def of(cls, document: Document) -> Self:
        """Read a key.

        Raises:
            StoreUnavailable: it has what this version of the service does not know, and must not pass over.
        """
        try:
            return cls.model_validate_json(to_json(document.value))
        except ValidationError:
            raise StoreUnavailable(f"the key {document.name} was written by another version of Winnow") from None

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class KeyResource(KeySettings):
    """A key as operators see it."""

    id: str
    revision: int
    created_at: AwareDatetime
    updated_at: AwareDatetime
    updated_by: str


class CreatedKey(KeyResource):
    """A key that has just been made.

    Attributes:
        key: what a client sends. It cannot be shown again.
    """

    key: str


def now() -> datetime:
    """Return the time by which keys expire."""
    return datetime.now(UTC)
