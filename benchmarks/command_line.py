"""Numbers on a command line."""

from __future__ import annotations


def numbers(text: str) -> list[int]:
    """Read whole numbers with commas between them."""
    return [int(number) for number in text.split(",") if number]
