"""What the writing of shards shows: a progress bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

SECONDS_BETWEEN_LINES = 5.0


class WriteDisplay:
    """Shows bytes written; a context manager, `update` fits the writer's progress callback."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._shown = time.perf_counter()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("writing"), *columns, console=console)
            self._task = self._bar.add_task("writing", total=None)

    def __enter__(self) -> WriteDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes are written."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.perf_counter()
        if done >= total or now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            rate = done / max(now - self._started, 1e-9) / 1e6
            self._console.print(f"writing {done / 1e6:.1f} of {total / 1e6:.1f} MB  {rate:.0f} MB/s", markup=False)
