"""A sweep's file: which runs it describes, each with its complete configuration, name, folder and shards.

The file is a configuration with a table [sweep] of crossed lists, [[sweep.run]] tables, each a variant with a name, and
[prepare] tables for the shards. `base = "other.toml"` lays it over another file. All runs are validated before the
first one starts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.registry import ARRAYS
from fedmpi.config import Config
from fedmpi.config.base import ALTERNATIVES, Values, written
from fedmpi.config.keys import all_keys, unknown_key
from fedmpi.config.layers import OF_A_SWEEP, assignments, dotted, drop_alternatives, put_over, read_toml
from fedmpi.config.loading import Layer, build_config, setting_layers
from fedmpi.config.writing import config_toml, not_repeatable, shown_value
from fedmpi.sweeps.shards import Preparation, prepare_words

SEED = "{seed}"
"""Placeholder for a run's seed in the texts of [prepare]."""
SHARDS, PREPARE = "data.source", "prepare."
LONGEST = 150
"""Bytes of a run's name; file systems take 255."""
BY_THEMSELVES = ("preset", "data.source", "model")
"""Keys whose values say enough without the key."""


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


@dataclass
class SweepTables:
    """The tables of a file, merged with those of its base."""

    shared: Values  # Keys of all runs, flat
    sweep: Values  # Lists by key, and lists of variants by the name of their tables
    prepare: Values


def plan_sweep(
    given: str | Path | Mapping[str, Any],
    out: Path | None = None,
    settings: Sequence[str] = (),
    ranks: int | None = None,
) -> Sweep:
    """Return the runs that a file (or the same tables from Python) describes."""
    origin = "the sweep" if isinstance(given, Mapping) else str(given)
    tables = _read_tables(given, origin)
    for name in (key.partition(".")[0] for key in tables.shared):
        if name not in Config.model_fields:
            raise UserError(unknown_key(name, origin, [*all_keys(), *OF_A_SWEEP]))
    ranks = tables.sweep.pop("ranks", 1) if ranks is None else ranks
    if not isinstance(ranks, int) or ranks < 1:
        raise UserError(f"{origin}: ranks = {ranks!r} is impossible. Give a number from 1 on")
    prepared = _preparations(tables.prepare)
    folder = out or Path("runs") / ("sweep" if isinstance(given, Mapping) else Path(origin).stem)
    found = list(_combinations(tables.sweep, origin, assignments(settings)))
    seeds = list(dict.fromkeys(labels.get("seed") for labels, _ in found))
    found.sort(key=lambda one: seeds.index(one[0].get("seed")))
    variants = [name for name, value in tables.sweep.items() if _is_variants(name, value)]
    short = _short_keys(key for labels, _ in found for key in labels if key not in variants)
    runs: list[PlannedRun] = []
    for index, (labels, values) in enumerate(found):
        name = _run_name(labels, variants, short)
        config, data = _configured(tables.shared, values, settings, prepared, origin, name, folder, short)
        runs.append(PlannedRun(index, name, folder / name, labels, config, data))
    _check(runs, origin)
    if prepared and not any(run.data for run in runs):
        name = next(iter(prepared))
        raise UserError(f'{origin}: [prepare.{name}] is unused. Set data.source = "{name}" in a run, or remove it')
    return Sweep(origin, folder, ranks, tuple(runs))


# --- the file and its base ---


def _read_tables(given: str | Path | Mapping[str, Any], origin: str, above: tuple[Path, ...] = ()) -> SweepTables:
    table = dict(given) if isinstance(given, Mapping) else read_toml(Path(given))
    found, base = SweepTables({}, {}, {}), table.pop("base", None)
    if base is not None:
        path = Path(str(base)) if isinstance(given, Mapping) else Path(given).parent / str(base)
        if path.resolve() in above:
            raise UserError(f"{path} is its own base. Name another file, or leave out base")
        found = _read_tables(path, str(path), (*above, path.resolve()))
    swept, prepare = (_table(table.pop(name, {}), name, origin) for name in ("sweep", "prepare"))
    shared = dotted(table)
    for key in shared:  # else the list of the base would take its place
        found.sweep.pop(key, None)
    put_over(found.shared, shared)
    variants = {name: value for name, value in swept.items() if _is_variants(name, value)}
    lists = dotted({name: value for name, value in swept.items() if name not in variants})
    return SweepTables(found.shared, _laid_over(found.sweep, variants | lists), _laid_over(found.prepare, prepare))


