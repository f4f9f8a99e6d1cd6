"""Runs of a study: read from their folders, grouped over seeds, as one table (`fedmpi.load_runs`, `fedmpi.frame`)."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import warnings
from collections.abc import Collection, Iterable, Sequence
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
"""Keys that change nothing about what is learned, except those of `STOPPING`."""
STOPPING = ("evaluation.patience", "evaluation.min_delta")


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


def read_runs(places: Iterable[str | Path]) -> list[OneRun]:
    """Read the runs that are named by folders or patterns, or are in folders below; each once.

    A run that has no record yet has an empty list of them.
    """
    found: dict[Path, Path] = {}
    for place in places:
        named = [Path(place)] if Path(place).is_dir() else [Path(path) for path in glob.glob(str(place))]
        inside = _runs_in(path for path in named if path.is_dir())
        if not inside:
            raise UserError(f"no folder named {place} holds a run, or folders of runs. Name one that does")
        for folder in inside:
            found.setdefault(folder.resolve(), folder)
    return [_read_run(folder) for folder in found.values()]


def _runs_in(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are runs, and of the others the runs below them, numbers in names by value."""

    def order(folder: Path) -> tuple[list[str | float], str]:
        pieces = NUMBER.split(str(folder))  # text, number, text, ...
        return [float(piece) if place % 2 else piece for place, piece in enumerate(pieces)], str(folder)

    found: set[Path] = set()
    for folder in folders:
        if (folder / CONFIGURATION).is_file():
            found.add(folder)
        else:
            inside = {path.parent for path in folder.rglob(CONFIGURATION)}
            found |= {path for path in inside if PLUGINS not in path.relative_to(folder).parts}
    return sorted(found, key=order)


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

    data: str  # Name of the data, and of the part that scores are from; "" if these are the same for all runs
    label: str  # Its name among the groups on the same data
    values: dict[str, str]  # Values in the name, by key
    runs: dict[int, OneRun]  # The runs by seed

    @property
    def first(self) -> OneRun:
        """The run of the first seed."""
        return next(iter(self.runs.values()))


def by_data(groups: Iterable[SeedGroup]) -> dict[str, list[SeedGroup]]:
    """Return the groups that can be compared with one another, by the name of their data."""
    found: dict[str, list[SeedGroup]] = {}
    for group in groups:
        found.setdefault(group.data, []).append(group)
    return found


def grouped(runs: Sequence[OneRun], by: Sequence[str] = ()) -> list[SeedGroup]:
    """Return runs in groups over seeds, in the order of their data and of the part that scores are from."""
    for key in by:
        if not any(key in run.table or key in run.labels for run in runs) and key not in all_keys():
            raise UserError(unknown_key(key, "--by", [*all_keys(), *(key for run in runs for key in run.labels)]))
    runs = _with_names_of_data(runs)
    keys = [key for key in _differing(runs) if key == "evaluation.on" or key.startswith("data.")]
    groups = []
    for values, together in _by_values(runs, keys).items():
        parts = [f"{key} = {value}" for key, value in zip(keys, values, strict=True) if value is not None]
        groups += _groups(together, by, ", ".join(parts or (f"without {key}" for key in keys)))
    return groups


def _groups(runs: Sequence[OneRun], by: Sequence[str], data: str) -> list[SeedGroup]:
    keys = _differing(runs)
    found = list(_by_values(runs, keys).values())
    labels = set() if by else {key for run in runs for key in run.labels}
    chosen = by or _distinguishing([together[0] for together in found], keys, labels)
    groups: list[SeedGroup] = []
    for together in found:
        values = {key: value for key in chosen if (value := _value(together[0], key, labels)) is not None}
        if twin := next((group for group in groups if group.values == values), None):
            mixed = differing([twin.first.table, together[0].table])
            several = shortened([key for key in mixed if key in keys])
            raise UserError(f"--by {','.join(by)} puts runs together that differ in {several}. Add such a key")
        seeds: dict[int, OneRun] = {}
        for run in sorted(together, key=lambda run: run.seed):
            if seeds.setdefault(run.seed, run) is not run:
                both = f"{seeds[run.seed].folder} and {run.folder}"
                raise UserError(f"{both} are the same run, seed {run.seed} included. Name one")
        groups.append(SeedGroup(data, _label(values, chosen), values, seeds))
    return groups


