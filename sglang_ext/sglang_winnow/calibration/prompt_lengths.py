"""``python -m sglang_winnow.calibration.prompt_lengths``: how many tokens prompts have, and how many the model takes.

Prompts come on standard input as a JSON list of strings. ``{"context": ..., "tokens": [...]}`` goes to standard output;
``context`` is null for a model that names none. No weights are loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of ``text`` as a user's message, in the chat template if the tokenizer has one."""
    if tokenizer.chat_template is None:
        alone: list[int] = tokenizer(text)["input_ids"]
        return alone
    messages = [{"role": "user", "content": text}]
    whole: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    return whole


def context_length(folder: Path) -> int | None:
    """Return how many tokens the model in ``folder`` takes; None if its configuration does not say."""
    return getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", None)


def main() -> None:
    """Read the argument and the prompts, write the lengths."""
    parser = argparse.ArgumentParser(prog="python -m sglang_winnow.calibration.prompt_lengths")
    parser.add_argument("--model", type=Path, required=True)
    folder = parser.parse_args().model
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = [len(prompt_tokens(tokenizer, text)) for text in json.load(sys.stdin)]
        context = context_length(folder)
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    sys.stdout.write(json.dumps({"context": context, "tokens": tokens}))


if __name__ == "__main__":
    main()
