"""What whoever starts a server chooses of its indexes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KEY_BITS: Final = (2, 3, 4)
"""Bits that a channel of a key can have in ``KeyCodes``."""


@dataclass(frozen=True)
class IndexSettings:
    """The same for all requests of a server.

    Attributes:
        key_bits: bits of a channel in ``KeyCodes``; with more, scores are predicted better and the index is larger.

    Raises:
        ValueError: one of them is none that there is.
    """

    key_bits: int = 2

    def __post_init__(self) -> None:
        if self.key_bits not in KEY_BITS:
            raise ValueError(f"key_bits: must be one of {', '.join(map(str, KEY_BITS))}; it is {self.key_bits}")


DEFAULT: Final = IndexSettings()
