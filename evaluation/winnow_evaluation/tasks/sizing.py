"""How many English words make a sample that fills a length in the served model's tokens.

A task's size is in words; a cell's length is in tokens of the prompt, chat template included, and the answer. Words and
tokens are close to proportional, so a straight line through what was measured finds the size in a few steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from winnow_evaluation.tasks.generation import SampleGenerator, SampleKey

_AIM = 0.992
"""The part of the length that the next guess aims at."""
_CLOSE_ENOUGH = 0.985
"""The search ends when this part of the length is in use."""
_MAX_STEPS = 10
_MAX_GROWTH = 8
_ALIKE = 0.015
"""Samples of one size that differ by a larger part in their tokens get a size each."""
_COUNTED_AT_ONCE = 8
SEAM_TOKENS = 2
"""Room for tokens that merge differently where a text meets the chat template."""


class TokenCounter(Protocol):
    """Counts the tokens of a whole prompt, chat template included.

    Attributes:
        samples: how many samples are worth counting for one measurement.
        cheap: whether counting every sample of a cell is cheap beside answering it.
    """

    samples: int
    cheap: bool

    async def count(self, prompt: str, given: str = "") -> int | None:
        """The number of tokens, with those that begin the answer; None if the prompt is too long for the server."""


@dataclass(frozen=True)
class Need:
    """Tokens, prompt and answer together, that samples of one size need.

    Attributes:
        tokens: what samples of this size are expected to stay within; None if the server refused a prompt so long.
        spread: how far the measured samples lie apart, as a part of the largest.
    """

    size: int
    tokens: int | None
    spread: float = 0.0

    def fits(self, length: int) -> bool:
        return self.tokens is not None and self.tokens <= length


Measure = Callable[[int], Awaitable[Need]]
"""Measures samples of a size in words."""


def measure_of(keys: Sequence[SampleKey], generator: SampleGenerator, counter: TokenCounter) -> Measure:
    """Measure these samples with a counter."""

    async def need(key: SampleKey, size: int) -> int | None:
        sample = await generator.submit(key, size)
        prompt_tokens = await counter.count(sample.prompt, sample.given)
        return None if prompt_tokens is None else prompt_tokens + sample.answer_tokens

    async def measure(size: int) -> Need:
        needs = await asyncio.gather(*(need(key, size) for key in keys))
        known = [tokens for tokens in needs if tokens is not None]
        if len(known) < len(needs):
            return Need(size, None)
        # The range of a few samples again, above the largest of them: about three standard deviations over the mean.
        # One sample is its own measure and needs no margin.
        margin = max(known) - min(known)
        return Need(size, max(known) + margin, margin / max(known))

    return measure


class SizeSearch:
    """Finds the size of some samples for one length.

    It starts from nothing for every length, so that the size does not depend on which lengths were asked for before:
    two runs that share a cell share its prompts.
    """

    def __init__(self, measure: Measure, length: int) -> None:
        self._measure = measure
        self._length = length
        self._needs: dict[int, Need] = {}

    async def fit(self, start: int | None = None) -> Need:
        """The need of the largest size found that fits the length; of the smallest size if even that does not.

        Args:
            start: a size that is likely to be close.
        """
        smallest = await self._need(1)
        if not smallest.fits(self._length):
            return smallest
        if start is not None:
            await self._need(start)
        for step in range(_MAX_STEPS):
            best, above = self._bracket()
            if best.tokens is not None and best.tokens >= _CLOSE_ENOUGH * self._length:
                break
            size = self._guess(best, above, halve=step >= _MAX_STEPS // 2 and step % 2 == 1)
            if size is None:
                break
            await self._need(size)
        return self._bracket()[0]

    async def _need(self, size: int) -> Need:
        if size not in self._needs:
            self._needs[size] = await self._measure(size)
        return self._needs[size]

    def _bracket(self) -> tuple[Need, Need | None]:
        """The largest size known to fit, and the next larger one known, which does not."""
        best = max((need for need in self._needs.values() if need.fits(self._length)), key=lambda need: need.size)
        above = [need for need in self._needs.values() if need.size > best.size]
        return best, min(above, key=lambda need: need.size, default=None)

    def _guess(self, best: Need, above: Need | None, *, halve: bool) -> int | None:
        """A size worth measuring, strictly within the bracket; None if there is none."""
        quarter = self._length // 4
        lowest = best.size + 1
        highest = above.size - 1 if above else max(lowest, best.size * _MAX_GROWTH, quarter)
        if lowest > highest:
            return None
        if above and (halve or above.tokens is None):
            return (best.size + above.size) // 2
        line = self._line(best, above)
        if line is None:
            # One point, or a stretch in which a larger size changes nothing.
            guess = quarter if best.size < quarter else 2 * best.size
        else:
            guess = best.size + int((_AIM * self._length - (best.tokens or 0)) / line)
        return min(max(guess, lowest), highest)

    def _line(self, best: Need, above: Need | None) -> float | None:
        """Tokens for each word around the best size; None if it is not known or not rising."""
        below = [need for need in self._needs.values() if need.size < best.size and need.tokens is not None]
        other = above or max(below, key=lambda need: need.size, default=None)
        if other is None or other.tokens is None or best.tokens is None:
            return None
        slope = (other.tokens - best.tokens) / (other.size - best.size)
        return slope if slope > 0 else None


@dataclass(frozen=True)
class CellSizes:
    """The sizes of a cell's samples, one for each index.

    Attributes:
        smallest_tokens: when the cell does not fit, what its smallest samples need; ``sizes`` is empty then. It is 0
            if not known, because the server refused them.
    """

    sizes: tuple[int, ...] = ()
    smallest_tokens: int | None = None


class TaskSizer:
    """Sizes of one task's samples."""

    def __init__(self, task: str, seed: int, generator: SampleGenerator, counter: TokenCounter) -> None:
        self._task = task
        self._seed = seed
        self._generator = generator
        self._counter = counter
        # Others than the samples of the evaluation: a server that caches prefixes must not have read those before.
        probes = [SampleKey(seed, task, "sizing", index) for index in range(counter.samples)]
        self._measure_probes = measure_of(probes, generator, counter)

    async def cell(self, length: int, samples: int) -> CellSizes:
        """One size for all samples of the cell if samples of a size are alike, else one for each.

        Raises:
            RequestError: the server failed to count.
        """
        common = await SizeSearch(self._measure_probes, length).fit()
        if not common.fits(length):
            return CellSizes(smallest_tokens=common.tokens or 0)
        if common.spread <= _ALIKE or not self._counter.cheap:
            return CellSizes((common.size,) * samples)
        return CellSizes(tuple(await self._sizes_of_each(length, samples, common.size)))

    async def _sizes_of_each(self, length: int, samples: int, start: int) -> list[int]:
        at_once = asyncio.Semaphore(_COUNTED_AT_ONCE)

        async def size(index: int) -> int:
            key = SampleKey(self._seed, self._task, length, index)
            measure = measure_of([key], self._generator, self._counter)
            async with at_once:
                return (await SizeSearch(measure, length).fit(start)).size

        return await asyncio.gather(*(size(index) for index in range(samples)))


def smaller_size(size: int, length: int, prompt_tokens: int | None, answer_tokens: int) -> int | None:
    """The size to try next for a single sample that went over the length; None if it cannot be made smaller.

    Args:
        prompt_tokens: what the sample's prompt had, or None if the server refused it uncounted.
    """
    room = length - answer_tokens
    part = 0.95 if prompt_tokens is None else min(0.99, 0.99 * room / prompt_tokens)
    smaller = min(size - 1, int(size * part))
    return smaller if smaller >= 1 else None