def _table(value: Any, name: str, origin: str) -> Values:
    if not isinstance(value, Mapping):
        raise UserError(f"{origin}: {name} is a table of keys. Write [{name}] and its keys below it")
    return dict(value)


def _is_variants(name: str, value: Any) -> bool:
    """Check whether a value in [sweep] is a list of variants; a list of components belongs to a key."""
    tables = isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)
    return tables and name.partition(".")[0] not in Config.model_fields


def _laid_over(below: Values, above: Values) -> Values:
    """Return one table over another: inner tables key by key, variants name by name, all else replaced."""
    found = dict(below)
    for key, value in above.items():
        under: Any = found.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            found[key] = _laid_over(dict(under), dict(value))
        elif _is_variants(key, value) and _is_variants(key, under):
            found[key] = _variants_by_name(key, under, value)
        else:
            found[key] = value
    return found


def _variants_by_name(kind: str, below: list[Values], above: list[Values]) -> list[Values]:
    found = {table.get("name"): table for table in below}
    if len(found) < len(below):
        raise UserError(f"two [[sweep.{kind}]] of the base have the same name. Give each its own")
    for table in above:
        name = table.get("name")
        if table.get("drop"):
            if found.pop(name, None) is None:
                raise UserError(f"[[sweep.{kind}]] {name!r} cannot be dropped: the base has no variant of this name")
        else:
            found[name] = dotted(found.get(name, {}))
            put_over(found[name], dotted(table))
    return list(found.values())


# --- combinations of lists and variants ---


def _combinations(swept: Values, origin: str, chosen: Values) -> Iterator[tuple[Values, Values]]:
    """Yield labels and values by key of every run, in the order of the file; `chosen` are those of --set."""
    variants = {kind: tables for kind, tables in swept.items() if _is_variants(kind, tables)}
    axes = {key: values for key, values in swept.items() if key not in variants}
    for together in product(*([(kind, table) for table in tables] for kind, tables in variants.items())):
        label: Values = {}
        own: Values = {}
        for kind, table in together:
            values = dotted({key: value for key, value in table.items() if key != "name"})
            label[kind] = table.get("name")
            if not isinstance(label[kind], str):
                raise UserError(f'{origin}: [[sweep.{kind}]] needs a name. Add name = "…"')
            if twice := sorted(own.keys() & values.keys()):
                raise UserError(f"{origin}: {twice[0]} is set by each of {' and '.join(label.values())}")
            own |= values
        fixed = {key: value for key, value in own.items() if not isinstance(value, list)}
        lists = {key: values for key, values in axes.items() if key not in _with_alternatives(own | chosen)}
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


def _configured(
    shared: Values,
    values: Values,
    settings: Sequence[str],
    prepared: Mapping[str, Values],
    origin: str,
    name: str,
    out: Path,
    short: Mapping[str, str],
) -> tuple[Config, Preparation | None]:
    """Return the complete configuration of a run, and its shards if they are to be prepared."""
    own = {key: value for key, value in values.items() if not key.startswith(PREPARE)}
    varied = {key.removeprefix(PREPARE): value for key, value in values.items() if key.startswith(PREPARE)}
    common = dict(shared)
    drop_alternatives(common, own)
    where, data = f"{origin}, run {name}", None
    layers: list[Layer] = [(origin, common), (where, own), *setting_layers(settings)]
    together = {key: value for _, layer in layers for key, value in layer.items()}
    source = together.get(SHARDS, "")
    if isinstance(source, str) and source in prepared:
        seed = together.get("seed", 0)
        data = _preparation(source, prepared[source], varied, seed, f"{origin}: [prepare]", out, short)
        layers.append((origin, {SHARDS: str(data.folder)}))
    elif varied:
        raise UserError(f"{where}: {PREPARE}{next(iter(varied))} has no effect: no [prepare] is used")
    try:
        return build_config(layers), data
    except UserError as error:
        if where in str(error):
            raise
        raise UserError(f"{f'run {name}' if origin in str(error) else where}: {error}") from error


