"""Runs of a study: read from their folders, grouped over seeds, as one table (`fedmpi.load_runs`, `fedmpi.frame`)."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedmpi.api import Run, load_run
from fedmpi.common.errors import UserError
from fedmpi.common.registry import KINDS
from fedmpi.config.keys import all_keys, unknown_key
from fedmpi.config.layers import dotted, read_toml
from fedmpi.records.history import Record, ending_of, read_records, read_summary
from fedmpi.records.provenance import FOLDER, MAY_CHANGE, SHARDS, find_shards, is_foreign, kept_digests, recorded_digest

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIGURATION, PLANNED, NOTE = "config.toml", "sweep.toml", "sweep.json"
"""Files of a run: its configuration; what a sweep will start it with; and what that has noted of it."""
SOURCES = f"{FOLDER}/"
"""Begins the keys of source files."""
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)")


@dataclass(frozen=True)
class OneRun:
    """A run as read from its folder."""

    folder: Path
    # The complete configuration, {"part.key": value}, as config.toml holds it, `data.source` where they are now; and by
    # "plugins/FILE" the SHA-256 of each source file of custom components
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
        """State of the run."""
        if self.summary:
            return "finished"
        if self.failure:
            return "failed"
        return "unfinished" if self.records else "not begun"

    @property
    def where(self) -> str:
        """Folder of the run, and its finished rounds."""
        return f"{self.folder} ({len(self.records)} of {self.table.get('rounds')} rounds)"

    @property
    def state_text(self) -> str:
        """State of the run, in words."""
        return f"{self.where} {f'failed: {self.failure}' if self.state == 'failed' else f'is {self.state}'}"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def seed(self) -> int:
        """Seed of the run's random numbers."""
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
            if runs_in(path, planned=True):
                raise UserError(f"no run in {path} has begun: fedmpi compare {path} shows the state of each")
            raise UserError(f"{path} holds no run: there is no config.toml in it, or in a folder below it")
        found |= {folder.resolve(): folder for folder in inside if folder.resolve() not in found}
    return list(found.values())


def runs_in(*folders: Path, planned: bool = False) -> list[Path]:
    """The folders that are a run's own, and of the others those below them that are, numbers in names by value."""
    found = [[folder] if _is_run(folder, planned) else _below(folder, planned) for folder in folders]
    return sorted(dict.fromkeys(one for inside in found for one in inside), key=_by_numbers)


def _is_run(folder: Path, planned: bool) -> bool:
    """Return True if a run has begun in a folder, or, if `planned`, a sweep has left its configuration there.

    A sweep leaves two files: sweep.toml by itself may be the user's, the file of a sweep.
    """
    begun = (folder / CONFIGURATION).is_file()
    return begun or (planned and all((folder / name).is_file() for name in (PLANNED, NOTE)))


def _by_numbers(folder: Path) -> tuple[list[str | float], str]:
    """Return the key that sorts folders: by their names, numbers in them by their values."""
    name = str(folder)
    pieces = NUMBER.split(name)  # text, number, text, ...
    return [float(piece) if place % 2 else piece for place, piece in enumerate(pieces)], name


def _below(folder: Path, planned: bool) -> Iterable[Path]:
    """Yield the run folders in a folder, except folders among the plugins that a run keeps."""
    for name in (CONFIGURATION, PLANNED):
        for found in (path.parent for path in folder.rglob(name)):
            way = found.relative_to(folder).parts
            around = (folder.joinpath(*way[:place]) for place, part in enumerate(way) if part == "plugins")
            if _is_run(found, planned) and not any((run / CONFIGURATION).is_file() for run in around):
                yield found


def read_runs(folders: Iterable[Path]) -> list[OneRun]:
    """The runs of these folders; one that has no record yet has an empty list of them."""
    return [_read_run(folder) for folder in folders]


