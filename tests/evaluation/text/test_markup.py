from __future__ import annotations

import pytest

from winnow_evaluation.text.markup import read_page


def paragraphs(body: str) -> tuple[str, ...]:
    return read_page(f"<html><body>{body}</body></html>".encode()).paragraphs


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<h1>A  <em>title</em></h1><p>One\n line &amp; more.</p>", ("A title", "One line & more.")),
        ("<p>Unclosed<p>as <b>browsers accept", ("Unclosed", "as browsers accept")),
        ("before<div>inside</div>after", ("before", "inside", "after")),
        ("<pre>def f():\n    return 1\n\n\n  # end\n</pre>", ("def f():\n    return 1\n  # end",)),
        ("<pre>  indented\n    more</pre>", ("  indented\n    more",)),
        ("<table><tr><th>key<th>value<tr><td>a<td>1</table>", ("key value", "a 1")),
        ("a<br>b", ("a\nb",)),
        ("<h2>Section<a class='headerlink' href='#s'>¶</a></h2><h3>Part ¶</h3>", ("Section", "Part")),
        ("<!-- a comment --><script>run()</script><style>p {}</style><p>seen</p>", ("seen",)),
        ("<div class='navheader'>Prev Next</div><nav>menu</nav><p>seen</p><div class='a toc'>1. Part</div>", ("seen",)),
        ("menu<div role='main'><p>the text</p></div>", ("the text",)),
        ("<p> </p><div></div>", ()),
    ],
)
def test_the_text_of_a_page_is_its_paragraphs(body: str, expected: tuple[str, ...]) -> None:
    assert paragraphs(body) == expected


@pytest.mark.parametrize(
    "link", ["<link rel='next' href='two.html#part'>", "<a rel='nofollow Next' href='two.html#part'>on</a>"]
)
def test_a_page_names_the_next_one(link: str) -> None:
    assert read_page(f"<html><head>{link}</head><body>text</body></html>".encode()).next == "two.html#part"


@pytest.mark.parametrize("content", [b"", b"<!-- nothing -->", b"<frameset><frame src='a.html'></frameset>"])
def test_a_page_without_anything_is_empty(content: bytes) -> None:
    assert read_page(content).paragraphs == ()