def _check(runs: Sequence[PlannedRun], origin: str) -> None:
    """Reject runs of one folder or one configuration, unknown models, and objects that no file holds."""
    from fedmpi.models import check_model_options  # imports torch

    names: set[str] = {"shards"}
    texts: dict[str, PlannedRun] = {}
    models: set[str] = set()
    for run in runs:
        where, text, model = f"{origin}, run {run.name}", config_toml(run.config), run.config.model
        sentences = not_repeatable(run.config)
        if run.config.data.source.name.startswith(ARRAYS):
            sentences.append("data.source are arrays in memory: name a function that makes them, module:function")
        if sentences:
            raise UserError(f"{where}: runs of a sweep start from files, but {sentences[0]}")
        if run.name in names:
            raise UserError(f"{where}: another run or the shards already use the folder {run.folder}. Rename this run")
        if text in texts:
            raise UserError(f"{origin}: the runs {texts[text].name} and {run.name} are the same. Leave out one")
        names.add(run.name)
        texts[text] = run
        if (chosen := repr((model.name, model.options))) not in models:
            models.add(chosen)
            try:
                check_model_options(model.choice, model.options)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error


# --- shards ---


def _preparations(table: Values) -> dict[str, Values]:
    """Return the [prepare] tables by name, "" if there is just one. Keys of [prepare] itself apply to all."""
    named = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    common = {name: value for name, value in table.items() if name not in named}
    if not named:
        return {"": common} if common else {}
    return {name: {**common, **own} for name, own in named.items()}


def _preparation(
    name: str, options: Values, varied: Values, seed: Any, where: str, out: Path, short: Mapping[str, str]
) -> Preparation:
    """Return the shards of a run; their folder is named by what they depend on."""
    given = options | varied
    filled = {key: _with_seed(value, seed) for key, value in given.items()}
    words = prepare_words(filled, where)
    labels: Values = {PREPARE + key: value for key, value in varied.items()} | (
        {"seed": seed} if filled != given else {}
    )
    ends = {key: key.removeprefix(PREPARE) for key in labels}
    title = _run_name({"preset": name or filled["dataset"], **labels}, (), {**ends, **short})
    return Preparation(name, (out / "shards" / title).absolute(), words)  # found from whatever folder a run starts in


def _with_seed(value: Any, seed: Any) -> Any:
    if isinstance(value, list):
        return [_with_seed(one, seed) for one in value]
    return value.replace(SEED, str(seed)) if isinstance(value, str) else value


# --- names ---


def _run_name(labels: Mapping[str, Any], variants: Iterable[str], short: Mapping[str, str]) -> str:
    """Return the name of a run: variants' names first, then the preset, other keys, and the seed last."""
    named = set(variants)
    order = sorted(labels, key=lambda key: (key == "seed", key not in named, key != "preset"))
    bare = {*named, *BY_THEMSELVES}
    pieces = [("" if key in bare else f"{short.get(key, key)}=") + _slug(labels[key]) for key in order]
    name = ",".join(pieces) or "run"
    if len(name.encode()) > LONGEST:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name.encode()[:LONGEST].decode(errors='ignore')}~{digest}"
    return name


def _short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return each key without its table, if no other key of them ends alike."""
    listed = list(dict.fromkeys(keys))
    ends = [key.rpartition(".")[2] for key in listed]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(listed, ends, strict=True)}


def _slug(value: Any) -> str:
    """Return a value as part of a name: letters, digits and some signs, others as -."""
    value = written(value)
    if isinstance(value, int | float):
        return shown_value(value)
    text = Path(value).as_posix() if isinstance(value, str) else shown_value(value)
    return re.sub(r"-{2,}", "-", re.sub(r"[^\w.+~-]", "-", text)).strip("-.") or "-"


def labels_text(labels: Mapping[str, Any]) -> str:
    """Return a run's value of each key that differs, in a line."""
    return ", ".join(f"{key} = {shown_value(written(value))}" for key, value in labels.items())
