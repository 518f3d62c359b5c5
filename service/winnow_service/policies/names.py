"""What policies, and models with a default policy, may be called."""

from __future__ import annotations

import re
from typing import Final

POLICY_NAME: Final = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
POLICY_NAME_IN_WORDS: Final = (
    "1 to 64 lower-case letters, digits, dots, hyphens and underscores, the first and last a letter or digit"
)
# As many printable ASCII characters as any model's name has; * stands for every model.
MODEL_NAME: Final = r"^[!-~]{1,256}$"
ANY_MODEL: Final = "*"

_POLICY_NAME = re.compile(POLICY_NAME)


def is_policy_name(text: str) -> bool:
    """Whether a policy can have this name."""
    # $ also matches before a final newline.
    return _POLICY_NAME.fullmatch(text) is not None
