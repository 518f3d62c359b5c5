"""``winnow sample``: one of the evaluation's prompts, as a request body."""

from __future__ import annotations

import json
import random
from typing import Annotated

import typer

from winnow_evaluation.tasks import TASKS

_ANSWER_TOKENS = 256


def sample(
    task: Annotated[str, typer.Argument(help="Task; winnow eval --list names them.")],
    words: Annotated[int, typer.Option(min=16, max=1_000_000, help="Length of the text in English words.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    model: Annotated[str, typer.Option(help="Model that the request names.")] = "needle",
    answer: Annotated[bool, typer.Option("--answer", help="Print the expected strings instead.")] = False,
) -> None:
    """Print a prompt with a hidden answer as the body of a chat completion request."""
    if task not in TASKS:
        raise typer.BadParameter(f"{task!r} is none of {', '.join(TASKS)}", param_hint="TASK")
    made = TASKS[task].make(random.Random(seed), words)
    if answer:
        typer.echo("\n".join(made.questions[0].references))
        return
    body = {
        "model": model,
        "messages": [{"role": "user", "content": made.prompt}],
        "max_tokens": max(_ANSWER_TOKENS, TASKS[task].answer_tokens(words)),
        "temperature": 0,
    }
    typer.echo(json.dumps(body, ensure_ascii=False))
