"""``winnow eval``'s prompts for a model that runs outside of any server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.tasks.generation import PreparedSample, SampleGenerator, SampleKey, prepare
from winnow_evaluation.tasks.sizing import SEAM_TOKENS, TaskSizer, smaller_size

_MAX_ATTEMPTS = 8


@dataclass(frozen=True)
class Prompt:
    """One prompt of the evaluation.

    Attributes:
        tokens: chat template included.
        answer: tokens of the answer in the form a model is trained to give, without one that ends it.
    """

    task: str
    length: int
    index: int
    tokens: Sequence[int]
    answer: Sequence[int]


def make_prompts(model: OfflineModel, task: str, length: int, samples: int, seed: int) -> list[Prompt]:
    """Make the prompts that ``winnow eval`` puts to this model, fitted to ``length`` tokens in the same way.

    Raises:
        ValueError: the task does not fit the length.
    """
    generator = _InProcess()
    sizer = TaskSizer(task, seed, generator, _Counter(model))
    cell = asyncio.run(sizer.cell(length, samples))
    if cell.smallest_tokens is not None:
        raise ValueError(f"{task}: needs at least {cell.smallest_tokens} tokens; the length is {length}")
    return [_fitting_prompt(model, task, length, seed, index, size) for index, size in enumerate(cell.sizes)]


def _fitting_prompt(model: OfflineModel, task: str, length: int, seed: int, index: int, size: int) -> Prompt:
    for _ in range(_MAX_ATTEMPTS):
        sample = TASKS[task].make(SampleKey(seed, task, length, index).rng(), size)
        tokens = model.encode_message(sample.prompt)
        answer_tokens = TASKS[task].answer_tokens(size)
        if len(tokens) + answer_tokens <= length:
            return Prompt(task, length, index, tokens, model.encode(sample.questions[0].answer))
        size = smaller_size(size, length, len(tokens), answer_tokens) or 1
    raise ValueError(f"{task}: sample {index} is over {length} tokens in each of {_MAX_ATTEMPTS} attempts")


class _Counter:
    """Counts tokens as ``winnow eval`` does with a server's help."""

    samples = 4
    cheap = True

    def __init__(self, model: OfflineModel) -> None:
        self._model = model

    async def count(self, prompt: str, given: str = "") -> int | None:
        return len(self._model.encode_message(prompt)) + len(self._model.encode(given)) + SEAM_TOKENS


class _InProcess(SampleGenerator):
    """Makes samples when asked: worker processes would each import what this process has imported."""

    def __init__(self) -> None:
        pass

    def submit(self, key: SampleKey, size: int) -> asyncio.Future[PreparedSample]:
        future: asyncio.Future[PreparedSample] = asyncio.get_running_loop().create_future()
        future.set_result(prepare(TASKS[key.task], key, size))
        return future
