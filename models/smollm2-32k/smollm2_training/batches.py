"""Batches of rows of one length, half of them real text and half conversations, made ahead by worker processes."""

from __future__ import annotations

import collections
import multiprocessing
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from smollm2_training.packed import PackedText
from smollm2_training.rows import Rows


@dataclass(frozen=True)
class Source:
    """What batches are made from.

    Attributes:
        tokenizer: the model's ``tokenizer.json``.
        text: folder of the training text as plain arrays (``PackedText.unpack``).
        tokens: tokens of each batch, all rows together; a multiple of every length.
        seed: draws everything, with the step's number.
    """

    tokenizer: Path
    text: Path
    tokens: int
    seed: int


@dataclass(frozen=True)
class Batch:
    """Rows of one length.

    Attributes:
        tokens: int32 [rows, length], real text first, conversations padded with 0 at their end.
        text_rows: how many are real text.
        places: int64 [answers' tokens]; where learned tokens of conversations stand in the flattened ``tokens``.
        weights: float32 [answers' tokens]; how much each counts.
        first_answers: for each conversation its kind and the range within ``places`` of its first answer.
    """

    tokens: npt.NDArray[np.int32]
    text_rows: int
    places: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    first_answers: list[tuple[str, int, int]]

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return int(self.tokens.shape[1])


@cache
def _maker(source: Source) -> tuple[PackedText, Rows]:
    tokenizer = Tokenizer.from_file(str(source.tokenizer))
    text = PackedText.mapped(source.text)
    return text, Rows(tokenizer, lambda rng, words: text.sentences(rng, words, tokenizer))


def make_batch(source: Source, step: int, length: int) -> Batch:
    """The batch of ``step``: the same for the same arguments.

    A batch of a single row is text and conversation in turn.
    """
    rng = random.Random(f"{source.seed}/{step}")
    text, rows = _maker(source)
    count = source.tokens // length
    text_rows = count // 2 if count > 1 else step % 2
    tokens = np.zeros((count, length), np.int32)
    for i in range(text_rows):
        tokens[i] = text.row(rng, length)
    places: list[npt.NDArray[np.int64]] = []
    weights: list[npt.NDArray[np.float32]] = []
    first_answers = []
    learned = 0
    for i in range(text_rows, count):
        row = rows.draw(rng, length)
        tokens[i, : len(row.tokens)] = row.tokens
        row_weights = np.array(row.weights, np.float32)
        row_places = np.flatnonzero(row_weights)
        start, end = (learned + int(np.searchsorted(row_places, edge)) for edge in row.first_answer)
        first_answers.append((row.kind, start, end))
        places.append(row_places + i * length)
        weights.append(row_weights[row_places])
        learned += len(row_places)
    empty_places, empty_weights = np.empty(0, np.int64), np.empty(0, np.float32)
    return Batch(
        tokens,
        text_rows,
        np.concatenate(places) if places else empty_places,
        np.concatenate(weights) if weights else empty_weights,
        first_answers,
    )


def batches(
    source: Source, length_of: Callable[[int], int], first: int, stride: int, workers: int
) -> Generator[Batch, None, None]:
    """The batches of steps ``first``, ``first + stride`` and so on, without end.

    Args:
        source: what they are made from.
        length_of: rows' length in a step; asked when the batch is begun, up to three for each worker ahead.
        first: the first step.
        stride: processes that train together, each with its own steps.
        workers: processes that make batches; 0 makes each when it is asked for.
    """
    step = first
    if not workers:
        while True:
            yield make_batch(source, step, length_of(step))
            step += stride
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting: collections.deque[Any] = collections.deque()
        while True:
            while len(waiting) < 3 * workers:
                waiting.append(pool.apply_async(make_batch, (source, step, length_of(step))))
                step += stride
            yield waiting.popleft().get()