def _read_run(folder: Path) -> OneRun:
    path = next(
        (path for name in (CONFIGURATION, PLANNED) if (path := folder / name).is_file()), folder / CONFIGURATION
    )
    table = dotted(read_toml(path))
    summary, note = read_summary(folder / "summary.json"), read_summary(folder / NOTE)
    ending = ending_of(summary, path) if summary else "stopped"
    labels, failure = note.get("labels", {}), str(note.get("failure", ""))
    records = read_records(folder)
    if shards := find_shards(folder, str(table.get(SHARDS))):
        table[SHARDS] = shards
    table |= {f"{SOURCES}{name}": digest[:8] for name, digest in kept_digests(folder).items()}
    return OneRun(folder, table, records, summary, ending, labels, failure, recorded_digest(folder) or "")


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
    return f"{value:g}" if isinstance(value, float) else _shown(value)


FolderKey = str
"""A run's folder, as text."""
DATA = "data.source"
BARE = ("preset", DATA, "model")
"""Keys whose values say enough without the key."""
OF_NO_MATTER = tuple(key for key in MAY_CHANGE if key != "rounds")
"""Keys that change nothing about what is learned."""


def plain(name: str) -> str:
    """A name as it is compared: without capitals, and without spaces around commas and signs of equality."""
    return re.sub(r"\s*([,=])\s*", r"\1", name.strip()).lower()


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in nothing but the seed."""

    # Values that distinguish it from the others of its block, by key; None for a key that it does not have
    values: dict[str, str | None]
    runs: dict[int, OneRun]  # The runs by seed

    @property
    def parts(self) -> dict[str, str]:
        """The same as parts of a name, by key: `lr = 0.1`, `0.1` where that says enough, or `without local.lr`."""
        ends = [key.removeprefix(SOURCES) if _is_source(key) else key.rpartition(".")[2] for key in self.values]
        names = {key: end if ends.count(end) == 1 else key for key, end in zip(self.values, ends, strict=True)}
        return {
            key: f"without {key}" if value is None else f"{names[key]} = {value}" if _has_its_key(key) else value
            for key, value in self.values.items()
        }

    @property
    def words(self) -> list[str]:
        """Components of the name; `without local.lr` and such are left out unless there are no others."""
        given = [part for key, part in self.parts.items() if self.values[key] is not None]
        return given or [*self.parts.values()]

    @property
    def label(self) -> str:
        """Name of the group in tables."""
        return ", ".join(self.words)

    def is_called(self, name: str) -> bool:
        """Return True if that is its name, apart from capitals and spaces around commas and signs of equality."""
        return plain(name) in (plain(self.label), plain(", ".join(self.parts.values())))


@dataclass(frozen=True)
class GroupsAlike:
    """Groups on the same data, evaluated alike."""

    title: str  # Name of the data, if there are several blocks
    groups: list[SeedGroup]
    notes: list[str]  # Facts that a reader has to know before comparing


def blocks_of(runs: Sequence[OneRun], by: Sequence[str] = ()) -> list[GroupsAlike]:
    """Finished runs, put together."""
    for key in by:
        if not any(key in run.table or key in run.labels for run in runs) and key not in all_keys():
            known = [*all_keys(), *(key for run in runs for key in run.labels)]
            raise UserError(unknown_key(key, "--by", known))
    data = _data_names(runs)
    found: dict[tuple[str | None, ...], list[OneRun]] = {}
    keys = [key for key in _differing(runs, data) if _of_the_measure(key)]
    for run in runs:
        found.setdefault(tuple(_value(run, key, data) for key in keys), []).append(run)
    blocks = []
    for values, together in found.items():
        parts = [f"{key} = {value}" for key, value in zip(keys, values, strict=True) if value is not None]
        title = ", ".join(parts or (f"without {key}" for key in keys))
        blocks.append(GroupsAlike(title, _groups(together, by, data), _notes(together)))
    return blocks


def _groups(runs: Sequence[OneRun], by: Sequence[str], data: dict[FolderKey, str]) -> list[SeedGroup]:
    keys = [key for key in _differing(runs, data) if not key.startswith(OF_NO_MATTER)]
    found: dict[tuple[str | None, ...], list[OneRun]] = {}
    for run in runs:
        found.setdefault(tuple(_value(run, key, data) for key in keys), []).append(run)
    apart = _what_sets_apart(list(found.values()), keys, by, data)
    named: dict[tuple[str | None, ...], list[OneRun]] = {}
    for own, together in zip(apart, found.values(), strict=True):
        other = named.setdefault(tuple(own.values()), together)
        if other is not together:
            mixed = [key for key in keys if _value(other[0], key, data) != _value(together[0], key, data)]
            key = next((key for key in ("preset", "local.lr") if key in mixed), mixed[0])
            one, two = (_value(pair[0], key, data) or f"without {key}" for pair in (other, together))
            raise UserError(
                f"--by {','.join(by)} puts runs together that differ in {key} ({one}, {two}): "
                f"--by {','.join([*by, key])} keeps them apart"
            )
    return [SeedGroup(own, _by_seed(together)) for own, together in zip(apart, found.values(), strict=True)]


def _by_seed(runs: Sequence[OneRun]) -> dict[int, OneRun]:
    seeds: dict[int, OneRun] = {}
    for run in runs:
        if seeds.setdefault(run.seed, run) is not run:
            raise UserError(
                f"{seeds[run.seed].folder} and {run.folder} are the same run, seed {run.seed} included: name one"
            )
    return dict(sorted(seeds.items()))


def _what_sets_apart(
    groups: Sequence[Sequence[OneRun]], keys: Sequence[str], by: Sequence[str], data: dict[FolderKey, str]
) -> list[dict[str, str | None]]:
    """Return the values that distinguish each group: of the keys `by`, its sweep's keys, or as few keys as suffice."""

    def values_of(chosen: Sequence[str], value: Callable[[OneRun, str], str | None]) -> list[dict[str, str | None]]:
        return [{key: value(group[0], key) for key in chosen} for group in groups]

    if by:
        return values_of(by, lambda run, key: _value(run, key, data))
    own = list(dict.fromkeys(key for group in groups for run in group for key in run.labels if key != "seed"))
    for labels in (own, [*own, *filter(_is_source, keys)]) if own else ():
        named = [{tuple(_labeled(run, key) for key in labels) for run in group} for group in groups]
        if all(len(one) == 1 for one in named) and len(set.union(*named)) == len(groups):
            varied = [key for key in labels if len({_labeled(group[0], key) for group in groups}) > 1]
            return values_of(varied or labels, _labeled)
    ordered = [*(key for key in BARE if key in keys), *(key for key in keys if key not in BARE)]
    chosen: list[str] = []

    def classes(keys: Sequence[str]) -> int:
        return len({tuple(_value(group[0], key, data) for key in keys) for group in groups})

    for key in ordered:
        if classes([*chosen, key]) > classes(chosen):
            chosen.append(key)
    for group in groups:  # one that has none of these is named by what it has instead: epochs where others have steps
        own = [key for key in ordered if _value(group[0], key, data) is not None]
        if own and not set(own) & set(chosen):
            chosen.append(own[0])
    return values_of(chosen or ["preset"], lambda run, key: _value(run, key, data))


