"""Runs from their folders, those that differ in their seed only as one configuration, named by what sets it apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedmpi.common.errors import UserError
from fedmpi.config.loading import dotted, read_toml
from fedmpi.records.history import Record
from fedmpi.records.reading import ending_of, read_records, read_summary

BESIDE_THE_RESULT = ("seed", "logging.", "checkpoint.", "data.verify")
"""Keys in which runs of one configuration may differ."""
CONFIGURATION, PLANNED, NOTE = "config.toml", "sweep.toml", "sweep.json"
"""Files of a run: its configuration; what a sweep will start it with; and what that has noted of it."""
LONGEST_LABEL = 60
"""Characters."""


@dataclass(frozen=True)
class OneRun:
    """A run as its folder tells it.

    Attributes
    ----------
    folder : Path
    table : dict
        The complete configuration, {"part.key": value}, as config.toml holds it.
    records, summary : list of dict, dict
        As in metrics.jsonl and summary.json; the summary is empty of a run that is not finished.
    ending : str
        "finished", "ended" or "stopped", as of `fedmpi.load_run`.
    labels : dict
        What differs between the runs of its sweep, by key; empty without one.
    failure : str
        Why it failed last, where a sweep has noted that.
    """

    folder: Path
    table: dict[str, Any]
    records: list[Record]
    summary: Record
    ending: str
    labels: Record = field(default_factory=dict)
    failure: str = ""

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
    def told(self) -> str:
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


@dataclass(frozen=True)
class Configuration:
    """Runs that differ in their seed only.

    Attributes
    ----------
    label : str
        The fewest of its values that no other configuration has together.
    table : dict
        Without the keys in which its runs may differ.
    runs : tuple of OneRun
        By seed.
    """

    label: str
    table: dict[str, Any]
    runs: tuple[OneRun, ...]


def find_runs(paths: Sequence[Path], planned: bool = False) -> list[Path]:
    """The folders of the runs that are named, or lie somewhere below a folder that is; each once.

    Parameters
    ----------
    paths : sequence of Path
    planned : bool
        Whether those count that a sweep has not begun.

    Raises
    ------
    UserError
        Nothing is named, or something that neither is nor holds a run.
    """
    names = (CONFIGURATION, PLANNED) if planned else (CONFIGURATION,)
    found: dict[Path, Path] = {}
    if not paths:
        raise UserError("no run is named: give folders of runs, or a folder that holds some")
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is no folder: name the folder of a run, or one that holds some")
        own = any((path / name).is_file() for name in names)
        inside = [path] if own else sorted({file.parent for name in names for file in _configurations(path, name)})
        if not inside:
            raise UserError(f"{path} holds no run: there is no config.toml in it, or in a folder below it")
        found |= {folder.resolve(): folder for folder in inside if folder.resolve() not in found}
    return list(found.values())


def _configurations(folder: Path, name: str) -> Iterable[Path]:
    return (path for path in folder.rglob(name) if "plugins" not in path.relative_to(folder).parts)


def read_runs(folders: Iterable[Path]) -> list[OneRun]:
    """The runs of these folders; one that has no record yet has an empty list of them.

    Raises
    ------
    UserError
        A file is damaged.
    """
    return [_read(folder) for folder in folders]


def _read(folder: Path) -> OneRun:
    path = next(
        (path for name in (CONFIGURATION, PLANNED) if (path := folder / name).is_file()), folder / CONFIGURATION
    )
    summary, note = read_summary(folder / "summary.json"), read_summary(folder / NOTE)
    ending = ending_of(summary, path) if summary else "stopped"
    labels, failure = note.get("labels", {}), str(note.get("failure", ""))
    if not isinstance(labels, dict):
        raise UserError(f"{folder / NOTE} cannot be read (labels = {shown(labels)}): remove it")
    return OneRun(folder, dotted(read_toml(path)), read_records(folder), summary, ending, labels, failure)


def configurations(runs: Sequence[OneRun]) -> list[Configuration]:
    """Runs by what they were, in the order in which each configuration comes first."""
    groups: list[tuple[dict[str, Any], list[OneRun]]] = []
    for run in runs:
        table = {key: value for key, value in run.table.items() if not key.startswith(BESIDE_THE_RESULT)}
        for known, members in groups:
            if known == table:
                members.append(run)
                break
        else:
            groups.append((table, [run]))
    labels = _labels([table for table, _ in groups])
    return [
        Configuration(label, table, tuple(sorted(members, key=lambda run: (run.seed, run.name))))
        for label, (table, members) in zip(labels, groups, strict=True)
    ]


def differing(tables: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which tables differ; one that a table lacks differs from any value."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]


def _labels(tables: list[dict[str, Any]]) -> list[str]:
    """The preset, and of the other keys those that tell most configurations apart until all are."""
    chosen: list[str] = []
    open_keys = differing(tables)
    if not tables:
        return []

    def apart(keys: list[str]) -> int:
        return len({repr([table.get(key) for key in keys]) for table in tables})

    if "preset" in open_keys or len(tables) == 1:
        chosen = ["preset"]
    while apart(chosen) < len(tables):
        chosen.append(max(open_keys, key=lambda key: apart([*chosen, key])))
    return [_label(table, _enough(table, chosen, tables)) for table in tables]


def _enough(table: dict[str, Any], keys: list[str], tables: list[dict[str, Any]]) -> list[str]:
    """The first of the keys that tell this table from all others."""
    for count in range(1, len(keys)):
        same = [other for other in tables if all(other.get(key) == table.get(key) for key in keys[:count])]
        if len(same) == 1:
            return keys[:count]
    return keys


def _label(table: dict[str, Any], keys: list[str]) -> str:
    words = [str(table.get("preset") or "no preset")] if "preset" in keys else []
    words += [f"{key.rpartition('.')[2]} {shown(table.get(key))}" for key in keys if key != "preset"]
    label = ", ".join(words)
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "\u2026"


def shown(value: Any) -> str:
    """A value of a configuration as a table shows it; "–" where there is none."""
    if value is None:
        return "\u2013"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
