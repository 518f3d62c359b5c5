"""For which policies together a server captures graphs: the setting and its default."""

from __future__ import annotations

import pytest

from sglang_winnow.graph_sets import ENVIRONMENT, GraphSet, graph_sets
from winnow_kernels.policies.registry import DECODE_POLICIES

SERVED = ("dense", "quest", "snapkv", "pyramidkv")


def sets_of(text: str, monkeypatch: pytest.MonkeyPatch) -> list[GraphSet]:
    monkeypatch.setenv(ENVIRONMENT, text)
    return graph_sets(SERVED)


def one(*kinds: str, ordered: bool = False) -> GraphSet:
    return GraphSet(frozenset(kinds), ordered)


def test_sets_are_named_by_their_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sets_of("quest + snapkv,quest+early_termination", monkeypatch) == [
        one("quest", "snapkv"),
        one("quest", ordered=True),
    ]
    # SnapKV and PyramidKV differ in what they keep alone.
    assert sets_of("pyramidkv", monkeypatch) == [one("snapkv")]
    assert sets_of("dense+early_termination", monkeypatch) == [one(ordered=True)]
    assert sets_of("", monkeypatch) == []


def test_words_stand_for_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sets_of("all", monkeypatch) == [one("quest", "snapkv")]
    assert sets_of("each+early_termination", monkeypatch) == [one("quest", ordered=True), one("snapkv", ordered=True)]
    assert sets_of("each+quest", monkeypatch) == [one("quest"), one("quest", "snapkv")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("quest+tactics", "no decode policy is called 'tactics'; there are dense, "),
        ("quest+", "no decode policy is called ''"),
        ("quest+tactic", "tactic is not served here; WINNOW_POLICIES says what is"),
    ],
)
def test_what_is_no_set_is_refused(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"^WINNOW_GRAPHS: {reason}"):
        sets_of(text, monkeypatch)


def test_by_default_what_presets_ask_for_and_all_have_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert graph_sets(SERVED) == [one("quest", "snapkv")]
    presets = {one("lowbit_top_p", ordered=True), one("lowbit_top_p", "lowbit_top_k")}
    assert presets <= set(graph_sets(DECODE_POLICIES))
    assert graph_sets(["dense"]) == [one()]
