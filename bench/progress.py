"""Progress of a benchmark on the terminal.

It is drawn when something is reported, not by a thread of its own: a thread would use CPU in the
process whose CPU is being measured.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class StepProgress:
    """A bar of known steps and a line that says what is being done. A context manager."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self._progress = Progress(
            TextColumn(f"[bold]{title}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.update(self._task, description="")
        self._progress.stop()

    def report(self, text: str) -> None:
        """Says what is being done now."""
        self._progress.update(self._task, description=text)
        self._progress.refresh()

    def advance(self) -> None:
        """One step is done."""
        self._progress.advance(self._task)
        self._progress.refresh()
