from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluation.fake_model import FakeModel, serving
from tests.evaluation.tasks.tiny_tasks import ANSWER_TOKENS, tiny_tasks
from winnow_evaluation.over_http.client import OpenAIClient
from winnow_evaluation.over_http.token_counts import TokenizeCounter, UsageCounter, token_counter
from winnow_evaluation.tasks.generation import SampleGenerator, SampleKey, prepare
from winnow_evaluation.tasks.sizing import Need, SizeSearch, TaskSizer, smaller_size


class Counting:
    """Measures sizes by a formula: tokens for each word, more for the template, and words that come in steps."""

    def __init__(self, ratio: float, overhead: int, step: int = 1, smallest: int = 1, limit: int | None = None) -> None:
        self.ratio, self.overhead, self.step, self.smallest, self.limit = ratio, overhead, step, smallest, limit
        self.calls = 0

    def tokens(self, size: int) -> int:
        words = max(self.smallest, size // self.step * self.step)
        return self.overhead + math.ceil(words * self.ratio)

    async def __call__(self, size: int) -> Need:
        self.calls += 1
        tokens = self.tokens(size)
        return Need(size, None if self.limit is not None and tokens > self.limit else tokens)


lengths = st.lists(st.sampled_from([512, 1024, 4096, 10_000, 32_768, 131_072]), min_size=1, max_size=4, unique=True)


@given(ratio=st.floats(0.2, 12), overhead=st.integers(0, 200), lengths=lengths)
async def test_the_search_comes_close_and_never_goes_over(ratio: float, overhead: int, lengths: list[int]) -> None:
    measure = Counting(ratio, overhead)
    for length in lengths:
        calls = measure.calls
        need = await SizeSearch(measure, length).fit()
        assert need.tokens == measure.tokens(need.size)
        assert need.tokens <= length
        assert need.tokens >= 0.97 * length or measure.tokens(need.size + 1) > length
        assert measure.calls - calls <= 5


@given(
    ratio=st.floats(0.2, 12),
    overhead=st.integers(0, 200),
    step=st.integers(1, 300),
    smallest=st.integers(1, 400),
    length=st.integers(256, 40_000),
    slack=st.floats(1.0, 2.0),
)
def test_steps_smallest_sizes_and_refusals_do_not_lead_over_the_length(
    ratio: float, overhead: int, step: int, smallest: int, length: int, slack: float
) -> None:
    measure = Counting(ratio, overhead, step, smallest, limit=int(length * slack))
    need = asyncio.run(SizeSearch(measure, length).fit())
    if measure.tokens(1) > length:
        assert not need.fits(length)
        assert need.size == 1
    else:
        assert need.tokens is not None
        assert need.tokens <= length
        # What is left free is less than one step, or a small part.
        assert need.tokens >= 0.95 * length or measure.tokens(need.size + 2 * step) > length
    assert measure.calls <= 11


async def test_a_start_that_is_right_is_measured_once() -> None:
    measure = Counting(1.3, 20)
    need = await SizeSearch(measure, 4096).fit(start=3110)
    assert (need.size, measure.calls) == (3110, 2)


@given(st.integers(2, 100_000), st.integers(128, 100_000), st.floats(0.2, 8))
def test_shrinking_a_sample_ends_below_the_length(size: int, length: int, ratio: float) -> None:
    answer = 64
    for _ in range(4):
        tokens = math.ceil(size * ratio)
        if tokens + answer <= length:
            break
        smaller = smaller_size(size, length, tokens, answer)
        if smaller is None:
            assert length - answer < 2 * ratio + 1
            return
        assert smaller < size
        size = smaller
    assert math.ceil(size * ratio) + answer <= length


def test_a_sample_refused_uncounted_shrinks_a_little_and_not_for_ever() -> None:
    sizes = [3]
    while (smaller := smaller_size(sizes[-1], 4096, None, 10)) is not None:
        sizes.append(smaller)
    assert sizes == [3, 2, 1]
    assert smaller_size(1000, 4096, None, 10) == 950


@pytest.fixture(scope="module")
def generator() -> Iterator[SampleGenerator]:
    with SampleGenerator(tiny_tasks, workers=1) as made:
        yield made


def _tokens(fake: FakeModel, task: str, seed: int, length: int, index: int, size: int) -> int:
    sample = prepare(tiny_tasks()[task], SampleKey(seed, task, length, index), size)
    return fake.count(sample.prompt) + fake.template_tokens + sample.answer_tokens


@pytest.mark.parametrize("has_tokenize", [True, False])
async def test_sizes_from_a_server_fit_its_own_count(generator: SampleGenerator, has_tokenize: bool) -> None:
    fake = FakeModel(has_tokenize=has_tokenize, tokens_per_word=3, template_tokens=41, max_tokens=4096)
    with serving(fake) as url:
        async with OpenAIClient(url, model="fake-1") as client:
            counter = await token_counter(client)
            assert isinstance(counter, TokenizeCounter if has_tokenize else UsageCounter)
            sizer = TaskSizer("tiny_four", 0, generator, counter)
            for length in (512, 2048, 4096):
                sizes = (await sizer.cell(length, 5)).sizes
                used = [_tokens(fake, "tiny_four", 0, length, index, size) for index, size in enumerate(sizes)]
                assert max(used) <= length
                assert sum(used) / len(used) >= 0.97 * length
    assert (fake.tokenize_calls > 0) == has_tokenize


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_uneven_samples_get_sizes_of_their_own(generator: SampleGenerator, seed: int) -> None:
    fake = FakeModel()

    class Exact:
        samples, cheap = 4, True

        async def count(self, prompt: str, given: str = "") -> int | None:
            return fake.count(prompt + given) + fake.template_tokens

    async def cell() -> tuple[int, ...]:
        return (await TaskSizer("uneven", seed, generator, Exact()).cell(2048, 12)).sizes

    sizes = asyncio.run(cell())
    used = [_tokens(fake, "uneven", seed, 2048, index, size) for index, size in enumerate(sizes)]
    assert max(used) <= 2048
    assert min(used) >= 0.97 * 2048
    assert len(set(sizes)) > 1


async def test_uneven_samples_get_one_size_where_counting_is_dear(generator: SampleGenerator) -> None:
    fake = FakeModel(has_tokenize=False)
    with serving(fake) as url:
        async with OpenAIClient(url, model="fake-1") as client:
            sizes = (await TaskSizer("uneven", 3, generator, UsageCounter(client)).cell(2048, 40)).sizes
    assert len(sizes) == 40
    assert len(set(sizes)) == 1


async def test_a_length_below_the_smallest_sample_does_not_fit(generator: SampleGenerator) -> None:
    fake = FakeModel()
    with serving(fake) as url:
        async with OpenAIClient(url, model="fake-1") as client:
            sizes = await TaskSizer("tiny_four", 0, generator, await token_counter(client)).cell(30, 5)
    assert sizes.sizes == ()
    assert sizes.smallest_tokens is not None
    assert sizes.smallest_tokens > 30 + ANSWER_TOKENS


def test_a_sample_depends_on_its_key_alone() -> None:
    task = tiny_tasks()["tiny_one"]
    keys = [SampleKey(seed, "tiny_one", length, index) for seed in (0, 1) for length in (512, 1024) for index in (0, 1)]
    made = {key: prepare(task, key, 100).prompt for key in keys}
    assert len(set(made.values())) == len(keys)
    random.seed(5)
    assert {key: prepare(task, key, 100).prompt for key in reversed(keys)} == made
