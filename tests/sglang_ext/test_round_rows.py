"""How many tokens rows decode while others draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_winnow.round_rows import decoded_tokens


def request(**different: Any) -> Any:
    parameters = {
        "max_new_tokens": 100,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    own = {name: different.pop(name, value) for name, value in parameters.items()}
    fields = {"return_logprob": False, "grammar": None, "output_ids": [1, 2], **different}
    return SimpleNamespace(sampling_params=SimpleNamespace(**own), **fields)


def counts(reqs: list[Any], limits: list[int], lengths: list[int] | None = None, **batch: Any) -> list[int]:
    options = {"return_hidden_states": False, "has_custom_logit_processor": False, **batch}
    info = SimpleNamespace(has_custom_logit_processor=options.pop("has_custom_logit_processor"))
    given: Any = SimpleNamespace(reqs=reqs, sampling_info=info, **options)
    return decoded_tokens(given, limits, lengths or [500] * len(reqs), context_length=1000)


def test_rows_decode_in_every_pass_that_drafts() -> None:
    assert counts([request(), request(), request()], [0, 4, 2]) == [4, 0, 0]
    assert counts([request(), request()], [0, 0]) == [1, 1]


@pytest.mark.parametrize(
    "asked",
    [
        {"return_logprob": True},
        {"grammar": object()},
        {"return_sampling_mask": True},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 3},
    ],
)
def test_rows_that_ask_for_more_than_tokens_decode_one(asked: dict[str, Any]) -> None:
    assert counts([request(**asked), request(), request()], [0, 0, 4]) == [1, 4, 0]


@pytest.mark.parametrize("name", ["return_hidden_states", "has_custom_logit_processor"])
def test_all_decode_one_where_the_batch_asks_for_more(name: str) -> None:
    asked: dict[str, Any] = {name: True}
    assert counts([request(), request()], [0, 4], **asked) == [1, 0]


def test_rows_decode_no_more_than_they_want_and_the_context_holds() -> None:
    wants = request(max_new_tokens=4)
    assert counts([wants, request(), request()], [0, 0, 8], [500, 997, 500]) == [2, 3, 0]
    # SGLang may not know yet that a row has ended.
    ended = request(max_new_tokens=2)
    assert counts([ended, request()], [0, 8], [1000, 500]) == [1, 0]
