"""What a model's attention meets behind a prompt: all layers' keys and values, and the queries of some tokens.

    python -m benchmarks.fidelity.captured_attention smollm2 --context 7648 --prompts 3 --output captured.pt

Text goes through the model with dense attention. Prompts are those of ``winnow fidelity``, or of the evaluation's
tasks. What estimates may learn beforehand, of keys and of queries, comes from other text: the validation split's prose,
or a task's prompt with another seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self

import torch
import typer
from torch import Tensor

from benchmarks.dense_pass import run_densely
from winnow_evaluation.fidelity.prompts import Continued, from_documents, from_tasks
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.options import parse_tasks
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.text import load_text
from winnow_kernels.indexes.key_codes import BLOCK
from winnow_service.cli.models import resolved

NEWEST: Final = 32
"""Tokens at the end of a text, of which queries are kept."""
_OTHER_SEED: Final = 1


@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments over a text, float32 [layers, KV heads, head dim, head dim] each.

    Attributes:
        queries: of the queries of a KV head's group.
        residuals: of what keys differ by from the mean of their block of 16.
    """

    queries: Tensor
    residuals: Tensor


@dataclass(frozen=True, eq=False)
class Prompt:
    """What attention meets at the end of one text.

    Attributes:
        keys: float32 [layers, tokens, KV heads, head dim]; rotated, as the KV cache has them.
        values: float32, same shape.
        queries: float32 [layers, queries, query heads, head dim].
        lengths: of each query the tokens that it sees.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    lengths: list[int]


@dataclass(frozen=True, eq=False)
class CapturedAttention:
    """What a model's attention has met.

    Attributes:
        about: what a record's header says of it.
        scale: of attention scores.
        prompts: one for each text.
        moments: of other text.
    """

    about: dict[str, Any]
    scale: float
    prompts: list[Prompt]
    moments: Moments

    def write(self, path: Path) -> None:
        """Write a file that ``read`` reads."""
        content = {"about": self.about, "scale": self.scale, "moments": vars(self.moments)}
        torch.save(content | {"prompts": [vars(prompt) for prompt in self.prompts]}, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote.

        Raises:
            ValueError: it is something else.
        """
        content = torch.load(path, weights_only=True, mmap=True)
        try:
            prompts = [Prompt(**prompt) for prompt in content["prompts"]]
            return cls(content["about"], content["scale"], prompts, Moments(**content["moments"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: holds no captured attention") from error


def capture(model: OfflineModel, tokens: list[int], every: int) -> tuple[Prompt, float]:
    """Run a model over ``tokens``; return what it meets behind them, and the scale of its scores.

    Args:
        model: that reads.
        tokens: of a text.
        every: of the last 32 tokens, the queries of every so many are kept.
    """
    lengths = list(range(len(tokens) - NEWEST + every, len(tokens) + 1, every))
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    scales: list[float] = []

    def note(_layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        of_queries = queries[[length - 1 for length in lengths]].float()
        kept.append((keys.float().contiguous(), values.float().contiguous(), of_queries))
        scales.append(scale)

    run_densely(model, tokens, note)
    keys, values, queries = (torch.stack(found) for found in zip(*kept, strict=True))
    return Prompt(keys, values, queries, lengths), scales[0]


def moments(model: OfflineModel, tokens: list[int]) -> Moments:
    """Run a model over ``tokens``; return the second moments of its queries and of its keys' residuals."""
    kept: list[tuple[Tensor, Tensor]] = []

    def note(_layer: int, queries: Tensor, keys: Tensor, _values: Tensor, _scale: float) -> None:
        queries, keys = queries.float(), keys.float()
        own = queries.unflatten(1, (keys.shape[1], -1)).transpose(0, 1).flatten(1, 2)
        blocks = keys[: len(keys) // BLOCK * BLOCK].unflatten(0, (-1, BLOCK))
        residuals = (blocks - blocks.mean(1, keepdim=True)).flatten(0, 1).transpose(0, 1)
        kept.append((own.mT @ own / own.shape[1], residuals.mT @ residuals / residuals.shape[1]))

    run_densely(model, tokens, note)
    return Moments(*(torch.stack(found) for found in zip(*kept, strict=True)))


def main(
    model: Annotated[str, typer.Argument(help="Name of a model, or a model's folder.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Where to write what is captured.")],
    context: Annotated[int, typer.Option(min=64, help="Tokens of a prompt; 32 follow it.")] = 7648,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts.")] = 3,
    every: Annotated[int, typer.Option(min=1, max=NEWEST, help="Of so many queries, one is kept.")] = 4,
    other: Annotated[int, typer.Option(min=64, help="Tokens of other text.")] = 7648,
    tasks: Annotated[str | None, typer.Option(help="Tasks of winnow eval instead of prose, with commas.")] = None,
) -> None:
    """Capture keys, values and queries."""
    network = OfflineModel(resolved(model), torch.device("cpu"))
    chosen = None if tasks is None else parse_tasks(tasks, TASKS)
    if chosen is None:
        texts, validation = ([each.text for each in load_text(split, "prose")] for split in ("test", "validation"))
        made = from_documents(network, texts, context, NEWEST - 1, prompts)
        [unlike] = from_documents(network, validation, other, NEWEST - 1, 1)
    else:
        made = from_tasks(network, chosen, context, NEWEST - 1, prompts, 0)
        [unlike] = from_tasks(network, chosen[:1], other, NEWEST - 1, 1, _OTHER_SEED)
    found = [capture(network, _all(each), every) for each in made]
    about = network.environment() | {
        "dtype": "float32",
        "text": "prose" if chosen is None else ", ".join(chosen),
        "context": context,
        "prompts": prompts,
        "queries_each": NEWEST // every,
        "other_tokens": other,
    }
    captured = CapturedAttention(about, found[0][1], [prompt for prompt, _ in found], moments(network, _all(unlike)))
    captured.write(output)
    typer.echo(f"{output}: {', '.join(str(tuple(prompt.keys.shape)) for prompt in captured.prompts)}")


def _all(prompt: Continued) -> list[int]:
    return [*prompt.tokens, *prompt.following]


if __name__ == "__main__":
    typer.run(main)
