"""The end of the service: what is being answered is finished, what comes is sent elsewhere."""

from __future__ import annotations

from collections.abc import Callable


class Drain:
    """Knows whether the service is about to end.

    Attributes:
        active: requests being answered that the end waits for.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []
        self.draining = False
        self.active = 0

    def when_begun(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called once, when it begins."""
        self._listeners.append(listener)

    def begin(self) -> None:
        """Let nothing in any more."""
        self.draining = True
        for listener in self._listeners:
            listener()
