"""Prompts of an exact length in tokens, made of the evaluation's samples."""

from __future__ import annotations

import random
from typing import Any

from winnow_evaluation.tasks import TASKS

TASK = "niah_multiquery"
# Tokens at the front that stay where they are when a prompt is cut.
_HEAD = 16


def needle_prompt(tokenizer: Any, length: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt of ``length`` tokens, chat template included, and of its answer.

    A sample that is a little too long loses tokens at the front of its haystack.

    Raises:
        ValueError: ``length`` is too short for a prompt.
    """
    if length <= _HEAD:
        raise ValueError(f"length: must be more than {_HEAD} tokens; it is {length}")
    words = max(1, length // 2)
    while True:
        sample = TASKS[TASK].make(random.Random(f"{seed}/{length}"), words)
        message = [{"role": "user", "content": sample.prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        if len(prompt) >= length:
            break
        words = int(words * 1.02 * length / len(prompt)) + 1
    answer = tokenizer.encode(sample.questions[0].answer, add_special_tokens=False)
    return prompt[:_HEAD] + prompt[len(prompt) - length + _HEAD :], answer
