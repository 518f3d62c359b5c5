"""For which policies together a server on a GPU captures decode graphs: its choice, for each takes time and memory."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from winnow_kernels.policies.declarations import kinds_of
from winnow_kernels.policies.registry import DECODE_POLICIES, POLICIES_SETTING

ENVIRONMENT: Final = "WINNOW_GRAPHS"
EACH: Final = "each"
ALL: Final = "all"
EARLY_TERMINATION: Final = "early_termination"

_WORDS: Final = (EACH, ALL, EARLY_TERMINATION)
# What the presets ask for, alone and together, and everything: each graph takes seconds at start.
_DEFAULT: Final = (
    f"lowbit_top_p+{EARLY_TERMINATION}",
    "lowbit_top_p+lowbit_top_k",
    ALL,
)


@dataclass(frozen=True)
class GraphSet:
    """Batches that a graph is for.

    Attributes:
        kinds: of the policies in them, besides dense.
        ordered: whether rows may stop early, or have a cap that cuts.
    """

    kinds: frozenset[str]
    ordered: bool


def graph_sets(policies: Collection[str]) -> list[GraphSet]:
    """Return the sets that the environment names, with commas between: ``quest+snapkv, tactic+early_termination``.

    ``all`` stands for all ``policies``, the decode policies that are served, and ``each`` makes a set of each of them.
    Without any, they are those of the default whose policies are served.

    Raises:
        ValueError: one of them is no decode policy, or not served.
    """
    text = os.environ.get(ENVIRONMENT)
    if text is None:
        named = [entry for entry in map(_names_of, _DEFAULT) if entry <= {*policies, *_WORDS}]
    else:
        named = [_names_of(entry) for entry in text.split(",") if entry.strip()]
        _refuse_unknown({name for entry in named for name in entry}, policies)
    return [found for names in named for found in _sets(names, policies)]


def _names_of(entry: str) -> set[str]:
    return {name.strip() for name in entry.split("+")}


def _refuse_unknown(names: Collection[str], policies: Collection[str]) -> None:
    if unknown := sorted(set(names).difference(DECODE_POLICIES, _WORDS)):
        raise ValueError(
            f"{ENVIRONMENT}: no decode policy is called {unknown[0]!r}; there are {', '.join(DECODE_POLICIES)}, and "
            f"the words {', '.join(_WORDS)}"
        )
    if missing := sorted(set(names).difference(policies, _WORDS)):
        raise ValueError(f"{ENVIRONMENT}: {missing[0]} is not served here; {POLICIES_SETTING} says what is")


def _sets(names: Collection[str], policies: Collection[str]) -> list[GraphSet]:
    ordered = EARLY_TERMINATION in names
    common = kinds_of(set(names).difference(_WORDS))
    if ALL in names:
        common |= kinds_of(policies)
    groups = [common | {kind} for kind in sorted(kinds_of(policies))] if EACH in names else [common]
    return [GraphSet(kinds, ordered) for kinds in groups]
