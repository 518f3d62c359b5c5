"""Policies as clients write and read them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, from_json

from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service.policies.names import POLICY_NAME
from winnow_service.policies.registry import NamedPolicy
from winnow_service.store.documents import Document


class Strict(BaseModel):
    """What clients write: nothing else, and nothing converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class _DescribedAsPolicy:
    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(AttentionPolicy.__pydantic_core_schema__)


_NEVER_WRITTEN: Final = {"revision": None, "updated_at": None, "updated_by": None}

# Checked by the one parser of policies, whose errors name the field and its bound.
Inline = Annotated[dict[str, Any], _DescribedAsPolicy()]


class PolicySettings(Strict):
    """What a PUT of a policy says. ``attention`` is what a request would have there."""

    attention: Inline
    description: Annotated[str, Field(max_length=500)] = ""


class PolicyQuestion(Strict):
    """What a request would ask for: a policy, or the name of one."""

    attention: Inline | Annotated[str, Field(pattern=POLICY_NAME)]


class PolicyResource(BaseModel):
    """A policy by its name.

    Attributes:
        attention: with every default filled in.
        preset: whether it has been there from the start; then it has no revisions.
        fingerprint: tells policies apart, whatever they are called.
        warnings: what a client should know who uses it.
    """

    name: str
    attention: Inline
    description: str
    preset: bool
    revision: int | None
    fingerprint: str
    warnings: list[str]
    updated_at: datetime | None
    updated_by: str | None

    @classmethod
    def of(cls, policy: NamedPolicy) -> PolicyResource:
        document = policy.document
        return cls(
            name=policy.name,
            attention=from_json(policy.attention.canonical()),
            description=policy.description,
            preset=document is None,
            fingerprint=policy.attention.fingerprint(),
            warnings=policy.attention.warnings(),
            **(_NEVER_WRITTEN if document is None else document.written),
        )


class PolicyList(BaseModel):
    """Presets first, then by name."""

    policies: list[PolicyResource]


class PolicyAnswer(BaseModel):
    """What a request's policy would become.

    Attributes:
        checked_against_model: whether the runtime could be asked what it serves; if not, it may still refuse.
    """

    attention: Inline
    fingerprint: str
    warnings: list[str]
    checked_against_model: bool


class PolicyRevision(BaseModel):
    """One state of a policy; ``attention`` is null for a deletion."""

    revision: int
    attention: Inline | None
    description: str | None
    updated_at: datetime
    updated_by: str

    @classmethod
    def of(cls, document: Document) -> PolicyRevision:
        value = document.value or {}
        return cls(attention=value.get("attention"), description=value.get("description"), **document.written)


class PolicyRevisions(BaseModel):
    """The newest first."""

    name: str
    revisions: list[PolicyRevision]


class DefaultSettings(Strict):
    """What a PUT of a default says: the name of a policy."""

    policy: Annotated[str, Field(pattern=POLICY_NAME)]


class DefaultResource(BaseModel):
    """The policy of a model's requests that ask for none."""

    model: str
    policy: str
    revision: int
    updated_at: datetime
    updated_by: str

    @classmethod
    def of(cls, document: Document) -> DefaultResource:
        return cls(model=document.name, policy=(document.value or {})["policy"], **document.written)


class DefaultList(BaseModel):
    """By name of the model."""

    defaults: list[DefaultResource]
