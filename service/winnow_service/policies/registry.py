"""Which policy a name stands for now."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_kernels.policies.registry import DECODE_POLICIES
from winnow_service.errors import InvalidPolicy
from winnow_service.policies.names import ANY_MODEL, POLICY_NAME_IN_WORDS, is_policy_name
from winnow_service.policies.presets import BUILT_IN
from winnow_service.store.documents import Document
from winnow_service.store.mirror import Mirror

logger = logging.getLogger(__name__)

POLICIES: Final = "policies"
DEFAULTS: Final = "defaults"
_FIELD: Final = "attention"
_UNREADABLE: Final = "unreadable"

# Returns the policy of a name, or raises InvalidPolicy.
Named = Callable[[str], AttentionPolicy]


@dataclass(frozen=True)
class NamedPolicy:
    """A policy and its name.

    Attributes:
        document: where it is kept; None for a preset.
    """

    name: str
    attention: AttentionPolicy
    description: str
    document: Document | None


class PolicyRegistry:
    """Reads policies from the last known state of the store. A request asks once, and keeps what it got."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        # Reading a policy takes longer than looking it up: what was read is kept by name and revision.
        self._read: dict[str, NamedPolicy] = {}

    def get(self, name: str) -> NamedPolicy | None:
        """Return the policy of that name; None if there is none.

        Raises:
            InvalidPolicy: there is one, but this version of the service cannot serve it.
        """
        if (preset := BUILT_IN.get(name)) is not None:
            return NamedPolicy(name, preset.attention, preset.description, None)
        document = self._mirror.get(POLICIES, name)
        if document is None:
            self._read.pop(name, None)
            return None
        return self._of(document)

    def named(self, name: str, path: str = _FIELD) -> AttentionPolicy:
        """Return the policy of that name.

        Args:
            path: the field that names it.

        Raises:
            InvalidPolicy: there is none.
        """
        if not is_policy_name(name):
            raise InvalidPolicy(path, f"must be an object, or the name of a policy: {POLICY_NAME_IN_WORDS}")
        found = self.get(name)
        if found is None:
            kind = f', and {{"decode": {{"policy": "{name}"}}}} asks for that kind' if name in DECODE_POLICIES else ""
            raise InvalidPolicy(path, f"there is no policy {name!r}; GET /v1/policies lists them{kind}")
        return found.attention

    def all(self) -> Iterator[NamedPolicy]:
        """Every policy that can be served, by name: presets first."""
        for name, preset in BUILT_IN.items():
            yield NamedPolicy(name, preset.attention, preset.description, None)
        for document in self._mirror.all(POLICIES):
            try:
                yield self._of(document)
            except InvalidPolicy as error:
                logger.warning("%s", error.message)

    def count_stored(self) -> Counter[str]:
        """Return how many policies are in the store, by decode policy; what cannot be served is ``unreadable``."""
        counted: Counter[str] = Counter()
        for document in self._mirror.all(POLICIES):
            try:
                counted[self._of(document).attention.decode.policy] += 1
            except InvalidPolicy:
                counted[_UNREADABLE] += 1
        return counted

    def default_for(self, model: object) -> str | None:
        """Return the name of the policy for requests to ``model`` that ask for none; None for dense attention."""
        for name in (model, ANY_MODEL):
            if isinstance(name, str) and (document := self._mirror.get(DEFAULTS, name)) is not None:
                return str(_value(document)["policy"])
        return None

    def _of(self, document: Document) -> NamedPolicy:
        read = self._read.get(document.name)
        if read is None or read.document is not document:
            read = self._read[document.name] = read_stored(document)
        return read


def read_policy(asked: object, named: Named) -> AttentionPolicy:
    """Return the policy that a request gives, or names.

    Raises:
        InvalidPolicy: it cannot be served, or there is none of that name.
    """
    if isinstance(asked, str):
        return named(asked)
    try:
        return parse_policy(asked if isinstance(asked, dict) else json.dumps(asked))
    except PolicyError as error:
        raise InvalidPolicy(error.path, error.problem) from None


def _value(document: Document) -> dict[str, Any]:
    assert document.value is not None
    return document.value


def read_stored(document: Document) -> NamedPolicy:
    """Return the policy in a document. Raises as ``PolicyRegistry.get`` does."""
    value = _value(document)
    try:
        return NamedPolicy(document.name, parse_policy(value[_FIELD]), value.get("description", ""), document)
    except PolicyError as error:
        raise InvalidPolicy(error.path, f"{error.problem} (in the stored policy {document.name!r})") from None
