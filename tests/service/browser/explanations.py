"""What is explained in tests of the console: a prompt that looks like markup, and an answer about it."""

from __future__ import annotations

from typing import Any

HOSTILE = "<img src=x onerror=alert(1)> <b>bold</b> &amp; \"quoted\" 'words' slow."
PROMPT = HOSTILE + " again" * 9


def explained(prompt: str) -> dict[str, Any]:
    """An explanation of what one head of each layer reads of a prompt, whose tokens are its words: the first two."""
    ends = [index for index, letter in enumerate(prompt) if letter == " "] + [len(prompt)]
    offsets = list(zip([0, *ends], ends, strict=False))
    rest = len(offsets) - 1
    weights = [0.6875, 0.1975, *[round(0.115 / rest, 6)] * rest]
    entry = {"step": 1, "dense": False, "attended_tokens": 2, "share": 0.75, "weights": weights}
    read: dict[int, list[list[int]]] = {0: [[0, 2]], 1: [[1, 2]]}
    entries = [
        entry | {"layer": layer, "head": head, "attended": read[head]} for layer in (0, 4, 7, 11) for head in (0, 1)
    ]
    attention = {
        "decode": {"policy": "quest", "steps": 1},
        "explain": {
            "decode_steps": 1,
            "missing_steps": [8],
            "entries": entries,
            "prompt": {"text": prompt, "offsets": offsets},
            "output": {"text": " yes", "offsets": [[0, 4]]},
        },
    }
    return {"text": " yes", "meta_info": {"attention": attention}, "attention": attention}
