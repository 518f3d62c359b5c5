"""Parameters that name a model's layers, where a GPU knows only those on which policies act."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy_rows import ROWS
from winnow_kernels.contract.fields import Parameters
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.registry import PARAMETERS
from winnow_kernels.policies.tactic.parameters import Tactic

LAYERS = 12
FULL = st.sets(st.integers(0, LAYERS - 1), min_size=1).map(sorted)


@pytest.mark.parametrize("kind", [Quest, Tactic])
@given(full=FULL, full_layers=st.integers(0, LAYERS + 3))
def test_the_same_layers_are_dense(kind: type[Quest | Tactic], full: list[int], full_layers: int) -> None:
    placed = kind(full_layers=full_layers).at_places(full)
    assert [place < placed.full_layers for place in range(len(full))] == [layer < full_layers for layer in full]


@given(data=st.data(), full=FULL)
def test_layers_keep_their_roles(data: st.DataObject, full: list[int]) -> None:
    named = data.draw(st.sets(st.sampled_from(full), min_size=1).map(sorted))
    own = Delta(delta_layers=tuple(named), full_layers=data.draw(st.integers(0, named[0])))
    placed = own.at_places(full)
    assert [placed.role(place) for place in range(len(full))] == [own.role(layer) for layer in full]
    # What holds of what clients write holds of places.
    assert Delta.model_validate(placed.model_dump()) == placed


@pytest.mark.parametrize("name", ROWS)
def test_every_policy_is_as_it_was_where_all_layers_count(name: str) -> None:
    parameters: Parameters = PARAMETERS["decode"][name].model_validate({"policy": name, **ROWS[name].small})
    assert parameters.at_places(range(LAYERS)) == parameters


@pytest.mark.parametrize("name", ROWS)
def test_whoever_names_layers_says_their_places(name: str) -> None:
    kind: Any = PARAMETERS["decode"][name]
    names_layers = any("layers" in field for field in kind.model_fields)
    assert (kind.at_places is not Parameters.at_places) == names_layers
