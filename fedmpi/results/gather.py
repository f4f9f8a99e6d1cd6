"""Runs as read from their folders: configuration, records, summary, and what a sweep has noted beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedmpi.common.errors import UserError
from fedmpi.config.layers import dotted, read_toml
from fedmpi.records.history import Record
from fedmpi.records.moved import SHARDS, find_shards, recorded_digest
from fedmpi.records.participants import largest_client
from fedmpi.records.plugin_files import FOLDER, kept_digests
from fedmpi.records.reading import ending_of, read_records, read_summary

CONFIGURATION, PLANNED, NOTE = "config.toml", "sweep.toml", "sweep.json"
"""Files of a run: its configuration; what a sweep will start it with; and what that has noted of it."""
SOURCES = f"{FOLDER}/"
"""Begins the keys of source files."""
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)")


@dataclass(frozen=True)
class OneRun:
    """A run as read from its folder."""

    folder: Path
    # The complete configuration, {"part.key": value}, as config.toml holds it, `data.shards` where they are now; and by
    # "plugins/FILE" the SHA-256 of each source file of the user's own components
    table: dict[str, Any]
    records: list[Record]  # As in metrics.jsonl and summary.json; the summary is empty of a run that is not finished
    summary: Record
    ending: str  # "finished", "ended" or "stopped", as of `fedmpi.load_run`
    # What differs between the runs of its sweep, by key; empty without one
    labels: Record = field(default_factory=dict)
    failure: str = ""  # Why it failed last, where a sweep has noted that
    data: str = ""  # Checksum of its shards; "" of other data

    @property
    def state(self) -> Literal["finished", "failed", "unfinished", "not begun"]:
        """How far it is."""
        if self.summary:
            return "finished"
        if self.failure:
            return "failed"
        return "unfinished" if self.records else "not begun"

    @property
    def where(self) -> str:
        """Its folder, and how far it is."""
        return f"{self.folder} ({len(self.records)} of {self.table.get('rounds')} rounds)"

    @property
    def state_text(self) -> str:
        """How far it is, in words."""
        return f"{self.where} {f'failed: {self.failure}' if self.state == 'failed' else f'is {self.state}'}"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def seed(self) -> int:
        """Of the run's random numbers."""
        return int(self.table.get("seed", 0))


def find_runs(paths: Sequence[Path], planned: bool = False) -> list[Path]:
    """The folders of the runs that are named, or lie somewhere below a folder that is; each once."""
    found: dict[Path, Path] = {}
    if not paths:
        raise UserError("no run is named: give folders of runs, or a folder that holds some")
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is no folder: name the folder of a run, or one that holds some")
        inside = runs_in(path, planned=planned)
        if not inside:
            raise UserError(f"{path} holds no run: there is no config.toml in it, or in a folder below it")
        found |= {folder.resolve(): folder for folder in inside if folder.resolve() not in found}
    return list(found.values())


def runs_in(*folders: Path, planned: bool = False) -> list[Path]:
    """The folders that are a run's own, and of the others those below them that are, numbers in names by value."""
    found = [[folder] if _is_run(folder, planned) else _below(folder, planned) for folder in folders]
    return sorted(dict.fromkeys(one for inside in found for one in inside), key=_by_numbers)


def _is_run(folder: Path, planned: bool) -> bool:
    """Whether a run has begun in a folder, or, if `planned`, a sweep has left there what it will start one with.

    A sweep leaves two files: sweep.toml by itself may be the user's own, the file of a sweep.
    """
    begun = (folder / CONFIGURATION).is_file()
    return begun or (planned and all((folder / name).is_file() for name in (PLANNED, NOTE)))


def _by_numbers(folder: Path) -> tuple[list[str | float], str]:
    """In which order folders come: by their names, numbers in them by their values."""
    name = str(folder)
    pieces = NUMBER.split(name)  # text, number, text, ...
    return [float(piece) if place % 2 else piece for place, piece in enumerate(pieces)], name


def _below(folder: Path, planned: bool) -> Iterable[Path]:
    """Folders of runs in a folder; what lies among the plugins that a run keeps is none."""
    for name in (CONFIGURATION, PLANNED):
        for found in (path.parent for path in folder.rglob(name)):
            way = found.relative_to(folder).parts
            around = (folder.joinpath(*way[:place]) for place, part in enumerate(way) if part == "plugins")
            if _is_run(found, planned) and not any((run / CONFIGURATION).is_file() for run in around):
                yield found


def read_runs(folders: Iterable[Path]) -> list[OneRun]:
    """The runs of these folders; one that has no record yet has an empty list of them."""
    return [_read(folder) for folder in folders]


def _read(folder: Path) -> OneRun:
    path = next(
        (path for name in (CONFIGURATION, PLANNED) if (path := folder / name).is_file()), folder / CONFIGURATION
    )
    table = dotted(read_toml(path))
    _refuse_damaged(path, table, {"seed": int, "rounds": int})
    summary, note = read_summary(folder / "summary.json"), read_summary(folder / NOTE)
    _refuse_damaged(folder / "summary.json", summary, {"clients": int, "versions": dict, "final": dict})
    ending = ending_of(summary, path) if summary else "stopped"
    labels, failure = note.get("labels", {}), str(note.get("failure", ""))
    if not isinstance(labels, dict):
        raise UserError(f"{folder / NOTE} cannot be read (labels = {table_value(labels)}): remove it")
    records, clients = read_records(folder), summary.get("clients")
    largest = max((largest_client(record["clients"]) for record in records if "clients" in record), default=-1)
    if clients is not None and largest >= clients:
        raise UserError(f"{folder / 'metrics.jsonl'} cannot be read (client {largest} of {clients}): it is damaged")
    if shards := find_shards(folder, str(table.get(SHARDS))):
        table[SHARDS] = shards
    table |= {f"{SOURCES}{name}": digest[:8] for name, digest in kept_digests(folder).items()}
    return OneRun(folder, table, records, summary, ending, labels, failure, recorded_digest(folder) or "")


def _refuse_damaged(path: Path, table: dict[str, Any], kinds: dict[str, type]) -> None:
    """Refuse a file in which something that reports count on is of another kind."""
    for key, kind in kinds.items():
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool)):
            raise UserError(f"{path} cannot be read ({key} = {table[key]!r}): it is damaged")


def differing(tables: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which tables differ, source files last; a key that a table lacks differs from any value.

    A source file that a table lacks does not differ: that run has another component.
    """
    keys = sorted(dict.fromkeys(key for table in tables for key in table), key=lambda key: key.startswith(SOURCES))
    values = {key: [table.get(key) for table in tables if key in table or not key.startswith(SOURCES)] for key in keys}
    return [key for key in keys if any(value != values[key][0] for value in values[key])]


def table_value(value: Any) -> str:
    """A value of a configuration as a table shows it; "–" where there is none."""
    if value is None:
        return "\u2013"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
