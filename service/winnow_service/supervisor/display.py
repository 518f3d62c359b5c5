"""What ``winnow up`` shows: both programs' logs, line by line, and on a terminal what it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

_COLOURS = {"runtime": "magenta", "service": "cyan", "winnow": "green"}


class ConsoleDisplay:
    """Writes to ``console``: plain lines, and on a terminal colours and a progress line below them."""

    def __init__(self, console: Console, ready_message: Sequence[str]) -> None:
        self._console = console
        self._ready_message = ready_message
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
        )
        self._task: TaskID | None = None

    def line(self, name: str, text: str) -> None:
        # Programs may colour their lines; nothing else in them is markup.
        whole = Text.assemble((f"{name} | ", _COLOURS.get(name, "")), Text.from_ansi(text))
        self._console.print(whole, soft_wrap=True, highlight=False)

    def waiting_for(self, name: str) -> None:
        self.line("winnow", f"waiting for the {name}")
        if not self._console.is_terminal:
            return
        self._end_progress()
        self._progress.start()
        self._task = self._progress.add_task(f"waiting for the {name}", total=None)

    def ready(self) -> None:
        self._end_progress()
        for text in self._ready_message:
            self.line("winnow", text)

    def stopping(self) -> None:
        self._end_progress()
        self.line("winnow", "stopping")

    def died(self, name: str, status: int, tail: Sequence[str]) -> None:
        how = f"was killed by signal {status - 128}" if status > 128 else f"ended with status {status}"
        self.line("winnow", f"error: the {name} {how}; its last lines:")
        for text in tail:
            self.line(name, text)

    def refused(self, sentence: str) -> None:
        self.line("winnow", f"error: {sentence}")

    def _end_progress(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._progress.stop()
            self._task = None
