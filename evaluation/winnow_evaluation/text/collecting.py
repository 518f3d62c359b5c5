"""Collects the text of all packages into one folder; what was done is not done again."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from winnow_evaluation.text.documents import (
    KINDS,
    SPLITS,
    Document,
    TextError,
    read_lines,
    write_collection,
    write_lines,
)
from winnow_evaluation.text.packages import Package

_PACKAGES: Final = "packages"


def collect(packages: Sequence[Package], folder: Path) -> Iterator[Package]:
    """Fetch and read each package that ``folder`` does not hold yet, then write the collection; gives what is done.

    Raises:
        TextError: a package cannot be fetched or read. Those before it are kept, and the next call goes on.
    """
    kept = folder / _PACKAGES
    kept.mkdir(parents=True, exist_ok=True)
    for package in packages:
        if not _file(kept, package).is_file():
            _write(_file(kept, package), _fetched(package))
        yield package
    documents = list(_distinct(document for package in packages for document in _read(_file(kept, package))))
    write_collection(folder, documents, describe(packages, documents))


def describe(packages: Sequence[Package], documents: Sequence[Document]) -> Mapping[str, Any]:
    """Say what a collection is made of, and how much it is."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.kind}/{document.source}/{document.name}\n{document.text}\n".encode())
    return {
        "sha256": digest.hexdigest(),
        "packages": [package.label for package in packages],
        "totals": [
            {
                "kind": kind,
                "split": split,
                "documents": len(chosen),
                "long_documents": sum(document.long for document in chosen),
                "characters": sum(len(document.text) for document in chosen),
            }
            for kind in KINDS
            for split in SPLITS
            for chosen in [[document for document in documents if (document.kind, document.split) == (kind, split)]]
        ],
    }


def is_fetched(package: Package, folder: Path) -> bool:
    """Whether a package's text is in ``folder``."""
    return _file(folder / _PACKAGES, package).is_file()


def _fetched(package: Package) -> list[Document]:
    try:
        from winnow_evaluation.text.assembling import documents_of  # noqa: PLC0415 - lxml is in an extra
    except ModuleNotFoundError as error:
        raise TextError(f"{error.name} is not installed: pip install 'sglang-winnow[evaluation]'") from error
    from winnow_evaluation.text.registries import fetch, files_of  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="winnow-text-") as scratch:
        documents = documents_of(package, files_of(package, fetch(package, Path(scratch))))
    if not documents:
        raise TextError(f"{package.label}: no file of the package matches what the list says is read")
    return documents


def _distinct(documents: Iterable[Document]) -> Iterator[Document]:
    """Give the documents without those whose text an earlier one has."""
    seen: set[bytes] = set()
    for document in documents:
        digest = hashlib.sha256(document.text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def _file(folder: Path, package: Package) -> Path:
    return folder / f"{package.name}-{package.digest}.jsonl"


def _write(path: Path, documents: Iterable[Document]) -> None:
    draft = path.with_suffix(".part")
    with draft.open("w", encoding="utf-8") as file:
        write_lines(file, documents)
    draft.replace(path)


def _read(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as lines:
        yield from read_lines(lines)
