"""Prompts with images, to a server of Qwen3.5's shape: policies take an image's tokens as they take others.

SGLang without Winnow's attention, served beside it, says what is expected.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from PIL import Image

from tests.models import VISION_TOKENS, Family
from tests.sglang_ext import linear_servers
from tests.sglang_ext.answers import TOLERANCE, equal_steps
from tests.sglang_ext.linear_servers import (
    COVERED,
    FULL,
    LINEAR,
    POLICIES,
    QUOKA,
    ROUNDING,
    ROUNDING_OF_SELECTIONS,
    SHAPES,
    STATES_EVERY,
    Server,
    cached,
    cost,
    first_step,
    sglang_server,
    winnow_server,
    written_model,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

FAMILY: Final[Family] = "qwen3_5"
SIDE, IMAGE_TOKENS = 256, 64
BEFORE, BEHIND = 100, 150
LENGTH = BEFORE + 1 + IMAGE_TOKENS + 1 + BEHIND


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_model(tmp_path_factory.mktemp("images") / "model", FAMILY)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with winnow_server(model, model.parent / "winnow.log") as own:
        yield own


@pytest.fixture(scope="module")
def sglang(model: Path) -> Iterator[Server]:
    with sglang_server(model, model.parent / "sglang.log") as own:
        yield own


def image(seed: int) -> str:
    """Return a PNG in base64; each of its tokens has a colour of its own."""
    file = io.BytesIO()
    across = math.isqrt(IMAGE_TOKENS)
    colours = Image.frombytes("RGB", (across, across), random.Random(seed).randbytes(3 * IMAGE_TOKENS))
    colours.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def prompt(seed: int) -> list[int]:
    """Return text around the place of an image; SGLang makes ``IMAGE_TOKENS`` of it."""
    config = SHAPES[FAMILY].config()
    of = {name: config[name] for name in VISION_TOKENS}
    text: list[Any] = [token for token in linear_servers.prompt(seed, 400) if token not in of.values()]
    place = [of["vision_start_token_id"], of["image_token_id"], of["vision_end_token_id"]]
    return text[:BEFORE] + place + text[BEFORE : BEFORE + BEHIND]


def test_dense_answers_are_sglangs_own(server: Server, sglang: Server) -> None:
    text, seen = prompt(1), image(1)
    for computed in (0, (LENGTH - 1) // STATES_EVERY * STATES_EVERY):
        own, expected = (each.ask(text, {}, image_data=seen) for each in (server, sglang))
        assert own["meta_info"]["prompt_tokens"] == LENGTH
        assert cached(own) == cached(expected) == computed
        equal_steps(own, expected, ROUNDING)


def test_another_image_is_another_prompt(server: Server, sglang: Server) -> None:
    text = prompt(2)
    answers = []
    for number in (2, 3):
        own, expected = (each.ask(text, {}, image_data=image(number)) for each in (server, sglang))
        assert cached(own) == cached(expected) <= BEFORE
        equal_steps(own, expected, ROUNDING)
        answers.append(own)
    first, second = answers
    with pytest.raises(AssertionError):
        equal_steps(second, first, TOLERANCE)


@pytest.mark.parametrize("name", COVERED)
def test_a_policy_that_covers_the_context_answers_as_dense_attention(server: Server, sglang: Server, name: str) -> None:
    text, seen = prompt(3), image(4)
    answer = server.ask(text, COVERED[name], image_data=seen)
    equal_steps(answer, sglang.ask(text, {}, image_data=seen), ROUNDING)
    assert cost(answer)["decode"]["dense_steps"] == cost(answer)["decode"]["steps"]


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_reads_less(server: Server, sglang: Server, name: str) -> None:
    text, seen = prompt(4), image(5)
    answer = server.ask(text, POLICIES[name], image_data=seen)
    decode = cost(answer)["decode"]
    assert (decode["policy"], decode["dense_steps"]) == (name, 0)
    assert 0 < decode["attended_ratio"] < 1
    assert decode["context_tokens"] == LENGTH + decode["steps"]
    # The first token is the prefill's.
    equal_steps(first_step(answer), first_step(sglang.ask(text, {}, image_data=seen)), ROUNDING)


def test_sparse_prefill_goes_on_from_the_cache_of_its_image_alone(server: Server, sglang: Server) -> None:
    text, seen = prompt(5), image(6)
    first = server.ask(text, QUOKA, image_data=seen)
    assert cost(first)["prefill"]["attended_ratio"] < 1
    again = server.ask(text, QUOKA, image_data=seen)
    assert (cached(first), cached(again)) == (0, (LENGTH - 1) // 128 * 128)
    equal_steps(again, first, ROUNDING_OF_SELECTIONS)
    assert cached(server.ask(text, QUOKA, image_data=image(7))) == 0
    dense = server.ask(text, {}, image_data=seen)
    assert cached(dense) == 0
    equal_steps(dense, sglang.ask(text, {}, image_data=seen), ROUNDING)


def test_prompts_with_images_are_not_explained(server: Server) -> None:
    custom = {"attention_explain": json.dumps({"steps": [1], "layers": FULL[:1], "heads": [0]})}
    refused = server.post(prompt(6), POLICIES["quest"], custom=custom, image_data=image(8))
    assert refused.status_code == 400
    assert "attention_explain: must not be given together with image_data" in refused.text
    # The same tokens without an image are text.
    answer = server.ask(prompt(6), POLICIES["quest"], custom=custom)
    assert cost(answer)["linear_layers"] == len(LINEAR)
    assert cost(answer)["explain"]["entries"]
