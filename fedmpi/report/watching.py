"""Progress of a run in another process, until it ends."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedmpi.api import load_run
from fedmpi.common.errors import UserError
from fedmpi.records.history import Record, read_record, read_summary
from fedmpi.records.hold import owner_of
from fedmpi.records.progress import open_display, show_summary
from fedmpi.records.run_log import ended_by
from fedmpi.results.loading import NOTE

LOOK = 0.5
"""Seconds between two readings of the folder."""


class Tail:
    """Whole lines that are appended to a file of records."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def new(self) -> list[Record]:
        """Return the records since the last call; all if the file has become shorter, as when a run resumes."""
        try:
            if os.path.lexists(self._path) and not self._path.is_file():  # opening a fifo would block
                raise OSError(errno.EINVAL, "not a plain file")
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._read:
                    self._read = 0
                file.seek(self._read)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            found = [read_record(line) for line in whole.splitlines()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{self._path} cannot be read ({error})") from None
        self._read += len(whole)
        return found


def watch(folder: Path, interval: float = 2.0, look: float = LOOK, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run's progress until it ends, and how it ended."""
    rounds = load_run(folder).config.rounds
    records = _records(folder, look, sleep)
    earlier = next(records)
    first = earlier[-1]["round"] + 1 if earlier else 0
    display = open_display(rounds, first, interval)
    try:
        for record in earlier[-1:]:
            display.update(record)
        for some in records:
            for record in some:
                display.update(record)
    finally:
        display.close()
    run = load_run(folder)
    if run.summary:
        try:
            show_summary(run.summary, str(folder))
        except KeyError as error:
            raise UserError(f"{folder / 'summary.json'} is damaged: it has no {error}") from None
    else:
        failure, cause = read_summary(folder / NOTE).get("failure", ""), ended_by(folder / "run.log")
        why = f" (reported by its sweep: {failure})" if failure else f" ({cause})" if cause else ""
        ended = f"stopped after round {len(run.records)} of {rounds}{why}"
        print(f"{ended}: continue with --resume --out {folder}", flush=True)


def _records(folder: Path, look: float, sleep: Callable[[float], None]) -> Iterator[list[Record]]:
    """Yield the records so far, then new ones, as long as a run writes to the folder."""
    tail = Tail(folder / "metrics.jsonl")
    yield tail.new()
    while owner_of(folder) is not None:
        sleep(look)
        yield tail.new()
    yield tail.new()
