"""Samples made in worker processes, each from a seed of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Self

from winnow_evaluation.tasks import TASKS
from winnow_evaluation.tasks.sample import Task

Catalogue = Callable[[], Mapping[str, Task]]
"""A function at the top level of a module that gives the tasks by name: worker processes import it."""

_MAX_WORKERS = 8


def builtin_tasks() -> Mapping[str, Task]:
    """The tasks that Winnow ships."""
    return TASKS


@dataclass(frozen=True)
class SampleKey:
    """What a sample's text depends on, beside its size.

    Attributes:
        stream: the cell's length in tokens, or ``sizing`` for samples that only measure.
    """

    seed: int
    task: str
    stream: int | str
    index: int

    def rng(self) -> random.Random:
        """The sample's own random numbers, whatever was made before it and wherever."""
        return random.Random(f"{self.seed}/{self.task}/{self.stream}/{self.index}")


@dataclass(frozen=True)
class PreparedSample:
    """A sample as it is put to the server; ``given`` begins the answer."""

    prompt: str
    given: str
    references: tuple[str, ...]
    answer_tokens: int


def prepare(task: Task, key: SampleKey, size: int) -> PreparedSample:
    """Make the sample of ``key`` at ``size`` words; the same arguments give the same sample."""
    sample = task.make(key.rng(), size)
    return PreparedSample(
        prompt=sample.prompt,
        given=sample.questions[0].given,
        references=sample.questions[0].references,
        answer_tokens=task.answer_tokens(size),
    )


class SampleGenerator:
    """A pool of processes that make samples, so that a fast server does not wait for text."""

    def __init__(self, catalogue: Catalogue, workers: int | None = None) -> None:
        """
        Args:
            catalogue: the tasks.
            workers: how many processes; by default one for each CPU, up to 8.
        """
        self._pool = ProcessPoolExecutor(
            max_workers=workers or min(len(os.sched_getaffinity(0)), _MAX_WORKERS),
            # A fork would copy a process that already runs threads.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
        )
        self._catalogue = catalogue

    def submit(self, key: SampleKey, size: int) -> asyncio.Future[PreparedSample]:
        """Start making a sample; call it with an event loop running."""
        return asyncio.get_running_loop().run_in_executor(self._pool, _prepare_in_worker, self._catalogue, key, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group; the parent is the one that answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# Tasks hold functions that cannot be sent to another process: a worker gets the function that gives them.
def _prepare_in_worker(catalogue: Catalogue, key: SampleKey, size: int) -> PreparedSample:
    return prepare(catalogue()[key.task], key, size)
