from __future__ import annotations

import gzip
import random
import re
from dataclasses import replace

import pytest

from winnow_evaluation.text import assembling
from winnow_evaluation.text.assembling import MAX_CHARACTERS, documents_of
from winnow_evaluation.text.documents import Document
from winnow_evaluation.text.packages import Form, Package

BOOK = Package("debian", "made-up", "1.0", "MIT", "0" * 64, "prose", "html", ("*",))


def made(files: dict[str, bytes], form: Form = "html", **changes: object) -> list[Document]:
    package = replace(BOOK, form=form, kind="code" if form == "source" else "prose", **changes)  # type: ignore[arg-type]
    shuffled = list(files.items())
    random.Random(0).shuffle(shuffled)
    return documents_of(package, shuffled)


def prose(name: str, sentences: int = 60) -> str:
    return "".join(
        f"<p>The page {name} says in its sentence number {line} what it has to say.</p>" for line in range(sentences)
    )


def order_of(document: Document) -> list[str]:
    """The pages in a document, as their first sentences name them."""
    return re.findall(r"The page (\S+) says in its sentence number 0 ", document.text)


def test_pages_are_read_in_the_order_of_their_links() -> None:
    follow = {"start": "middle", "middle": "sub/end", "sub/end": "../again"}
    files = {
        f"doc/{name}.html": f"<link rel=next href='{following}.html#top'>{prose(name)}".encode()
        for name, following in follow.items()
    }
    [document] = made(
        files | {"doc/alone10.html": prose("alone10").encode(), "doc/alone9.html": prose("alone9").encode()}
    )
    assert order_of(document) == ["alone9", "alone10", "start", "middle", "sub/end"]
    assert document.name == "doc/alone9.html"
    assert (document.source, document.kind) == ("made-up", "prose")


def test_links_that_go_in_a_circle_end() -> None:
    files = {
        f"{name}.html": f"<link rel=next href='{following}.html'>{prose(name)}".encode()
        for name, following in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "d"))
    }
    [document] = made(files)
    assert order_of(document) == ["d", "a", "b", "c"]


def test_navigation_and_what_came_before_are_left_out() -> None:
    menu = "<p>Home</p><p>Every page of this manual has this long line at its top, as manuals do.</p>"
    repeated = "<p>This sentence of some length stands on two pages, and is kept on the first of them.</p>"
    files = {
        f"{name}.html": f"{menu}{repeated if name in 'ab' else ''}<p>Note</p>{prose(name)}".encode() for name in "abcd"
    }
    files["e.html"] = f"{menu}{prose('e')}".encode()
    [document] = made(files)
    assert "Home" not in document.text
    assert "Every page" not in document.text
    assert document.text.count("This sentence of some length") == 1
    assert document.text.count("Note") == 4


def test_pages_that_are_not_prose_and_documents_that_are_too_short_are_left_out() -> None:
    table = "".join(f"<p>0x{number:08X} 17.5</p>" for number in range(400))
    assert made({"table.html": table.encode()}) == []
    assert made({"short.html": b"<p>Only a sentence.</p>"}) == []


def test_long_books_are_cut_between_paragraphs() -> None:
    files = {f"{number}.html": prose(str(number), 1500).encode() for number in range(8)}
    documents = made(files)
    assert len(documents) > 2
    assert all(len(document.text) <= MAX_CHARACTERS for document in documents)
    assert [page for document in documents for page in order_of(document)] == [str(number) for number in range(8)]
    assert len({document.name for document in documents}) == len(documents)
    text = "\n\n".join(document.text for document in documents)
    assert text.count("has to say.") == 8 * 1500
    assert len(made(files, characters=MAX_CHARACTERS)) == 2


def test_one_long_page_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembling, "MAX_CHARACTERS", 3000)
    documents = made({"all.html": prose("all", 100).encode()})
    assert [document.name for document in documents] == ["all.html", "all.html#1", "all.html#2"][: len(documents)]
    assert all(2000 <= len(document.text) <= 3000 for document in documents)


def test_text_is_unpacked_and_its_paragraphs_are_split_at_empty_lines() -> None:
    lines = "\r\n \r\n".join(
        f"Paragraph number {line} of a file that is text,\r\n  in two lines." for line in range(60)
    )
    [document] = made({"a.txt.gz": gzip.compress(lines.encode("latin-1")), "b.txt.gz": b"not gzip"}, "text")
    assert document.text.startswith(
        "Paragraph number 0 of a file that is text,\n  in two lines.\n\nParagraph number 1 "
    )


def test_code_stands_under_its_path_without_the_licence_at_its_top() -> None:
    licence = "# Copyright 2024 somebody\n# SPDX-License-Identifier: MIT\n\n"
    body = "".join(f"def function_{number}() -> int:\n\n    return {number}\n" for number in range(50))
    files = {
        "pkg/b.py": (licence + body).encode(),
        "pkg/a.py": b"# A comment that says what this is.\n" + body.encode(),
        "pkg/c.go": b"// Copyright nobody\npackage c\n",
        "pkg/__init__.py": b"\n",
    }
    [document] = made(files, "source")
    assert document.text == (
        f"# pkg/a.py\n# A comment that says what this is.\n{body}\n\n# pkg/b.py\n{body}\n\n// pkg/c.go\npackage c\n"
    )
