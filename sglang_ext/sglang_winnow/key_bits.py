"""How many bits a channel of a key has in the codes that score tokens: a server's choice."""

from __future__ import annotations

import os
from typing import Final

from winnow_kernels.indexes.settings import KEY_BITS, IndexSettings

ENVIRONMENT: Final = "WINNOW_KEY_BITS"


def index_settings() -> IndexSettings:
    """Return the settings of a server's indexes, with the bits that the environment names.

    Raises:
        ValueError: there are no codes of so many bits.
    """
    text = os.environ.get(ENVIRONMENT)
    if text is None:
        return IndexSettings()
    if text not in map(str, KEY_BITS):
        raise ValueError(f"{ENVIRONMENT}: must be one of {', '.join(map(str, KEY_BITS))}; it is {text!r}")
    return IndexSettings(key_bits=int(text))
