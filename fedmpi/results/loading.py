"""Runs of a study: read from their folders, grouped over seeds, as one table (`fedmpi.load_runs`, `fedmpi.frame`)."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmpi.api import Run, load_run
from fedmpi.common.errors import UserError
from fedmpi.config.keys import all_keys, unknown_key
from fedmpi.config.loading import dotted, read_toml
from fedmpi.config.writing import shown_value
from fedmpi.records.history import Record, ending_of, read_records, read_summary
from fedmpi.records.provenance import FOLDER as PLUGINS
from fedmpi.records.provenance import MAY_CHANGE, kept_digests, recorded_digest

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIGURATION, NOTE = "config.toml", "sweep.json"
"""Files of a run: its configuration, and the note of its sweep."""
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
DATA = "data.source"
BARE = ("preset", DATA, "model")
"""Keys whose values say enough without the key."""
OF_NO_MATTER = tuple(key for key in MAY_CHANGE if key != "rounds")
"""Keys that change nothing about what is learned."""


# --- runs in their folders ---


@dataclass(frozen=True)
class OneRun:
    """A run as read from its folder."""

    folder: Path
    # The complete configuration, {"part.key": value}, as config.toml holds it, `data.source` where they are now; and as
    # "plugins" a SHA-256 of the sources of custom components
    table: dict[str, Any]
    records: list[Record]  # As in metrics.jsonl and summary.json; the summary is empty of a run that is not finished
    summary: Record
    ending: str  # "finished", "ended" or "stopped", as of `fedmpi.load_run`
    labels: Record = field(default_factory=dict)  # What differs between the runs of its sweep, by key
    data: str = ""  # Checksum of its shards; "" of other data

    @property
    def where(self) -> str:
        """Folder of the run, and its finished rounds."""
        return f"{self.folder} ({len(self.records)} of {self.table.get('rounds')} rounds)"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def seed(self) -> int:
        """Seed of the run's random numbers."""
        return int(self.table.get("seed", 0))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of the runs that are named, or are below a folder that is; each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is no folder. Name the folder of a run, or one that holds some")
        inside = _runs_in(path)
        if not inside:
            raise UserError(f"{path} holds no run: there is no config.toml in it, or in a folder below it")
        for folder in inside:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _runs_in(*folders: Path) -> list[Path]:
    """Return the folders that are runs, and of the others the runs below them, numbers in names by value."""

    def order(folder: Path) -> tuple[list[str | float], str]:
        pieces = NUMBER.split(str(folder))  # text, number, text, ...
        return [float(piece) if place % 2 else piece for place, piece in enumerate(pieces)], str(folder)

    found = {folder for folder in folders if (folder / CONFIGURATION).is_file()}
    for above in set(folders) - found:
        inside = {path.parent for path in above.rglob(CONFIGURATION)}
        found |= {path for path in inside if PLUGINS not in path.relative_to(above).parts}
    return sorted(found, key=order)


def read_runs(folders: Iterable[Path]) -> list[OneRun]:
    """Read the runs of these folders; one that has no record yet has an empty list of them."""
    return [_read_run(folder) for folder in folders]


def _read_run(folder: Path) -> OneRun:
    table = dotted(read_toml(folder / CONFIGURATION))
    summary, labels = read_summary(folder / "summary.json"), read_summary(folder / NOTE).get("labels", {})
    ending = ending_of(summary, folder / CONFIGURATION) if summary else "stopped"
    if sources := kept_digests(folder):
        table[PLUGINS] = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:8]
    return OneRun(folder, table, read_records(folder), summary, ending, labels, recorded_digest(folder) or "")