def _of_the_measure(key: str) -> bool:
    """Return True if scores of runs that differ in this key are not comparable."""
    return key == "evaluation.on" or (key.startswith("data.") and not key.startswith(OF_NO_MATTER))


def _has_its_key(key: str) -> bool:
    """Return True if a value is named together with its key, and not alone as in a list of variants."""
    return key not in BARE and ("." in key or key in all_keys())


def _labeled(run: OneRun, key: str) -> str | None:
    return _shown(run.labels[key]) if key in run.labels else _value(run, key, {})


def _value(run: OneRun, key: str, data: dict[FolderKey, str]) -> str | None:
    """Return a run's value of a key, as tables show it; None if it has none."""
    if key == DATA and str(run.folder) in data:
        return data[str(run.folder)]
    if key in run.table or key in run.labels:
        return _shown(run.table[key] if key in run.table else run.labels[key])
    return None


def _shown(value: Any) -> str:
    """Return a value as text: components of a list by name, their options in brackets."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, Mapping):
        options = ", ".join(f"{key} = {_shown(inner)}" for key, inner in value.items() if key != "name")
        return f"{value.get('name', '')}({options})" if options else str(value.get("name", "{}"))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _differing(runs: Sequence[OneRun], data: dict[FolderKey, str]) -> list[str]:
    """Keys in whose values the runs differ, without the seed; see `differing`."""
    keys = dict.fromkeys(key for run in runs for key in run.table if key != "seed")
    shown = ({key: _value(run, key, data) for key in keys if key in run.table or not _is_source(key)} for run in runs)
    return differing(list(shown))


def _is_source(key: str) -> bool:
    return key.startswith(SOURCES)


def _data_names(runs: Sequence[OneRun]) -> dict[FolderKey, str]:
    """The data of each run, by its folder: shards of one checksum have one name, whatever their folders.

    Partitions that are drawn again for each seed have one name, with {seed}. Shards that were prepared otherwise in the
    same folder meanwhile have their checksums beside the name.
    """
    folders: dict[str, str] = {}
    seeds: dict[str, set[int]] = {}
    checksums: dict[str, set[str]] = {}
    for run in runs:
        text = _near(str(run.table.get(DATA, "digits")))
        text = folders[str(run.folder)] = folders.setdefault(run.data or text, text)
        seeds.setdefault(text, set()).add(run.seed)
        checksums.setdefault(text, set()).add(run.data)
    names = {}
    for run in runs:
        text = folders[str(run.folder)]
        name = text if len(seeds[text]) > 1 else _without_seed(text, run.seed)
        names[str(run.folder)] = f"{name} (sha256 {run.data[:8]})" if len(checksums[text] - {""}) > 1 else name
    return names


def _near(shards: str) -> str:
    """A folder below the working directory by its way from there."""
    here = os.getcwd() + os.sep
    return shards.removeprefix(here) if shards.startswith(here) else shards


def _without_seed(shards: str, seed: int) -> str:
    """A folder's name with the last number in it that is the seed replaced."""
    return re.sub(rf"^(.*)(?<!\d){seed}(?!\d)", r"\g<1>{seed}", shards, count=1, flags=re.DOTALL)


