"""What a run's folder tells without its model: the records and the summary."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.records.history import LINKS, SCORES, Record

NUMBERS = (
    *("samples", "seconds", "virtual_seconds", *(f"bytes_{link}" for link in LINKS), "participants", "train_loss"),
    *("size_true", "size_estimate"),
)
"""What reports add up over the rounds, or show of each; so they do with what begins as `SCORES`."""
LISTS = ("busy_seconds", "kl_quartiles", "kl_client_quartiles", "stratum_sizes", "allocation")
"""Numbers of a round's ranks, mediators and strata."""
ALWAYS, SOMETIMES = ("wall_seconds", "bytes_total"), ("best_round", "rounds_to_target", "megabytes_to_target")
"""Numbers of a summary that are shown; of the latter there may be none."""
PARTICIPANTS = re.compile(r"(?a:(\d{1,12}(-\d{1,12})?( |$))*)")
NEIGHBOURS = re.compile(r"(\d+)-(\d+)")
LARGEST = 2**63
"""Of whole numbers: none that is counted comes close to it, and a float can hold it."""


def read_records(folder: Path, rounds: int | None = None) -> list[Record]:
    """The records in RUN/metrics.jsonl, the first `rounds` of them or all; a last line that
    is not whole is left out.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = read_plain(path).splitlines(keepends=True)[:rounds] if os.path.lexists(path) else []
        return [read_record(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None


def read_summary(path: Path) -> Record:
    """The summary in RUN/summary.json, or what a sweep has noted beside it; empty where there is none."""
    try:
        return _summary(json.loads(read_plain(path).decode("utf-8"))) if os.path.lexists(path) else {}
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


def read_record(line: bytes) -> Record:
    """The record in a line of RUN/metrics.jsonl."""
    record = _table(json.loads(line))
    round = record.get("round")
    if not isinstance(round, int) or not _is_number(round):
        raise ValueError(f"round = {_cut(round)} in a record")
    for key, value in record.items():
        if not _suits(key, value):
            raise ValueError(f"{key} = {_cut(value)} in the record of round {round}")
    strata, allocation = record.get("stratum_sizes") or [], record.get("allocation")
    if allocation and len(strata) != len(allocation):
        raise ValueError(f"{len(strata)} stratum_sizes and {len(allocation)} in allocation of round {round}")
    return record


def _suits(key: str, value: Any) -> bool:
    """Whether a key of a record has a value of its kind; those of the user's own any but a very long number."""
    if value is None:
        return key != "clients"
    if key in LISTS:
        return isinstance(value, list) and all(map(_is_number, value))
    if key == "phase_seconds":
        return isinstance(value, dict) and all(map(_is_number, value.values()))
    if key == "clients":
        named = isinstance(value, str) and PARTICIPANTS.fullmatch(value) is not None
        return named and all(int(first) <= int(last) for first, last in NEIGHBOURS.findall(value))
    if key in NUMBERS or key.startswith(SCORES):
        return _is_number(value)
    return not isinstance(value, int) or -LARGEST < value < LARGEST


def _summary(read: Any) -> Record:
    summary = _table(read)
    final, moved = summary.get("final"), summary.get("mpi_bytes", {"total": 0})
    for key, value in {**(final if isinstance(final, dict) else {}), **summary}.items():
        shown = key in (*ALWAYS, *SOMETIMES) or key.startswith((*SCORES, "best_test_", "best_val_"))
        if shown and not _is_number(value) and (value is not None or key in ALWAYS):
            raise ValueError(f"{key} = {_cut(value)}")
    if not isinstance(moved, dict) or not _is_number(moved.get("total")):
        raise ValueError(f"mpi_bytes = {_cut(moved)}")
    clients = summary.get("clients", 1)
    if isinstance(clients, int) and not 0 < clients < LARGEST:
        raise ValueError(f"clients = {_cut(clients)}")
    return summary


def _is_number(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return -LARGEST < value < LARGEST if whole else isinstance(value, float)


def _cut(value: Any) -> str:
    return repr(value) if not isinstance(value, int) or abs(value) < LARGEST else "a number of very many digits"


def _table(read: Any) -> Record:
    if not isinstance(read, dict):
        raise ValueError(f"there is {str(read)[:20]!r} where keys and values should be")
    return read