def differing(tables: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys in which tables differ, the sources last; a key that a table lacks differs from any value."""
    keys = sorted(dict.fromkeys(key for table in tables for key in table), key=PLUGINS.__eq__)
    return [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]


def table_value(value: Any) -> str:
    """Return a value of a configuration as a table shows it; "–" for None."""
    if value is None:
        return "\u2013"
    return f"{value:g}" if isinstance(value, float) else shown_value(value)


def shortened(names: Sequence[str], most: int = 8) -> str:
    """Return names joined as text; a long list is cut after the first names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- runs grouped over seeds ---


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in nothing but the seed."""

    # Values that distinguish it from the others of its block, by key; None for a key that it does not have
    values: dict[str, str | None]
    runs: dict[int, OneRun]  # The runs by seed

    @property
    def parts(self) -> dict[str, str]:
        """Parts of a name, by key: `lr = 0.1`, `0.1` where that says enough, or `without local.lr`."""
        ends = [key.rpartition(".")[2] for key in self.values]
        parts = {}
        for (key, value), end in zip(self.values.items(), ends, strict=True):
            bare = key in BARE or not ("." in key or key in (*all_keys(), PLUGINS))
            name = end if ends.count(end) == 1 else key
            parts[key] = f"without {key}" if value is None else value if bare else f"{name} = {value}"
        return parts

    @property
    def words(self) -> list[str]:
        """Components of the name; `without local.lr` and such are left out unless there are no others."""
        given = [part for key, part in self.parts.items() if self.values[key] is not None]
        return given or [*self.parts.values()]

    @property
    def label(self) -> str:
        """Name of the group in tables."""
        return ", ".join(self.words)

    @property
    def given(self) -> list[str]:
        """Keys of its name that its own sweep gave it; another variant lists the others."""
        return [key for key in self.values if all(key in run.labels for run in self.runs.values())] or [*self.values]

    def is_called(self, name: str | None) -> bool:
        """Check whether that is its name, apart from capitals and spaces around commas and signs of equality."""
        return _plain(name) == _plain(self.label)

    def keys_of(self, part: str | None) -> list[str]:
        """Return the keys of its name with this part."""
        return [key for key, own in self.parts.items() if _plain(own) == _plain(part)]


@dataclass(frozen=True)
class GroupsAlike:
    """Groups on the same data, evaluated alike."""

    title: str  # Name of the data, if there are several blocks
    groups: list[SeedGroup]
    notes: list[str]  # Facts that a reader has to know before comparing


def _plain(name: str | None) -> str:
    return re.sub(r"\s*([,=])\s*", r"\1", (name or "").strip()).lower()


def blocks_of(runs: Sequence[OneRun], by: Sequence[str] = ()) -> list[GroupsAlike]:
    """Return finished runs in blocks of the same data and measure, and in groups that differ in the seed only."""
    for key in by:
        if not any(key in run.table or key in run.labels for run in runs) and key not in all_keys():
            raise UserError(unknown_key(key, "--by", [*all_keys(), *(key for run in runs for key in run.labels)]))
    runs = _with_names_of_data(runs)
    keys = [key for key in _differing(runs) if _of_the_measure(key)]
    blocks = []
    for values, together in _by_values(runs, keys).items():
        parts = [f"{key} = {value}" for key, value in zip(keys, values, strict=True) if value is not None]
        title = ", ".join(parts or (f"without {key}" for key in keys))
        blocks.append(GroupsAlike(title, _groups(together, by), _notes(together)))
    return blocks


def _by_values(runs: Iterable[OneRun], keys: Sequence[str]) -> dict[tuple[str | None, ...], list[OneRun]]:
    found: dict[tuple[str | None, ...], list[OneRun]] = {}
    for run in runs:
        found.setdefault(tuple(_value(run, key) for key in keys), []).append(run)
    return found


def _groups(runs: Sequence[OneRun], by: Sequence[str]) -> list[SeedGroup]:
    keys = [key for key in _differing(runs) if not key.startswith(OF_NO_MATTER)]
    found = list(_by_values(runs, keys).values())
    groups: list[SeedGroup] = []
    for own, together in zip(_what_sets_apart(found, keys, by), found, strict=True):
        other = next((group for group in groups if group.values == own), None)
        if other is not None:
            first = next(iter(other.runs.values()))
            mixed = [key for key in keys if _value(first, key) != _value(together[0], key)]
            key = next((key for key in ("preset", "local.lr") if key in mixed), mixed[0])
            one, two = (_value(run, key) or f"without {key}" for run in (first, together[0]))
            raise UserError(
                f"--by {','.join(by)} puts runs together that differ in {key} ({one}, {two}): "
                f"--by {','.join([*by, key])} keeps them apart"
            )
        seeds: dict[int, OneRun] = {}
        for run in sorted(together, key=lambda run: run.seed):
            if seeds.setdefault(run.seed, run) is not run:
                both = f"{seeds[run.seed].folder} and {run.folder}"
                raise UserError(f"{both} are the same run, seed {run.seed} included. Name one")
        groups.append(SeedGroup(own, seeds))
    return groups


def _what_sets_apart(
    groups: Sequence[Sequence[OneRun]], keys: Sequence[str], by: Sequence[str]
) -> list[dict[str, str | None]]:
    """Return the values that distinguish each group: of the keys `by`, its sweep's keys, or as few keys as suffice."""

    def values_of(chosen: Sequence[str], value: Callable[[OneRun, str], str | None]) -> list[dict[str, str | None]]:
        return [{key: value(group[0], key) for key in chosen} for group in groups]

    def labeled(run: OneRun, key: str) -> str | None:
        return shown_value(run.labels[key]) if key in run.labels else _value(run, key)

    if by:
        return values_of(by, _value)
    own = list(dict.fromkeys(key for group in groups for run in group for key in run.labels if key != "seed"))
    for labels in (own, [*own, PLUGINS]) if own else ():
        named = [{tuple(labeled(run, key) for key in labels) for run in group} for group in groups]
        if all(len(one) == 1 for one in named) and len(set.union(*named)) == len(groups):
            varied = [key for key in labels if len({labeled(group[0], key) for group in groups}) > 1]
            return values_of(varied or labels, labeled)
    ordered = [*(key for key in BARE if key in keys), *(key for key in keys if key not in BARE)]
    chosen: list[str] = []
    firsts = [group[0] for group in groups]
    for key in ordered:
        if len(_by_values(firsts, [*chosen, key])) > len(_by_values(firsts, chosen)):
            chosen.append(key)
    for run in firsts:  # one that has none of these is named by what it has instead: epochs where others have steps
        has = [key for key in ordered if _value(run, key) is not None]
        if has and not set(has) & set(chosen):
            chosen.append(has[0])
    return values_of(chosen or ["preset"], _value)


def _of_the_measure(key: str) -> bool:
    """Check whether scores of runs that differ in this key are not comparable."""
    return key == "evaluation.on" or (key.startswith("data.") and not key.startswith(OF_NO_MATTER))


def _value(run: OneRun, key: str) -> str | None:
    """Return a run's value of a key, as tables show it; None if it has none."""
    found = run.table if key in run.table else run.labels
    return shown_value(found[key]) if key in found else None


def _differing(runs: Sequence[OneRun]) -> list[str]:
    """Return keys in whose values the runs differ, without the seed."""
    return [key for key in differing([run.table for run in runs]) if key != "seed"]


def _with_names_of_data(runs: Sequence[OneRun]) -> list[OneRun]:
    """Return the runs with a name of their data: shards of one checksum have one name, whatever their folders.

    Partitions that are drawn again for each seed have one name, with {seed}. Shards that were prepared otherwise in the
    same folder meanwhile have their checksums beside the name.
    """
    here = os.getcwd() + os.sep
    first: dict[str, str] = {}
    same: dict[str, list[OneRun]] = {}
    names = []
    for run in runs:
        text = str(run.table.get(DATA, "digits")).removeprefix(here)
        names.append(first.setdefault(run.data or text, text))
        same.setdefault(names[-1], []).append(run)

    def shown(run: OneRun, name: str) -> str:
        several = len({other.data for other in same[name]} - {""}) > 1
        if len({other.seed for other in same[name]}) == 1:
            name = re.sub(rf"^(.*)(?<!\d){run.seed}(?!\d)", r"\g<1>{seed}", name, count=1, flags=re.DOTALL)
        return f"{name} (sha256 {run.data[:8]})" if several else name

    return [replace(run, table=run.table | {DATA: shown(run, name)}) for run, name in zip(runs, names, strict=True)]


def _notes(runs: Sequence[OneRun]) -> list[str]:
    """Return differences between runs of one block that would be overlooked."""
    notes = []
    for key, why in (
        ("evaluation.every", "best rounds and rounds to a target depend on the number of evaluations"),
        ("rounds", "final values are from different rounds"),
    ):
        settings = [str(len(run.records)) if key == "rounds" else _value(run, key) for run in runs]
        values = [value for value in dict.fromkeys(settings) if value is not None]
        if len(values) > 1:
            notes.append(f"{key} differs ({', '.join(values)}): {why}")
    return notes


# --- studies from Python ---


def load_runs(pattern: str | Path, unfinished: bool = False) -> list[Run]:
    """Read the finished runs in the folders that a pattern names, as `runs/fedavg-*`, or below them.

    Runs that are not finished are left out, and a warning names them.

    Parameters
    ----------
    pattern : str or Path
    unfinished : bool
        Whether to return the others as well; `Run.finished` distinguishes them.

    Returns
    -------
    list of Run
        In the order of their names, numbers in them by value.

    Raises
    ------
    UserError
        There is no such run.
    """
    runs = _read(pattern)
    kept = [run for run in runs if unfinished or run.summary]
    if not kept:
        listed = shortened([run.where for run in runs])
        raise UserError(f"no run of {pattern} is finished: {listed}. Continue them, or set unfinished=True")
    if left := [run.where for run in runs if not (run.summary or unfinished)]:
        warnings.warn(f"left out, not finished: {shortened(left)}. unfinished=True returns them too", stacklevel=2)
    return [load_run(run.folder) for run in kept]


def frame(pattern: str | Path) -> DataFrame:
    """Return all records of a study as one tidy pandas table: one row per run and round.

    Parameters
    ----------
    pattern : str or Path
        A folder that holds runs at any depth, or a pattern such as `runs/fedavg-*`.

    Returns
    -------
    pandas.DataFrame
        `run` (the folder, from the folder that holds all of them), `seed`, `finished`; each configuration key in which
        the runs differ, such as `local.lr`, and `plugins`, a checksum, if the sources of their components differ;
        `round`, and what the records hold, numbers in tables of theirs as `table.name`.

    Raises
    ------
    UserError
        There is no run, or none has a record.
    """
    from pandas import json_normalize  # slow to import

    runs = [run for run in _read(pattern) if run.records]
    if not runs:
        raise UserError(f"no run of {pattern} has finished a round yet. Wait for the first one")
    if left := [run.where for run in runs if not run.summary]:
        warnings.warn(f"not finished: {shortened(left)}; their rows have finished = False", stacklevel=2)
    above = os.path.commonpath([run.folder.resolve().parent for run in runs])
    keys = [key for key in differing([run.table for run in runs]) if key != "seed"]
    rows = []
    for run in runs:
        name = Path(os.path.relpath(run.folder.resolve(), above)).as_posix()
        facts = {"run": name, "seed": run.seed, "finished": bool(run.summary)}
        facts |= {key: str(value) if isinstance(value := run.table.get(key), list) else value for key in keys}
        rows += [facts | record for record in run.records]
    return json_normalize(rows)


def _read(pattern: str | Path) -> list[OneRun]:
    """Read the runs that a pattern names, or that are below what it names."""
    whole = Path(pattern)
    named = [whole] if whole.is_dir() else [path for path in map(Path, glob.glob(str(pattern))) if path.is_dir()]
    found = _runs_in(*named)
    if not found:
        raise UserError(f"no folder named {pattern} holds a run, or folders of runs")
    return read_runs(found)
