"""What SGLang's command line calls Winnow's attention backend."""

from __future__ import annotations

from typing import Final

NAME: Final = "winnow"
VERIFYING: Final = "WINNOW"
"""The speculative algorithm that drafts sparsely and checks densely (``--speculative-algorithm``)."""
