"""Where requests go: by their prefix, within a bound on load."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow_service.runtime.balancer import PREFIX_BYTES, SLACK, choose, prefix_of, rank

NAMES = [f"10.0.0.{number}:30000" for number in range(1, 9)]
names = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
LONG = "You are a helpful assistant. " * 200


@given(st.binary(), names)
def test_every_replica_ranks_alike_and_an_absent_runtime_moves_no_other(prefix: bytes, some: list[str]) -> None:
    ranking = rank(prefix, some)
    assert ranking == rank(prefix, some[::-1])
    assert sorted(ranking) == sorted(some)
    for gone in some:
        assert rank(prefix, [name for name in some if name != gone]) == [name for name in ranking if name != gone]


def test_prefixes_spread_evenly() -> None:
    firsts = Counter(rank(str(number).encode(), NAMES)[0] for number in range(8000))
    assert set(firsts) == set(NAMES)
    assert max(firsts.values()) < 1.15 * 1000


@given(names, st.data(), st.floats(1, 4))
def test_no_load_is_over_the_bound(some: list[str], data: st.DataObject, factor: float) -> None:
    loads = {name: data.draw(st.integers(0, 300)) for name in some}
    ranking = data.draw(st.permutations(some))
    chosen = choose(ranking, loads, factor)
    mean = (sum(loads.values()) + 1) / len(some)
    assert loads[chosen] + 1 <= max(math.ceil(factor * mean), min(loads.values()) + SLACK)
    # The first that may.
    for better in ranking[: ranking.index(chosen)]:
        assert loads[better] + 1 > factor * mean


@given(names, st.lists(st.tuples(st.sampled_from(["popular"] * 8 + ["b", "c"]), st.booleans()), max_size=400))
def test_loads_stay_near_each_other_whatever_is_popular(some: list[str], arrivals: list[tuple[str, bool]]) -> None:
    factor = 1.25
    loads = dict.fromkeys(some, 0)
    for prefix, leaves in arrivals:
        name = choose(rank(prefix.encode(), some), loads, factor)
        loads[name] += 1
        mean = sum(loads.values()) / len(some)
        assert loads[name] <= max(math.ceil(factor * mean), min(loads.values()) + SLACK)
        if leaves:
            loads[max(loads, key=lambda each: loads[each])] -= 1


def test_with_little_to_do_a_prefix_stays_where_it_is() -> None:
    ranking = rank(b"a prefix", NAMES)
    assert {choose(ranking, {**dict.fromkeys(NAMES, 0), ranking[0]: load}, 1.25) for load in range(SLACK)} == {
        ranking[0]
    }
    assert choose(ranking, {**dict.fromkeys(NAMES, 0), ranking[0]: 50}, 1.25) == ranking[1]


def chat(*contents: Any) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "user", "assistant"]
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


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
