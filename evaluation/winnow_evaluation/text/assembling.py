"""Documents from the files of a package: pages joined to books, source files to modules of some length."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from posixpath import dirname, join, normpath
from string import ascii_lowercase
from typing import Final
from urllib.parse import unquote, urldefrag

from winnow_evaluation.text.documents import Document
from winnow_evaluation.text.markup import read_page
from winnow_evaluation.text.packages import Package

MAX_CHARACTERS: Final = 300_000
"""Longer books are cut, so that a package's text falls into every split."""

_MIN_CHARACTERS: Final = 2_000
"""Shorter documents are left out: a page of a menu, a package's ``__init__.py``."""

_REPEATED_PAGES: Final = 5
"""A paragraph that so many pages of a package have is navigation."""

_MIN_LETTERS: Final = 0.6
"""Prose has a larger part of lower-case letters and spaces; an index or a table has less."""

_NUMBER: Final = re.compile(r"(\d+)")
_BLANK_LINES: Final = re.compile(r"\n\s*\n")
_LICENCE_LINES: Final = re.compile(r"copyright|licen[cs]e|spdx|all rights reserved", re.IGNORECASE)


@dataclass(frozen=True)
class _Part:
    """The text of one file, and the file that its reader goes on with."""

    path: str
    paragraphs: tuple[str, ...]
    following: str | None = None


def documents_of(package: Package, files: Iterable[tuple[str, bytes]]) -> list[Document]:
    """Make a package's documents of its files, given as path and content; the order of the files does not matter."""
    ordered = sorted(files, key=lambda file: _natural(file[0]))
    if package.form == "source":
        parts = [_source(path, content) for path, content in ordered]
    else:
        read = _html if package.form == "html" else _plain
        parts = _without_repeated(_in_reading_order([read(path, content) for path, content in ordered]))
        parts = [part for part in parts if _is_prose(part)]
    documents = []
    characters = 0
    for name, text in _joined(parts):
        if len(text) >= _MIN_CHARACTERS:
            documents.append(Document(name, package.name, package.kind, text))
            characters += len(text)
        if package.characters is not None and characters >= package.characters:
            break
    return documents


def _html(path: str, content: bytes) -> _Part:
    page = read_page(content)
    following = page.next and normpath(join(dirname(path), unquote(urldefrag(page.next).url)))
    return _Part(path, page.paragraphs, following)


def _plain(path: str, content: bytes) -> _Part:
    paragraphs = (paragraph.rstrip().strip("\n") for paragraph in _BLANK_LINES.split(_decoded(path, content)))
    return _Part(path, tuple(paragraph for paragraph in paragraphs if paragraph))


def _source(path: str, content: bytes) -> _Part:
    """One file of code, under its path, without the comment at its top if that is a licence."""
    lines = _decoded(path, content).splitlines()
    top = next((place for place, line in enumerate(lines) if not line.startswith(("#", "//", "/*", " *"))), len(lines))
    if any(_LICENCE_LINES.search(line) for line in lines[:top]):
        lines = lines[top:]
    comment = "#" if path.endswith(".py") else "//"
    text = "\n".join(lines).strip("\n")
    return _Part(path, (f"{comment} {path}\n{text}\n",) if text else ())


def _decoded(path: str, content: bytes) -> str:
    if path.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            return ""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\f", "\n").replace("\0", "")


def _in_reading_order(parts: Sequence[_Part]) -> list[_Part]:
    """Follow each part's link to the next; begin with those that no other leads to, in the order given."""
    by_path: Mapping[str, _Part] = {part.path: part for part in parts}
    led_to = {part.following for part in parts if part.following != part.path}
    ordered: dict[str, _Part] = {}
    for start in [*(part for part in parts if part.path not in led_to), *parts]:
        part: _Part | None = start
        while part is not None and part.path not in ordered:
            ordered[part.path] = part
            part = by_path.get(part.following or "")
    return list(ordered.values())


def _without_repeated(parts: Sequence[_Part]) -> list[_Part]:
    """Leave out navigation, and paragraphs of some length that came before."""
    pages = Counter(paragraph for part in parts for paragraph in set(part.paragraphs))
    seen: set[str] = set()
    kept = []
    for part in parts:
        paragraphs = []
        for paragraph in part.paragraphs:
            prose = len(paragraph) >= 40 and "\n" not in paragraph
            if pages[paragraph] >= _REPEATED_PAGES and (prose or pages[paragraph] > len(parts) // 10):
                continue
            if prose and paragraph in seen:
                continue
            seen.add(paragraph)
            paragraphs.append(paragraph)
        kept.append(_Part(part.path, tuple(paragraphs), part.following))
    return kept


def _is_prose(part: _Part) -> bool:
    text = "".join(part.paragraphs)
    letters = sum(map(text.count, ascii_lowercase + " "))
    return letters > _MIN_LETTERS * len(text)


def _joined(parts: Iterable[_Part]) -> Iterator[tuple[str, str]]:
    """Join parts to texts of at most ``MAX_CHARACTERS``, each named for its first part."""
    cut = ((part, _packed(("", paragraph) for paragraph in part.paragraphs)) for part in parts)
    return _packed(
        (f"{part.path}#{number}" if number else part.path, text)
        for part, texts in cut
        for number, (_, text) in enumerate(texts)
    )


def _packed(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join named texts to some of at most ``MAX_CHARACTERS``, or of one text, each named for its first."""
    name, length = "", 0
    pieces: list[str] = []
    for own_name, text in texts:
        if pieces and length + len(text) > MAX_CHARACTERS:
            yield name, "\n\n".join(pieces)
            pieces, length = [], 0
        name = name if pieces else own_name
        pieces.append(text)
        length += len(text) + 2
    if pieces:
        yield name, "\n\n".join(pieces)


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sort key in which ``part2`` comes before ``part10``."""
    return [(piece.isdigit(), int(piece) if piece.isdigit() else 0, piece) for piece in _NUMBER.split(path)]
