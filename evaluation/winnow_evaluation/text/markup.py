"""The text of a page of HTML, without navigation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lxml import etree, html

_MAIN: Final = ("//*[@role='main']", "//main", "//div[@id='page-content']", "//div[@id='content']", "//body")
"""Where a page's own text lies, in the order of preference."""

_DROPPED_TAGS: Final = frozenset(
    "aside button footer form header input nav noscript object script select style svg template textarea".split()
)
_DROPPED_CLASSES: Final = frozenset(
    "breadcrumbs docnav footer headerlink indextable nav-chapters navfooter navheader navigation "
    "related sphinxsidebar toc toctree-wrapper".split()
)
_BLOCKS: Final = frozenset(
    "address article blockquote body caption center dd details div dl dt fieldset figcaption figure h1 h2 h3 h4 h5 h6 "
    "hr html legend li main ol p pre section summary table tbody tfoot thead tr ul".split()
)
_SPACE: Final = re.compile(r"\s+")
_BLANK_LINES: Final = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Page:
    """A page's paragraphs in order, and where the page says the next one is."""

    paragraphs: tuple[str, ...]
    next: str | None


def read_page(content: bytes) -> Page:
    """Read a page of HTML, which may be broken as browsers accept it; an empty one has no paragraphs."""
    try:
        root = html.document_fromstring(content, html.HTMLParser(encoding=_encoding(content)))
    except etree.ParserError:
        return Page((), None)
    following = [
        link.get("href") for link in root.iter("link", "a") if "next" in (link.get("rel") or "").lower().split()
    ]
    main = next((found[0] for path in _MAIN if (found := root.xpath(path))), root)
    return Page(tuple(_paragraphs(main)), next((href for href in following if href), None))


def _encoding(content: bytes) -> str | None:
    """UTF-8 if it is that, whatever the page says; None for what the page says."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return None
    return "utf-8"


def _paragraphs(main: html.HtmlElement) -> Iterator[str]:
    found: list[str | None] = []
    _add_pieces(found, main, verbatim=False)
    pieces: list[str] = []
    for piece in [*found, None]:
        if piece is not None:
            pieces.append(piece)
            continue
        # Lines of verbatim text keep how far they are indented.
        text = "".join(pieces).rstrip().strip("\n").replace("¶", "")
        if text.strip():
            yield text if "\n" in text else text.strip()
        pieces.clear()


def _add_pieces(pieces: list[str | None], element: html.HtmlElement, *, verbatim: bool) -> None:
    """Add the element's texts in order, None where a block begins or ends."""
    verbatim = verbatim or element.tag == "pre"
    block = element.tag in _BLOCKS
    if block:
        pieces.append(None)
    elif element.tag == "br":
        pieces.append("\n")
    pieces.append(_text(element.text, verbatim=verbatim))
    for child in element:
        if not _dropped(child):
            _add_pieces(pieces, child, verbatim=verbatim)
            if child.tag in {"td", "th"}:
                pieces.append(" ")
        pieces.append(_text(child.tail, verbatim=verbatim))
    if block:
        pieces.append(None)


def _text(text: str | None, *, verbatim: bool) -> str:
    if not text:
        return ""
    # A paragraph's end is an empty line: verbatim text has none inside.
    return _BLANK_LINES.sub("\n", text) if verbatim else _SPACE.sub(" ", text)


def _dropped(element: html.HtmlElement) -> bool:
    # Comments and processing instructions have functions for tags.
    if not isinstance(element.tag, str) or element.tag in _DROPPED_TAGS:
        return True
    return not _DROPPED_CLASSES.isdisjoint((element.get("class") or "").split())
