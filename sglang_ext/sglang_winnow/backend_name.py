"""What SGLang's command line calls Winnow's attention backend."""

from __future__ import annotations

from typing import Final

NAME: Final = "winnow"