def _notes(runs: Sequence[OneRun]) -> list[str]:
    """Return differences between runs of one block that would be overlooked."""
    notes = source_notes(runs)
    for key, why in (
        ("evaluation.every", "best rounds and rounds to a target depend on the number of evaluations"),
        ("rounds", "final values are from different rounds"),
    ):
        settings = [str(len(run.records)) if key == "rounds" else _value(run, key, {}) for run in runs]
        values = [value for value in dict.fromkeys(settings) if value is not None]
        if len(values) > 1:
            notes.append(f"{key} differs ({', '.join(values)}): {why}")
    for key, name in (("clients", "numbers of clients"), ("data", "shapes or scales of the data")):
        for seed in {run.seed for run in runs}:
            held = {str(run.summary[key]) for run in runs if run.seed == seed and key in run.summary}
            if len(held) > 1:
                notes.append(f"{name} differ between runs of seed {seed}: their data are not the same")
                break
    return notes


def source_notes(runs: Sequence[OneRun]) -> list[str]:
    """Return the components whose sources differ between otherwise identical runs, with their files and runs."""
    data = _data_names(runs)
    keys = [key for key in _differing(runs, data) if not key.startswith(OF_NO_MATTER)]
    alike: dict[tuple[str | None, ...], list[OneRun]] = {}
    for run in runs:
        alike.setdefault(tuple(_value(run, key, data) for key in keys if not _is_source(key)), []).append(run)
    files: dict[str, list[OneRun]] = {}
    for together in alike.values():
        for key in filter(_is_source, differing([run.table for run in together])):
            files.setdefault(key, []).extend(run for run in together if key in run.table)
    notes = []
    for key, among in files.items():
        versions: dict[str, list[str]] = {}
        for run in among:
            versions.setdefault(run.table[key], []).append(run.name)
        listed = "; ".join(f"{digest} in {shortened(names)}" for digest, names in versions.items())
        file = key.removeprefix(SOURCES)
        component = components_from(file, [run.table for run in among])
        notes.append(f"{file} of {component} differs (sha256): {listed}. Those runs are separate groups")
    return notes


