"""A progress bar on a terminal's stderr, for whatever takes long enough to wonder about."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE_S = 1.0  # wall time before anything is shown


class ProgressBar:
    """Call it with (requests or points finished, how many are expected or None) as often as you like; a context manager removes the bar."""

    def __init__(self, doing: str = "simulating", unit: str = "requests") -> None:
        self._doing, self._unit = doing, unit
        self._started_s = time.monotonic()
        self._bar: Progress | None = None

    def __call__(self, finished: int, expected: int | None) -> None:
        """Show how far the run is, once it has taken a while."""
        if self._bar is None and time.monotonic() - self._started_s < _PATIENCE_S:
            return
        if self._bar is None:
            self._bar = _bar(self._unit)
            self._task = self._bar.add_task(self._doing, total=expected)
            self._bar.start()
        self._bar.update(self._task, completed=finished, total=expected)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(unit: str) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