def _distinguishing(runs: Sequence[OneRun], keys: Sequence[str], labels: set[str]) -> Sequence[str]:
    """Return as few keys as distinguish runs: what their sweeps name, then preset and model, then any other."""
    ordered = list(dict.fromkeys([*(key for run in runs for key in run.labels), *BARE, *keys]))
    ordered = [key for key in ordered if key != "seed"]
    chosen: list[str] = []
    for key in ordered:
        if len(_by_values(runs, [*chosen, key], labels)) > len(_by_values(runs, chosen, labels)):
            chosen.append(key)
    for run in runs:  # one that has none of these is named by what it has instead: epochs where others have steps
        has = [key for key in keys if _value(run, key) is not None]
        if has and not any(_value(run, key, labels) for key in chosen):
            chosen.append(has[0])
    return chosen or ordered[:1]


def _label(values: dict[str, str], keys: Sequence[str]) -> str:
    """Return the name of a group: `fedavg, lr = 0.1`, or `without local.lr` if it has none of the keys."""
    short, words = short_keys(keys), []
    for key, value in values.items():
        bare = key in BARE or not ("." in key or key in (*all_keys(), PLUGINS))
        words.append(value if bare else f"{short[key]} = {value}")
    return ", ".join(words or [f"without {key}" for key in keys])


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Return each key without its table, if no other key of them ends alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def _by_values(
    runs: Iterable[OneRun], keys: Sequence[str], labels: Collection[str] = ()
) -> dict[tuple[str | None, ...], list[OneRun]]:
    found: dict[tuple[str | None, ...], list[OneRun]] = {}
    for run in runs:
        found.setdefault(tuple(_value(run, key, labels) for key in keys), []).append(run)
    return found


def _value(run: OneRun, key: str, labels: Collection[str] = ()) -> str | None:
    """Return a run's value of a key as tables show it; None if it has none, or its sweep did not vary this label."""
    if run.labels and key in labels and key not in run.labels:
        return None
    found = run.table if key in run.table else run.labels
    return shown_value(found[key]) if key in found else None


def _differing(runs: Sequence[OneRun]) -> list[str]:
    return [key for key in differing([run.table for run in runs]) if key == "evaluation.on" or matters(key)]


def matters(key: str) -> bool:
    """Check whether a key changes what is learned, other than by chance as the seed does."""
    return key != "seed" and (key in STOPPING or not key.startswith(OF_NO_MATTER))


def _with_names_of_data(runs: Sequence[OneRun]) -> list[OneRun]:
    """Return the runs with a name of their data: shards of one checksum have one name, whatever their folders.

    Partitions that are drawn again for each seed have one name, with {seed}. Shards that were prepared otherwise in the
    same folder meanwhile have their checksums beside the name.
    """
    here = os.getcwd() + os.sep
    first: dict[str, str] = {}
    same: dict[str, list[OneRun]] = {}
    for run in runs:
        text = str(run.table.get(DATA, "digits")).removeprefix(here)
        same.setdefault(first.setdefault(run.data or text, text), []).append(run)
    named = {}
    for name, together in same.items():
        one_seed = len({run.seed for run in together}) == 1
        pattern = rf"^(.*)(?<!\d){together[0].seed}(?!\d)"
        text = re.sub(pattern, r"\g<1>{seed}", name, count=1, flags=re.DOTALL) if one_seed else name
        several = len({run.data for run in together} - {""}) > 1
        for run in together:
            shown = f"{text} (sha256 {run.data[:8]})" if several else text
            named[run.folder] = replace(run, table=run.table | {DATA: shown})
    return [named[run.folder] for run in runs]


def notes_on(groups: Iterable[SeedGroup]) -> list[str]:
    """Return differences between runs on the same data that would be overlooked."""
    notes = []
    for together in by_data(groups).values():
        runs = [run for group in together for run in group.runs.values()]
        every = dict.fromkeys(_value(run, "evaluation.every") or "1" for run in runs)
        rounds = dict.fromkeys(str(len(run.records)) for run in runs)
        if len(every) > 1:
            why = "best rounds and rounds to a target depend on the number of evaluations"
            notes.append(f"evaluation.every differs ({', '.join(every)}): {why}")
        if len(rounds) > 1:
            notes.append(f"rounds differs ({', '.join(rounds)}): final values are from different rounds")
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
    runs = read_runs([pattern])
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

    runs = [run for run in read_runs([pattern]) if run.records]
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