def shortened(names: Sequence[str], most: int = 8) -> str:
    """A list of names, of many the first ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def components_from(file: str, tables: Sequence[dict[str, Any]]) -> str:
    """The components that were chosen from a source file; of a file that is only imported, all custom ones."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    chosen = {
        (kind.key, choice)
        for table in tables
        for kind in KINDS.values()
        for value in [table.get(kind.key)]
        for choice in map(_name_of, value if isinstance(value, list) else [value])
        if is_foreign(kind.name, choice)
    }
    own = [(key, name) for key, name in chosen if name.partition(":")[0] == module or file.startswith(f"{key}.")]
    return ", ".join(f"{key} = {name}" for key, name in sorted(own or chosen))


def _name_of(choice: Any) -> str:
    """Return the name of a component. In a list, a component is a table with its name and options."""
    return str(choice["name"] if isinstance(choice, Mapping) and "name" in choice else choice)


def load_runs(pattern: str | Path, unfinished: bool = False) -> list[Run]:
    """Read the finished runs in the folders that a pattern names, as `runs/fedavg-*`, or below them.

    Runs that are not finished are left out, and a warning names them. A warning also names the source files of custom
    components that differ between the runs.

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
    kept = [run for run in runs if unfinished or run.state == "finished"]
    if not kept:
        listed = shortened([run.where for run in runs])
        raise UserError(f"no run of {pattern} is finished: {listed}. Continue them, or set unfinished=True")
    if left := [run.where for run in runs if run.state != "finished" and not unfinished]:
        warnings.warn(f"left out, not finished: {shortened(left)}. unfinished=True returns them too", stacklevel=2)
    _warn_of_sources(kept)
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
        the runs differ, such as `local.lr`, and `plugins/FILE` for source files of custom components that differ;
        `round`, and what the records hold, numbers in tables of theirs as `table.name`.

    Raises
    ------
    UserError
        There is no run, or none has a record.
    """
    from pandas import json_normalize  # slow to import

    runs = [run for run in _read(pattern) if run.records]
    if not runs:
        raise UserError(f"no run of {pattern} has finished a round yet: nothing to show")
    if left := [run.where for run in runs if run.state != "finished"]:
        warnings.warn(f"not finished: {shortened(left)}; their rows have finished = False", stacklevel=2)
    _warn_of_sources(runs)
    above = os.path.commonpath([run.folder.resolve().parent for run in runs])
    keys = [key for key in differing([run.table for run in runs]) if key != "seed"]
    rows = []
    for run in runs:
        name = Path(os.path.relpath(run.folder.resolve(), above)).as_posix()
        facts = {"run": name, "seed": run.seed, "finished": run.state == "finished"}
        facts |= {key: str(value) if isinstance(value := run.table.get(key), list) else value for key in keys}
        rows += [facts | record for record in run.records]
    return json_normalize(rows)


def _read(pattern: str | Path) -> list[OneRun]:
    """The runs that a pattern names, or that are below what it names."""
    whole = Path(pattern)
    named = [whole] if whole.is_dir() else [path for path in map(Path, glob.glob(str(pattern))) if path.is_dir()]
    found = runs_in(*named) if named else []
    if not found:
        raise UserError(f"no folder named {pattern} holds a run, or folders of runs")
    return read_runs(found)


def _warn_of_sources(runs: Sequence[OneRun]) -> None:
    for note in source_notes(runs):
        warnings.warn(note, stacklevel=3)
