"""The prompts and their true continuations: cut out of real text, or the evaluation's tasks with their answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Final

from winnow_evaluation.offline_model import OfflineModel

_SEED: Final = 0
_CHARACTERS: Final = 12
"""More than prose or code has in a token."""


@dataclass(frozen=True)
class Continued:
    """A prompt, and what follows it.

    Attributes:
        tokens: of the prompt.
        following: tokens behind it; all but the last are fed, all but the first are predicted.
    """

    tokens: Sequence[int]
    following: Sequence[int]


def from_documents(
    model: OfflineModel, documents: Sequence[str], context: int, tokens: int, count: int
) -> list[Continued]:
    """Cut prompts of ``context`` tokens out of documents, with the next ``tokens`` + 1 tokens of the same document.

    A prompt begins as the model's texts do: the tokens for that are among its ``context``.

    Documents come in an order that is drawn once and for all: no package has more than its part. Where there are not
    enough that are long enough, a document gives several prompts, and short ones are joined. No two prompts share a
    token.

    Args:
        model: whose tokens they are.
        documents: texts.
        context: tokens of a prompt.
        tokens: how many of what follows are predicted.
        count: how many prompts.

    Raises:
        ValueError: there is not enough text.
    """
    first = model.first_tokens
    length = context - len(first) + tokens + 1
    drawn = list(documents)
    random.Random(_SEED).shuffle(drawn)
    # Their beginnings are mostly enough, and encoded sooner.
    beginnings = [document[: _CHARACTERS * length] for document in drawn]
    cut = _cut(model, beginnings, length, count)
    if len(cut) < count:
        cut = _cut(model, drawn, length, count)
    if len(cut) < count:
        cut += islice(_joined(model, drawn, length, tokens), count - len(cut))
    if len(cut) < count:
        raise ValueError(f"the text has {len(cut)} pieces of {length} tokens; {count} are asked for")
    whole = [[*first, *piece] for piece in cut]
    return [Continued(piece[:context], piece[context:]) for piece in whole]


def _cut(model: OfflineModel, documents: Sequence[str], length: int, count: int) -> list[Sequence[int]]:
    """Return up to ``count`` pieces of documents: of each in turn its next."""
    long: list[Sequence[int]] = []
    for document in documents:
        if len(long) == count:
            break
        # A token has a character or more: what is shorter need not be encoded.
        if len(document) >= length and len(own := model.encode(document)) >= length:
            long.append(own)
    return list(islice(_in_turn(long, length), count))


def _joined(model: OfflineModel, documents: Iterable[str], length: int, tokens: int) -> Iterator[Sequence[int]]:
    """Yield pieces of several documents each, that end with the end of one."""
    break_between = model.encode("\n\n")
    joined: list[int] = []
    for document in documents:
        own = model.encode(document)
        # What follows the prompt is of one document; those that are long enough were cut.
        if tokens < len(own) < length:
            joined += [*break_between, *own]
            if len(joined) >= length:
                yield joined[-length:]
                joined = []


def _in_turn(documents: Sequence[Sequence[int]], length: int) -> Iterator[Sequence[int]]:
    pieces = ([own[at : at + length] for at in range(0, len(own) - length + 1, length)] for own in documents)
    for of_all in zip_longest(*pieces):
        yield from (piece for piece in of_all if piece is not None)


def from_tasks(
    model: OfflineModel, tasks: Sequence[str], context: int, tokens: int, count: int, seed: int
) -> list[Continued]:
    """Make the prompts that ``winnow eval`` puts to this model, with the tasks' own answers, dealt out in turn.

    Answers have at most ``tokens`` + 1 tokens, the one that ends them included.

    Raises:
        ValueError: a task does not fit the context.
    """
    # The evaluation's client needs libraries that real text does without.
    from winnow_evaluation.task_prompts import make_prompts  # noqa: PLC0415

    each = -(-count // len(tasks))
    made = zip(*(make_prompts(model, task, context, each, seed) for task in tasks), strict=True)
    prompts = [prompt for of_all in made for prompt in of_all][:count]
    end = model.end_tokens[:1]
    return [Continued(prompt.tokens, [*prompt.answer, *end][: tokens + 1]) for prompt in prompts]


def read_folder(folder: Path) -> list[str]:
    """Return the text files of a folder, and of those in it, in the order of their names.

    Raises:
        ValueError: there are none, or one is not UTF-8.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8") from error
    if not texts:
        raise ValueError(f"{folder} has no files")
    return texts
