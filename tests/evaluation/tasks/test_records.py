"""The long-answer task: the answer is the list itself."""

from __future__ import annotations

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from winnow_evaluation.tasks import records
from winnow_evaluation.tasks.scoring import found_fraction

seeds = st.integers(0, 2**64 - 1)


@given(seeds, st.integers(1, 3000))
def test_the_answer_is_the_list(seed: int, size: int) -> None:
    sample = records.make(random.Random(seed), size)
    listed = sample.context.split("\n\n", 1)[1]
    (question,) = sample.questions
    assert question.answer == listed
    assert list(question.references) == listed.split("\n")
    assert len(question.references) == max(2, size // 4)
    for number, record in enumerate(question.references, 1):
        assert re.fullmatch(rf"{number}\. [a-z]+ [a-z]+ [1-9]\d{{4}}", record)


@settings(max_examples=50)
@given(seeds, st.integers(40, 1000), st.data())
def test_a_record_left_out_costs_its_share(seed: int, size: int, data: st.DataObject) -> None:
    (question,) = records.make(random.Random(seed), size).questions
    kept = list(question.references)
    # Not one of the first: "1. ..." could stand within "11. ...".
    del kept[data.draw(st.integers(9, len(kept) - 1))]
    assert found_fraction("\n".join(kept), question.references) == len(kept) / (len(kept) + 1)
