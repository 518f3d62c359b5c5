"""Puts every sample of every cell to the server, with every policy. A cell is one task at one length."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

from winnow_evaluation.over_http.answers import Answer, RequestError
from winnow_evaluation.over_http.policies import NO_POLICY, AskedPolicy, not_followed
from winnow_evaluation.over_http.report import CellRow, SampleRecord, measured_row
from winnow_evaluation.over_http.token_counts import token_counter
from winnow_evaluation.tasks.generation import PreparedSample, SampleGenerator, SampleKey
from winnow_evaluation.tasks.scoring import found_fraction
from winnow_evaluation.tasks.sizing import CellSizes, TaskSizer, TokenCounter, smaller_size

if TYPE_CHECKING:
    from winnow_evaluation.over_http.client import OpenAIClient
    from winnow_evaluation.over_http.requests import Prompt

_MAX_ATTEMPTS = 8
_KEPT_OF_ANSWER = ("prompt_tokens", "completion_tokens", "latency", "ttft", "tpot", "finish_reason")
_PROBE = "Which way does the river run?"
_PROBE_GIVEN = " The river runs"


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        lengths: tokens of prompt and answer together.
        samples: how many in each cell.
        concurrency: how many requests are under way at once, all of one cell.
        answers_given: whether samples come with the beginning of their answers, which the server must continue.
        policies: each sample is asked with all of them, first with the first, with which the others are compared.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    concurrency: int
    policies: tuple[AskedPolicy, ...] = (NO_POLICY,)
    answers_given: bool = False

    @property
    def samples_at_once(self) -> int:
        """Enough for all requests to be under way, though every sample waits for its first answer and for its slowest.

        The fewer, the fewer prompts the server's cache must hold.
        """
        return self.concurrency if len(self.policies) == 1 else 3 * ceil(self.concurrency / len(self.policies))


@dataclass(frozen=True)
class CellResult:
    """A finished cell, a row for each policy; no records if it does not fit."""

    rows: tuple[CellRow, ...]
    records: tuple[SampleRecord, ...] = ()


class Progress(Protocol):
    """Shows how far an evaluation is."""

    def sizing(self, task: str, length: int) -> None: ...
    def asking(self, task: str, length: int) -> None: ...
    def answered(self, record: SampleRecord) -> None: ...
    def finished(self, row: CellRow) -> None: ...


async def run_plan(
    plan: Plan, client: OpenAIClient, generator: SampleGenerator, progress: Progress
) -> AsyncIterator[CellResult]:
    """Run cell after cell, so that the times of one are not those of another's load.

    Raises:
        RequestError: the server does not answer even a short prompt, refuses a policy or the beginning of an answer, or
            fails to count tokens. What goes wrong with a sample is in its record.
    """
    await _check_policies(plan.policies, client)
    if plan.answers_given:
        await client.check_continues(_PROBE, _PROBE_GIVEN)
    counter = await token_counter(client)
    for task in plan.tasks:
        sizer = TaskSizer(task, plan.seed, generator, counter)
        for length in plan.lengths:
            progress.sizing(task, length)
            sizes = await sizer.cell(length, plan.samples)
            progress.asking(task, length)
            requests = asyncio.Semaphore(plan.concurrency)
            result = await _Cell(plan, task, length, client, generator, counter, progress, requests).run(sizes)
            for row in result.rows:
                progress.finished(row)
            yield result


async def _check_policies(policies: Iterable[AskedPolicy], client: OpenAIClient) -> None:
    """Ask each policy a short prompt: what the server refuses is better known before the first cell than in the last.

    Raises:
        RequestError: a policy's request failed, or the server tells that it did something else.
    """
    for policy in policies:
        if policy.attention is None:
            continue
        try:
            reported = await client.with_attention(policy.attention).reported_attention(_PROBE)
        except RequestError as error:
            raise RequestError(f"policy {policy.label}: {error}", error.status) from error
        if reported is not None and (other := not_followed(policy.attention, reported)) is not None:
            raise RequestError(
                f"policy {policy.label}: {other}. SGLang does not read a request's 'attention': "
                "is --url that of the service in front of it?"
            )


@dataclass(frozen=True)
class _Outcome:
    """An answer, and a smaller size to try instead if the sample is over the length."""

    answer: Answer | RequestError
    smaller: int | None = None


@dataclass(frozen=True)
class _Cell:
    plan: Plan
    task: str
    length: int
    client: OpenAIClient
    generator: SampleGenerator
    counter: TokenCounter
    progress: Progress
    requests: asyncio.Semaphore

    async def run(self, sizes: CellSizes) -> CellResult:
        if sizes.smallest_tokens is not None:
            about: dict[str, Any] = {"task": self.task, "length": self.length, "smallest_tokens": sizes.smallest_tokens}
            labels = (policy.label for policy in self.plan.policies)
            return CellResult(tuple(CellRow(**about, policy=label, status="does not fit") for label in labels))
        under_way = asyncio.Semaphore(self.plan.samples_at_once)
        asked = []
        async with asyncio.TaskGroup() as group:
            for key, size, sample in self._samples_ahead(sizes.sizes):
                await under_way.acquire()
                task = group.create_task(self._records(key, size, sample))
                task.add_done_callback(lambda _: under_way.release())
                asked.append(task)
        samples = [task.result() for task in asked]
        of_policies = list(zip(*samples, strict=True))
        rows = [measured_row(self.task, self.length, of_policies[0])]
        rows += [measured_row(self.task, self.length, records, of_policies[0]) for records in of_policies[1:]]
        return CellResult(tuple(rows), tuple(record for sample in samples for record in sample))

    def _samples_ahead(self, sizes: Iterable[int]) -> Iterator[tuple[SampleKey, int, asyncio.Future[PreparedSample]]]:
        """The cell's samples in order, with some more than are under way in the making."""
        ahead: deque[tuple[SampleKey, int, asyncio.Future[PreparedSample]]] = deque()
        for index, size in enumerate(sizes):
            key = SampleKey(self.plan.seed, self.task, self.length, index)
            ahead.append((key, size, self.generator.submit(key, size)))
            if len(ahead) > self.plan.samples_at_once:
                yield ahead.popleft()
        yield from ahead

    async def _records(
        self, key: SampleKey, size: int, made: asyncio.Future[PreparedSample]
    ) -> tuple[SampleRecord, ...]:
        """Ask one sample with every policy; make it smaller and ask again as long as it is over the length.

        Its records are all of one prompt, so that the policies can be compared sample by sample.
        """
        sample = await made
        for _ in range(_MAX_ATTEMPTS):
            smaller, outcomes = await self._ask_all(sample, size)
            if smaller is None:
                break
            size = smaller
            sample = await self.generator.submit(key, size)
        else:
            last = outcomes[-1]
            if isinstance(last, Answer):
                last = RequestError(f"over {self.length} tokens in each of {_MAX_ATTEMPTS} attempts to shorten it")
            outcomes = [last] * len(self.plan.policies)
        records = tuple(
            _record_of(key, self.length, policy, size, sample, outcome)
            for policy, outcome in zip(self.plan.policies, outcomes, strict=True)
        )
        for record in records:
            self.progress.answered(record)
        return records

    async def _ask_all(self, sample: PreparedSample, size: int) -> tuple[int | None, Sequence[Answer | RequestError]]:
        """The outcome of each policy; with a smaller size to try instead, of those that were asked until then."""
        try:
            prompt = await self.client.prepared(sample.prompt, sample.given)
        except RequestError as error:
            return None, [error] * len(self.plan.policies)
        first, *others = self.plan.policies
        # The first has the prompt prefilled, and the others find it in the server's cache.
        outcomes = [await self._ask(first, prompt, sample, size)]
        if outcomes[0].smaller is None:
            outcomes += await asyncio.gather(*(self._ask(policy, prompt, sample, size) for policy in others))
        smaller = [outcome.smaller for outcome in outcomes if outcome.smaller is not None]
        return min(smaller, default=None), [outcome.answer for outcome in outcomes]

    async def _ask(self, policy: AskedPolicy, prompt: Prompt, sample: PreparedSample, size: int) -> _Outcome:
        answer: Answer | RequestError
        try:
            async with self.requests:
                answer = await self.client.with_attention(policy.attention).ask(prompt, sample.answer_tokens)
            prompt_tokens = answer.prompt_tokens
        except RequestError as error:
            answer = error
            if not error.refused:
                return _Outcome(answer)
            try:
                prompt_tokens = await self.counter.count(sample.prompt, sample.given)
            except RequestError:
                return _Outcome(answer)
        else:
            if prompt_tokens is None:
                return _Outcome(answer)
        if prompt_tokens is not None and prompt_tokens + sample.answer_tokens <= self.length:
            return _Outcome(answer)
        smaller = smaller_size(size, self.length, prompt_tokens, sample.answer_tokens)
        if smaller is None:
            return _Outcome(RequestError(f"does not fit {self.length} tokens at its smallest size"))
        return _Outcome(answer, smaller)


def _record_of(
    key: SampleKey, length: int, policy: AskedPolicy, size: int, sample: PreparedSample, outcome: Answer | RequestError
) -> SampleRecord:
    answer = outcome if isinstance(outcome, Answer) else None
    return SampleRecord(
        task=key.task,
        length=length,
        policy=policy.label,
        seed=key.seed,
        index=key.index,
        size=size,
        prompt_sha256=hashlib.sha256((sample.prompt + sample.given).encode()).hexdigest(),
        output=answer.text if answer else "",
        references=sample.references,
        score=found_fraction(answer.text, sample.references) if answer else 0.0,
        **{name: answer and getattr(answer, name) for name in _KEPT_OF_ANSWER},
        attention=dict(answer.attention) if answer and answer.attention else None,
        error=str(outcome) if isinstance(outcome, RequestError) else None,
    )
