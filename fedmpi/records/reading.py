"""What a run's folder tells without its model: the records and the summary."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.records.history import LINKS, Record

ADDED_UP = ("samples", "seconds", "virtual_seconds", *(f"bytes_{link}" for link in LINKS))
"""What reports add up over the rounds."""


def read_records(folder: Path, rounds: int | None = None) -> list[Record]:
    """The records in RUN/metrics.jsonl, the first `rounds` of them or all; a last line that is not whole is left out.

    Raises
    ------
    UserError
        The file is gone or damaged.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = read_plain(path).splitlines(keepends=True)[:rounds] if os.path.lexists(path) else []
        return [_record(json.loads(line)) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None


def read_summary(path: Path) -> Record:
    """The summary in RUN/summary.json; empty where there is none.

    Raises
    ------
    UserError
        The file is damaged.
    """
    try:
        return _table(json.loads(read_plain(path).decode("utf-8"))) if os.path.lexists(path) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None


def ending_of(summary: Record, path: Path) -> Literal["finished", "ended"]:
    """How a run with a summary ended: with all rounds of its configuration, or before them as `on_round` wished."""
    try:
        rounds = tomllib.loads(read_plain(path).decode("utf-8")).get("rounds", 0)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    final = summary.get("final", {})
    last = final.get("round", rounds) if isinstance(final, dict) else None
    if not isinstance(rounds, int) or not isinstance(last, int):
        raise UserError(f"{path} and summary.json beside it do not say how many rounds there were: they are damaged")
    return "ended" if last + 1 < rounds else "finished"


def _record(read: Any) -> Record:
    record = _table(read)
    if not isinstance(record.get("round"), int):
        raise ValueError(f"round = {record.get('round')!r} in a record")
    for key in ADDED_UP:
        if not isinstance(record.get(key), int | float | None):
            raise ValueError(f"{key} = {record[key]!r} in the record of round {record['round']}")
    return record


def _table(read: Any) -> Record:
    if not isinstance(read, dict):
        raise ValueError(f"there is {str(read)[:20]!r} where keys and values should be")
    return read
