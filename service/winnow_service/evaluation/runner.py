"""Puts every sample of every cell to the server. A cell is one task at one length."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from winnow_service.evaluation.client import Answer, OpenAIClient, RequestError
from winnow_service.evaluation.generation import PreparedSample, SampleGenerator, SampleKey
from winnow_service.evaluation.report import CellRow, SampleRecord, measured_row, unfitting_row
from winnow_service.evaluation.scoring import found_fraction
from winnow_service.evaluation.sizing import CellSizes, TaskSizer, TokenCounter, smaller_size, token_counter

_MOST_ATTEMPTS = 8


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        lengths: tokens of prompt and answer together.
        samples: how many in each cell.
        concurrency: how many are under way at once, all of one cell.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    concurrency: int


@dataclass(frozen=True)
class CellResult:
    """A finished cell; no records if it does not fit."""

    row: CellRow
    records: tuple[SampleRecord, ...] = ()


class Progress(Protocol):
    """Is told how far an evaluation is."""

    def sizing(self, task: str, length: int) -> None:
        """The sizes of a cell's samples are being looked for."""

    def asking(self, task: str, length: int) -> None:
        """A cell's samples begin to be asked."""

    def answered(self, record: SampleRecord) -> None:
        """A sample is done."""

    def finished(self, row: CellRow) -> None:
        """A cell is done."""


async def run_plan(
    plan: Plan, client: OpenAIClient, generator: SampleGenerator, progress: Progress
) -> AsyncIterator[CellResult]:
    """Run cell after cell, so that the times of one are not those of another's load.

    Raises:
        RequestError: the server does not answer even a short prompt, or fails to count tokens. What goes wrong with a
            sample is in its record.
    """
    counter = await token_counter(client)
    for task in plan.tasks:
        sizer = TaskSizer(task, plan.seed, generator, counter)
        for length in plan.lengths:
            progress.sizing(task, length)
            sizes = await sizer.cell(length, plan.samples)
            progress.asking(task, length)
            result = await _Cell(plan, task, length, client, generator, counter, progress).run(sizes)
            progress.finished(result.row)
            yield result


@dataclass(frozen=True)
class _Cell:
    plan: Plan
    task: str
    length: int
    client: OpenAIClient
    generator: SampleGenerator
    counter: TokenCounter
    progress: Progress

    async def run(self, sizes: CellSizes) -> CellResult:
        if sizes.smallest_tokens is not None:
            return CellResult(unfitting_row(self.task, self.length, sizes.smallest_tokens))
        under_way = asyncio.Semaphore(self.plan.concurrency)
        asked = []
        async with asyncio.TaskGroup() as group:
            for key, size, sample in self._samples_ahead(sizes.sizes):
                await under_way.acquire()
                task = group.create_task(self._record(key, size, sample))
                task.add_done_callback(lambda _: under_way.release())
                asked.append(task)
        records = tuple(task.result() for task in asked)
        return CellResult(measured_row(self.task, self.length, records), records)

    def _samples_ahead(self, sizes: Iterable[int]) -> Iterator[tuple[SampleKey, int, asyncio.Future[PreparedSample]]]:
        """The cell's samples in order, with some more than are under way in the making."""
        ahead: deque[tuple[SampleKey, int, asyncio.Future[PreparedSample]]] = deque()
        for index, size in enumerate(sizes):
            key = SampleKey(self.plan.seed, self.task, self.length, index)
            ahead.append((key, size, self.generator.submit(key, size)))
            if len(ahead) > self.plan.concurrency:
                yield ahead.popleft()
        yield from ahead

    async def _record(self, key: SampleKey, size: int, made: asyncio.Future[PreparedSample]) -> SampleRecord:
        """Ask one sample; make it smaller and ask again as long as it turns out to be over the length."""
        sample = await made
        for _ in range(_MOST_ATTEMPTS):
            smaller, outcome = await self._ask(sample, size)
            if smaller is None:
                break
            size = smaller
            sample = await self.generator.submit(key, size)
        else:
            if isinstance(outcome, Answer):
                outcome = RequestError(f"over {self.length} tokens in each of {_MOST_ATTEMPTS} attempts to shorten it")
        record = _record_of(key, self.length, size, sample, outcome)
        self.progress.answered(record)
        return record

    async def _ask(self, sample: PreparedSample, size: int) -> tuple[int | None, Answer | RequestError]:
        """The outcome, and a smaller size to try instead if the sample is over the length."""
        outcome: Answer | RequestError
        try:
            outcome = await self.client.ask(sample.prompt, sample.answer_tokens)
            prompt_tokens = outcome.prompt_tokens
        except RequestError as error:
            outcome = error
            if not error.refused:
                return None, outcome
            try:
                prompt_tokens = await self.counter.count(sample.prompt)
            except RequestError:
                return None, outcome
        else:
            if prompt_tokens is None:
                return None, outcome
        if prompt_tokens is not None and prompt_tokens + sample.answer_tokens <= self.length:
            return None, outcome
        smaller = smaller_size(size, self.length, prompt_tokens, sample.answer_tokens)
        if smaller is None:
            return None, RequestError(f"does not fit {self.length} tokens at its smallest size")
        return smaller, outcome


def _record_of(
    key: SampleKey, length: int, size: int, sample: PreparedSample, outcome: Answer | RequestError
) -> SampleRecord:
    answer = outcome if isinstance(outcome, Answer) else None
    return SampleRecord(
        task=key.task,
        length=length,
        seed=key.seed,
        index=key.index,
        size=size,
        prompt_sha256=hashlib.sha256(sample.prompt.encode()).hexdigest(),
        prompt_tokens=answer and answer.prompt_tokens,
        completion_tokens=answer and answer.completion_tokens,
        output=answer.text if answer else "",
        references=sample.references,
        score=found_fraction(answer.text, sample.references) if answer else 0.0,
        latency=answer and answer.latency,
        ttft=answer and answer.ttft,
        tpot=answer and answer.tpot,
        finish_reason=answer and answer.finish_reason,
        attention=dict(answer.attention) if answer and answer.attention else None,
        error=str(outcome) if isinstance(outcome, RequestError) else None,
    )
