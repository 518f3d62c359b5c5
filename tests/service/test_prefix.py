"""What a prompt's prefix is, by which a balancer chooses a runtime."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow_service.runtime.prefix import PREFIX_BYTES, prefix_key, prefix_of

LONG = "You are a helpful assistant. " * 200


def chat(*contents: Any) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "user", "assistant"]
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


@given(st.binary(), st.binary())
def test_a_header_has_16_digits_that_tell_prefixes_apart(one: bytes, other: bytes) -> None:
    assert len(bytes.fromhex(prefix_key(one).decode())) == 8
    assert (prefix_key(one) == prefix_key(other)) == (one == other)


def test_a_conversation_keeps_its_prefix_while_it_grows() -> None:
    turns = ["Be brief.", "Hello", "Hi.", "Who are you?", "A model."]
    assert len({prefix_of(chat(*turns[:length])) for length in range(2, 6)}) == 1
    assert prefix_of(chat("Be brief.", "Hello")) != prefix_of(chat("Be brief.", "Good morning"))
    # Of one long system prompt, too: it is soon cached everywhere, a conversation is not.
    assert prefix_of(chat(LONG, "Hello")) != prefix_of(chat(LONG, "Good morning"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"text": LONG + "a"}, {"text": LONG + "b"}),
        ({"prompt": LONG + "a"}, {"prompt": LONG + "b"}),
        ({"prompt": [LONG + "a", "x"]}, {"prompt": [LONG + "b"]}),
        ({"input_ids": [7] * 5000 + [1]}, {"input_ids": [7] * 5000 + [2]}),
        ({"prompt": [[7] * 5000 + [1]]}, {"input_ids": [7] * 5000}),
        (chat("s", [{"type": "text", "text": LONG + "a"}]), chat("s", [{"type": "text", "text": LONG + "b"}])),
    ],
)
def test_what_begins_alike_has_one_prefix(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert prefix_of(one) == prefix_of(other) != b""


def test_images_tell_messages_apart_and_cost_no_more_than_texts() -> None:
    def image(content: str) -> dict[str, Any]:
        return chat("s", [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + content}}])

    assert prefix_of(image("a")) != prefix_of(image("b"))
    assert len(prefix_of(image("a" * 10_000_000))) < 2 * PREFIX_BYTES


ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "url", "image_url"]), inner)
    ),
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "text", "input_ids"]), ANY_JSON))
def test_any_body_has_a_prefix(body: dict[str, Any]) -> None:
    assert isinstance(prefix_of(body), bytes)
