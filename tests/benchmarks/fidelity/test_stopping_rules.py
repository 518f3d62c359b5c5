"""Stopping by the share, by what has settled, or with a smaller p: what each reads of a small selection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

from benchmarks.fidelity.captured_attention import NEWEST
from benchmarks.fidelity.code_choice import Step
from benchmarks.fidelity.key_estimates import rotated
from benchmarks.fidelity.stopping_rules import (
    BITS,
    SHARES,
    Figures,
    P,
    Selected,
    add_layer,
    reading_order,
    rules,
    stopping_table,
)
from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.indexes.key_codes import BLOCK

HEADS, GROUP, HEAD_DIM, TOKENS = 2, 2, 16, 2400
SCALE: Final = HEAD_DIM**-0.5


@pytest.fixture(scope="module")
def attention() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(TOKENS, HEADS * GROUP, HEAD_DIM, generator=generator) * 2.5
    keys, values = torch.randn(2, TOKENS, HEADS, HEAD_DIM, generator=generator)
    return queries, keys, values


@pytest.fixture(scope="module")
def selected(attention: tuple[Tensor, Tensor, Tensor]) -> Selected:
    queries, keys, values = attention
    step = Step.at(queries[-1], keys, SCALE)
    predicted = step.predicted(rotated(keys[:-NEWEST], BITS, BLOCK).transpose(0, 1))
    order = reading_order(step, predicted, 1, P)
    assert order.unique().numel() == len(order) < TOKENS
    assert order[0] == TOKENS - 1
    return Selected.of(step, predicted, values[:, 1], 1, P)


def test_the_whole_selection_is_attention_over_its_tokens(
    selected: Selected, attention: tuple[Tensor, Tensor, Tensor]
) -> None:
    queries, keys, values = attention
    step = Step.at(queries[-1], keys, SCALE)
    predicted = step.predicted(rotated(keys[:-NEWEST], BITS, BLOCK).transpose(0, 1))
    order = reading_order(step, predicted, 1, P)
    scores = queries[-1, GROUP:].double() @ keys[:, 1].double().mT * SCALE
    weights = scores.softmax(-1)
    read = selected.read(selected.whole)
    assert read.tokens == len(order)
    torch.testing.assert_close(read.shares, weights[:, order].sum(-1), rtol=1e-5, atol=0)
    of_selection = scores[:, order].softmax(-1) @ values[order, 1].double()
    torch.testing.assert_close(read.output, of_selection, rtol=1e-5, atol=1e-6)


def test_with_a_higher_share_more_is_read(selected: Selected) -> None:
    counts = [int(selected.until_held(share).sum()) for share in (0.0, *SHARES, 1.5)]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == len(selected.masses) > counts[1] > 1


def test_reading_stops_with_the_first_tile_that_is_enough(selected: Selected) -> None:
    is_read = selected.until_held(0.8)
    held = selected.masses.cumsum(0)
    shares = (held / (held + selected.rest)).amin(-1)
    last = int(is_read.sum()) - 1
    assert is_read[: last + 1].all()
    assert shares[last] >= 0.8 > shares[last - 1]


def test_early_termination_stops_where_nothing_changes(selected: Selected) -> None:
    anything = EarlyTermination(scale=1.0, direction=1.0, patience=1)
    # It takes a second tile to have something to compare.
    assert 2 <= int(selected.until_settled(anything).sum()) < len(selected.masses)
    never = EarlyTermination(scale=1e-9, direction=1e-9, patience=1)
    assert selected.until_settled(never).all()


def test_a_layer_adds_figures_of_every_rule(attention: tuple[Tensor, Tensor, Tensor], tmp_path: Path) -> None:
    figures = {rule.name: Figures() for rule in rules()}
    add_layer(figures, *attention, SCALE, [TOKENS - 8, TOKENS])
    rows = {name: own.row() for name, own in figures.items()}
    whole = rows.pop("the whole selection")
    assert whole["skipped"] == whole["error"] == 0
    assert all(len(own.read) == 2 * HEADS for own in figures.values())
    assert all(row["read"] <= whole["read"] and row["true_share"] <= whole["true_share"] for row in rows.values())
    assert all(row["read"] * TOKENS >= TILE for row in rows.values())
    run = {
        "model": "small", "prompts": 1, "context": TOKENS, "text": "prose", "queries_each": 2, "device": "a CPU",
        "dtype": "float32", "commit": None, "rows": [{"rule": "the whole selection", **whole}],
    }  # fmt: skip
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"runs": [run]}))
    assert "| small | the whole selection |" in stopping_table(path)
