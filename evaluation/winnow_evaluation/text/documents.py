"""The documents that were collected: where they lie, and how they are read.

A file for each kind and split, ``prose-test.jsonl`` and so on, holds a document in each line. ``collection.json`` is
written last: a folder without it is not complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TextIO, get_args

from winnow_evaluation.writing import write_json

Kind = Literal["prose", "code"]
Split = Literal["train", "validation", "test"]

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
SPLITS: Final[tuple[Split, ...]] = get_args(Split)

LONG_CHARACTERS: Final = 131_072
"""A document of so many characters has 32K tokens or more, at four characters to a token."""

_PERCENT_VALIDATION: Final = 5
_PERCENT_TEST: Final = 15
_COLLECTION: Final = "collection.json"


class TextError(Exception):
    """Text that cannot be collected or read; the message says why in one sentence."""


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        name: its place in its package. With ``source`` it is the identity whose hash chooses the split.
        source: the package that it comes from, as its registry names it.
    """

    name: str
    source: str
    kind: Kind
    text: str

    @property
    def split(self) -> Split:
        """The part that it belongs to, in every version of its package."""
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        place = int.from_bytes(digest[:8]) % 100
        if place < _PERCENT_TEST:
            return "test"
        return "validation" if place < _PERCENT_TEST + _PERCENT_VALIDATION else "train"

    @property
    def long(self) -> bool:
        """Whether it fills 32K tokens by itself."""
        return len(self.text) >= LONG_CHARACTERS


def cache_folder() -> Path:
    """Where Winnow keeps what it has fetched: ``WINNOW_CACHE_DIR``, or ``winnow`` in the user's cache."""
    chosen = os.environ.get("WINNOW_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "winnow"


def text_folder() -> Path:
    """The folder of the collected text."""
    return cache_folder() / "text"


def load_text(split: Split, kind: Kind, folder: Path | None = None) -> tuple[Document, ...]:
    """Read the documents of one kind that fall into a split, always in the same order.

    Measure on ``test``, choose on ``validation``, train on ``train``.

    Args:
        folder: where the text lies; by default ``text_folder()``.

    Raises:
        TextError: no text has been collected there.
    """
    folder = folder or text_folder()
    collection(folder)
    with _shard(folder, kind, split).open(encoding="utf-8") as lines:
        return tuple(read_lines(lines))


def collection(folder: Path) -> Mapping[str, Any]:
    """Read what ``write_collection`` wrote of a collection as a whole.

    Raises:
        TextError: no text has been collected there.
    """
    try:
        read: Mapping[str, Any] = json.loads((folder / _COLLECTION).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TextError(f"no text in {folder}: run 'winnow text collect' first") from error
    return read


def write_collection(folder: Path, documents: Sequence[Document], about: Mapping[str, Any]) -> None:
    """Replace the collection in ``folder``, which is without one while the files are written."""
    (folder / _COLLECTION).unlink(missing_ok=True)
    for kind in KINDS:
        for split in SPLITS:
            with _shard(folder, kind, split).open("w", encoding="utf-8") as file:
                write_lines(file, (each for each in documents if (each.kind, each.split) == (kind, split)))
    write_json(folder / _COLLECTION, about)


def _shard(folder: Path, kind: Kind, split: Split) -> Path:
    return folder / f"{kind}-{split}.jsonl"


def write_lines(file: TextIO, documents: Iterable[Document]) -> None:
    """Write each document as a line of JSON."""
    for document in documents:
        file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def read_lines(lines: Iterable[str]) -> Iterator[Document]:
    """Read what ``write_lines`` wrote."""
    for line in lines:
        yield Document(**json.loads(line))
