"""The model card says what the results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from needle_training.card import tables
from winnow_evaluation.model_card import updated

FOLDER = Path(__file__).resolve().parents[2] / "models" / "needle"


def test_the_tables_are_those_of_the_results() -> None:
    card = (FOLDER / "README.md").read_text()
    assert updated(card, tables(FOLDER)) == card


def test_a_card_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="tables: begin"):
        updated("nothing", "table")
