"""The prompts and their true continuations: cut out of real text, or the evaluation's tasks with their answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.task_prompts import make_prompts


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
    model: OfflineModel, documents: Iterable[str], context: int, tokens: int, count: int
) -> list[Continued]:
    """Cut prompts of ``context`` tokens out of documents, with the next ``tokens`` + 1 tokens of the same document.

    Documents that are too short for one are joined with those before them. No two prompts share a token; the first of
    every document come before the second of any.

    Args:
        model: whose tokens they are.
        documents: texts.
        context: tokens of a prompt.
        tokens: how many of what follows are predicted.
        count: how many prompts.

    Raises:
        ValueError: there is not enough text.
    """
    length = context + tokens + 1
    long: list[list[int]] = []
    joined: list[int] = []
    for document in documents:
        own = model.encode(document)
        if len(own) >= length:
            long.append(own)
        elif len(own) > tokens:
            joined += [*model.encode("\n\n"), *own] if joined else own
            if len(joined) >= length:
                # What follows the prompt is the end of the document that came last.
                long.append(joined[-length:])
                joined = []
        if len(long) >= count:
            break
    cut = list(islice(_in_turn(long, length), count))
    if len(cut) < count:
        raise ValueError(f"the text has {len(cut)} pieces of {length} tokens; {count} are asked for")
    return [Continued(piece[:context], piece[context:]) for piece in cut]


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
