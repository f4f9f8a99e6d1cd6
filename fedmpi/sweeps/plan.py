"""A sweep's file: which runs it describes, each with its complete configuration, name, folder and shards.

The file is a configuration with a table [sweep] of crossed lists, [[sweep.run]] tables, each a variant with a name, and
[prepare] tables for the shards. `base = "other.toml"` lays it over another file. All runs are validated before the
first one starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.registry import ARRAYS
from fedmpi.config import Config
from fedmpi.config.base import ALTERNATIVES, Values, written
from fedmpi.config.keys import all_keys, unknown_key
from fedmpi.config.loading import (
    OF_A_SWEEP,
    assignments,
    build_config,
    dotted,
    drop_alternatives,
    put_over,
    read_toml,
    setting_layers,
)
from fedmpi.config.writing import not_repeatable, shown_value
from fedmpi.results.loading import BARE, short_keys
from fedmpi.sweeps.shards import Preparation, prepare_words

SEED = "{seed}"
"""Placeholder for a run's seed in the texts of [prepare]."""
SHARDS, PREPARE = "data.source", "prepare."


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    index: int  # From 0 on: the number of its task in a SLURM array
    name: str  # What differs, as the name of its folder
    folder: Path
    labels: Values  # Values that differ, by key; a variant's name by the name of its tables ("run")
    config: Config
    data: Preparation | None  # The shards that are prepared for it


@dataclass(frozen=True)
class Sweep:
    """All runs of a file."""

    origin: str  # The file
    out: Path  # The folder of the runs' folders
    ranks: int  # Ranks of every run
    runs: tuple[PlannedRun, ...]


def plan_sweep(
    given: str | Path | Mapping[str, Any], out: Path | None = None, settings: Sequence[str] = (), ranks: int = 1
) -> Sweep:
    """Return the runs that a file (or the same tables from Python) describes."""
    origin = "the sweep" if isinstance(given, Mapping) else str(given)
    tables = _read_tables(given, origin)
    for name in (key.partition(".")[0] for key in tables.shared):
        if name not in Config.model_fields:
            raise UserError(unknown_key(name, origin, [*all_keys(), *OF_A_SWEEP]))
    folder = out or Path("runs") / ("sweep" if isinstance(given, Mapping) else Path(origin).stem)
    found = list(_combinations(tables, origin, assignments(settings)))
    seeds = list(dict.fromkeys(labels.get("seed") for labels, _ in found))
    found.sort(key=lambda one: seeds.index(one[0].get("seed")))
    short = short_keys(dict.fromkeys(key for labels, _ in found for key in labels))
    planner = _Planner(origin, folder, tables, settings, short)
    runs = tuple(planner.planned(index, labels, values) for index, (labels, values) in enumerate(found))
    _check(runs, origin)
    if tables.prepare and not any(run.data for run in runs):
        raise UserError(f"{origin}: [prepare] is unused. Name one of its tables as data.source in a run, or remove it")
    return Sweep(origin, folder, ranks, runs)


# --- the file and its base ---


@dataclass
class SweepTables:
    """The tables of a file, merged with those of its base; values by flat keys."""

    shared: Values = field(default_factory=dict)  # Keys of all runs
    lists: Values = field(default_factory=dict)  # Lists that are crossed
    # Values by the name of the tables ("run") and of the variant
    variants: dict[str, dict[str, Values]] = field(default_factory=dict)
    prepare: dict[str, Values] = field(default_factory=dict)  # Options by name; "" for those of [prepare] itself


def _read_tables(given: str | Path | Mapping[str, Any], origin: str, above: tuple[Path, ...] = ()) -> SweepTables:
    table = dict(given) if isinstance(given, Mapping) else read_toml(Path(given))
    found, base = SweepTables(), table.pop("base", None)
    if base is not None:
        path = Path(str(base)) if isinstance(given, Mapping) else Path(given).parent / str(base)
        if path.resolve() in above:
            raise UserError(f"{path} is its own base. Name another file, or leave out base")
        found = _read_tables(path, str(path), (*above, path.resolve()))
    swept, prepare = (table.pop(name, {}) for name in ("sweep", "prepare"))
    for name, value in (("sweep", swept), ("prepare", prepare)):
        if not isinstance(value, Mapping):
            raise UserError(f"{origin}: {name} is a table of keys. Write [{name}] and its keys below it")
    shared = dotted(table)
    put_over(found.shared, shared)
    for key in shared:  # else the list of the base would take its place
        found.lists.pop(key, None)
    for name, value in swept.items():
        if _is_variant(name) and isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
            _put_variants_over(found.variants.setdefault(name, {}), value, f"{origin}: [[sweep.{name}]]")
        else:
            found.lists |= dotted({name: value})
    for name, value in prepare.items():
        named, options = (name, value) if isinstance(value, Mapping) else ("", {name: value})
        found.prepare[named] = found.prepare.get(named, {}) | dict(options)
    return found


def _put_variants_over(found: dict[str, Values], tables: Sequence[Mapping[str, Any]], where: str) -> None:
    """Change the variants of the base by name, drop some and add others."""
    names = [table.get("name") for table in tables]
    for name, table in zip(names, tables, strict=True):
        if not isinstance(name, str) or names.count(name) > 1:
            raise UserError(f'{where} needs a name of its own, not {name!r}. Add name = "…"')
        values = dotted({key: value for key, value in table.items() if key != "name"})
        if not values.pop("drop", False):
            put_over(found.setdefault(name, {}), values)
        elif found.pop(name, None) is None:
            raise UserError(f"{where} {name!r} is not in the base, so it cannot be dropped. Correct the name")


# --- combinations of lists and variants ---


