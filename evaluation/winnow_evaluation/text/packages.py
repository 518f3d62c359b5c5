"""The packages that the text comes from: ``packages.json``, which names each by version, licence and SHA-256."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Final, Literal

from pydantic import TypeAdapter

from winnow_evaluation.text.documents import Kind

Registry = Literal["debian", "pypi"]
Form = Literal["html", "text", "source"]

_EXTRACTION: Final = 1
"""Raise it when the same package gives other documents than before."""


@dataclass(frozen=True)
class Package:
    """One package, and what of it is read.

    Attributes:
        name, version: as the registry has them.
        licence: in SPDX's words.
        sha256: of the package's file.
        form: what the files hold.
        include: patterns of paths, of which one must match; ``*`` matches slashes too.
        exclude: patterns of which none may.
        characters: the most that is kept.
    """

    registry: Registry
    name: str
    version: str
    licence: str
    sha256: str
    kind: Kind
    form: Form
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    characters: int | None = None

    @property
    def label(self) -> str:
        """Name and version, for people."""
        return f"{self.name} {self.version}"

    @property
    def digest(self) -> str:
        """What the documents of this package depend on, as 16 hexadecimal digits."""
        described = json.dumps([_EXTRACTION, asdict(self) | {"licence": None}], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def reads(self, path: str) -> bool:
        """Whether the file at ``path`` in the package is read."""
        return any(fnmatchcase(path, pattern) for pattern in self.include) and not any(
            fnmatchcase(path, pattern) for pattern in self.exclude
        )


@cache
def listed_packages() -> tuple[Package, ...]:
    """Return the packages of ``packages.json`` in its order."""
    listed = (resources.files(__package__) / "packages.json").read_bytes()
    return TypeAdapter(tuple[Package, ...]).validate_json(listed)
