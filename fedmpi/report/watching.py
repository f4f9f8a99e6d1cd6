"""A run watched from another terminal: its records as they are written, until it ends."""

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
"""Seconds between two looks at the folder."""


class Tail:
    """The whole lines that a file of records gains."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def new(self) -> list[Record]:
        """The records since the last call; all of them when the file has become shorter, as of a run that resumes."""
        try:
            if os.path.lexists(self._path) and not self._path.is_file():  # a fifo would be waited for
                raise OSError(errno.EINVAL, "it is no plain file")
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._read:
                    self._read = 0
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self._path} cannot be read ({error})") from None
        whole = text[: text.rfind(b"\n") + 1]
        try:
            found = [read_record(line) for line in whole.splitlines()]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self._path} cannot be read ({error})") from None
        self._read += len(whole)
        return found


def watch(folder: Path, interval: float = 2.0, look: float = LOOK, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run's progress until it ends; at once what is known of one that has ended."""
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
            raise UserError(f"{folder / 'summary.json'} does not say {error}: it is damaged") from None
    else:
        failure, cause = read_summary(folder / NOTE).get("failure", ""), ended_by(folder / "run.log")
        why = f" (its sweep says: {failure})" if failure else f" ({cause})" if cause else ""
        ended = f"stopped after round {len(run.records)} of {rounds}{why}"
        print(f"{ended}: continue with --resume --out {folder}", flush=True)


def _records(folder: Path, look: float, sleep: Callable[[float], None]) -> Iterator[list[Record]]:
    """The records so far, then those that come in, as long as a run writes to the folder."""
    tail = Tail(folder / "metrics.jsonl")
    yield tail.new()
    while owner_of(folder) is not None:
        sleep(look)
        yield tail.new()
    yield tail.new()