def _combinations(tables: SweepTables, origin: str, chosen: Values) -> Iterator[tuple[Values, Values]]:
    """Yield labels and values by key of every run, in the order of the file; `chosen` are those of --set."""
    kinds = {kind: named for kind, named in tables.variants.items() if named}
    for together in product(*(named.items() for named in kinds.values())):
        label: Values = dict(zip(kinds, (name for name, _ in together), strict=True))
        own: Values = {}
        for _, values in together:
            if twice := sorted(own.keys() & values.keys()):
                raise UserError(f"{origin}: {twice[0]} is set by each of {' and '.join(label.values())}")
            own |= values
        fixed = {key: value for key, value in own.items() if not isinstance(value, list)}
        lists = {key: values for key, values in tables.lists.items() if key not in _with_alternatives(own | chosen)}
        overruled = _with_alternatives(chosen)
        lists |= {key: value for key, value in own.items() if key not in fixed and key not in overruled}
        for key, listed in lists.items():
            if not isinstance(listed, list) or not listed:
                raise UserError(f"{origin}: {key} = {listed!r} in [sweep]. Write a list of values, or set it outside")
        for chosen_values in product(*lists.values()):
            flat = dotted(dict(zip(lists, chosen_values, strict=True)))
            varied = {key: value for key, value in flat.items() if key not in chosen}
            yield label | varied, fixed | varied


def _with_alternatives(keys: Mapping[str, Any]) -> set[str]:
    """Return the keys, and those that give way to them."""
    return {*keys, *(other for pair in ALTERNATIVES for other in pair if any(key in keys for key in pair))}


# --- one run ---


@dataclass(frozen=True)
class _Planner:
    """Settings that the runs of a sweep share."""

    origin: str
    out: Path
    tables: SweepTables
    settings: Sequence[str]
    short: dict[str, str]  # Keys without their tables

    def planned(self, index: int, labels: Values, values: Values) -> PlannedRun:
        """Return the run with these values."""
        name = _run_name(labels, self.short)
        own = {key: value for key, value in values.items() if not key.startswith(PREPARE)}
        varied = {key.removeprefix(PREPARE): value for key, value in values.items() if key.startswith(PREPARE)}
        common = dict(self.tables.shared)
        drop_alternatives(common, own)
        layers = [(self.origin, common), (self.origin, own), *setting_layers(self.settings)]
        together = {key: value for _, layer in layers for key, value in layer.items()}
        try:
            data = self._shards(together.get(SHARDS, ""), varied, together.get("seed", 0))
            if data is not None:
                layers.append((self.origin, {SHARDS: str(data.folder)}))
            config = build_config(layers)
        except UserError as error:
            raise UserError(f"run {name}: {error}") from error
        return PlannedRun(index, name, self.out / name, labels, config, data)

    def _shards(self, name: Any, varied: Values, seed: Any) -> Preparation | None:
        """Return the shards of a run, in a folder named by what they depend on; None if data.source names others."""
        tables = self.tables.prepare
        if name not in ([named for named in tables if named] or tables):
            if varied:
                raise UserError(
                    f"{PREPARE}{next(iter(varied))} has no effect, since the run uses no [prepare] table. Remove it"
                )
            return None
        given = {**tables.get("", {}), **tables[name], **varied}
        filled = {key: _with_seed(value, seed) for key, value in given.items()}
        words = prepare_words(filled, f"{self.origin}: [prepare]")
        labels = {"preset": name or filled["dataset"], **{PREPARE + key: value for key, value in varied.items()}}
        labels |= {"seed": seed} if filled != given else {}
        folder = self.out / "shards" / _run_name(labels, self.short)
        return Preparation(folder.absolute(), words)  # found from whatever folder a run starts in


def _with_seed(value: Any, seed: Any) -> Any:
    if isinstance(value, list):
        return [_with_seed(one, seed) for one in value]
    return value.replace(SEED, str(seed)) if isinstance(value, str) else value


def _check(runs: Sequence[PlannedRun], origin: str) -> None:
    """Reject runs of one folder, unknown models, and objects that no file holds."""
    from fedmpi.models import check_model_options  # imports torch

    names = {"shards"}
    for run in runs:
        where = f"{origin}, run {run.name}"
        sentences = not_repeatable(run.config)
        if run.config.data.source.name.startswith(ARRAYS):
            sentences.append("data.source are arrays in memory: name a function that makes them, module:function")
        if sentences:
            raise UserError(f"{where}: runs of a sweep start from files, but {sentences[0]}")
        if run.name in names:
            raise UserError(f"{where}: another run or the shards already use the folder {run.folder}. Rename this run")
        names.add(run.name)
        try:
            check_model_options(run.config.model.choice, run.config.model.options)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


# --- names ---


def _run_name(labels: Mapping[str, Any], short: Mapping[str, str]) -> str:
    """Return the name of a run: variants' names first, then the preset, other keys, and the seed last."""
    order = sorted(labels, key=lambda key: (key == "seed", not _is_variant(key), key != "preset"))
    bare = [key for key in order if key in BARE or _is_variant(key)]
    heads = {key: "" if key in bare else f"{short.get(key, key.removeprefix(PREPARE))}=" for key in order}
    return ",".join(heads[key] + _slug(labels[key]) for key in order) or "run"


def _is_variant(key: str) -> bool:
    """Check whether a label is the name of a variant, not the value of a key."""
    return key.partition(".")[0] not in Config.model_fields and not key.startswith(PREPARE)


def _slug(value: Any) -> str:
    """Return a value as part of a name: letters, digits and some signs, others as -."""
    text = shown_value(written(value))
    return text if isinstance(value, int | float) else re.sub(r"[^\w.+~-]+", "-", text).strip("-.") or "-"
