"""A sweep's file: which runs it describes, each with its complete configuration, name, folder and shards.

The file is that of a configuration with a table [sweep] beside: lists of values, crossed; [[sweep.run]] tables, each a
variant with a name; and [prepare] tables, the shards. `base = "other.toml"` lays it over another one. All runs are
validated before the first one starts.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeGuard

from fedmpi.common.errors import UserError, shown
from fedmpi.common.registry import ARRAYS, DIGITS
from fedmpi.config import Config
from fedmpi.config.base import ALTERNATIVES, Table, Values, written
from fedmpi.config.keys import all_keys, unknown_key
from fedmpi.config.layers import OF_A_SWEEP, assignments, dotted, drop_alternatives, put_over, read_toml
from fedmpi.config.loading import Layer, build_config, setting_layers
from fedmpi.config.writing import config_toml, not_repeatable
from fedmpi.sweeps.shards import Preparation, words_of

MOST_RUNS = 100_000
MOST_RANKS = 4096
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

    @property
    def rounds(self) -> int:
        """Number of rounds that it is to have."""
        return self.config.rounds


@dataclass(frozen=True)
class Sweep:
    """All runs of a file."""

    origin: str  # The file
    out: Path  # The folder of the runs' folders
    ranks: int  # Ranks of every run
    runs: tuple[PlannedRun, ...]


@dataclass(frozen=True)
class Variant:
    """A choice of settings: what it sets, what it crosses, and its label."""

    label: Values
    fixed: Values
    crossed: dict[str, list[Any]]


def plan_sweep(
    given: str | Path | Mapping[str, Any],
    out: Path | None = None,
    settings: Sequence[str] = (),
    ranks: int | None = None,
) -> Sweep:
    """The runs that a file (or the same tables from Python) describes."""
    origin = "the sweep" if isinstance(given, Mapping) else str(given)
    layers = read_layers(given if isinstance(given, Mapping) else Path(given))
    if len(layers) > 1:
        refuse_overruled_lists(layers, origin)
    swept: Values = reduce(laid_over, (_lists_of(layer.get("sweep", {}), origin) for layer in layers), {})
    shards: Values = reduce(laid_over, (_table(layer.get("prepare", {}), f"{origin}: prepare") for layer in layers), {})
    base: Values = {}
    for layer in layers:
        put_over(base, dotted({name: value for name, value in layer.items() if name not in OF_A_SWEEP}))
    for name in (key.partition(".")[0] for key in base):
        if name not in Config.model_fields:
            raise UserError(unknown_key(name, origin, [*all_keys(), *OF_A_SWEEP]))
    prepared = _preparations(shards, origin)
    folder = out or Path("runs") / (Path(origin).stem if not isinstance(given, Mapping) else "sweep")
    chosen = assignments(settings)
    found = list(islice(_combinations(swept, origin, chosen), MOST_RUNS + 1))
    if len(found) > MOST_RUNS:
        raise UserError(f"{origin} describes more than {MOST_RUNS:,} runs, which are the most: cross fewer lists")
    seeds = dict.fromkeys(repr(labels.get("seed")) for labels, _ in found)
    place = {seed: number for number, seed in enumerate(seeds)}
    found.sort(key=lambda one: place[repr(one[0].get("seed"))])
    variants = [name for name, value in swept.items() if _is_variants(name, value)]
    short = short_keys(key for labels, _ in found for key in labels if key not in variants)
    runs: list[PlannedRun] = []
    for index, (labels, values) in enumerate(found):
        name = run_name(labels, variants, short)
        config, data = _configured(base, values, settings, prepared, origin, name, folder, short)
        runs.append(PlannedRun(index, name, folder / name, labels, config, data))
    _refuse_objects(runs, origin)
    _refuse_models(runs, origin)
    _refuse_twins(runs, origin)
    _refuse_shared_folders(runs, origin)
    used = {run.data.name for run in runs if run.data is not None}
    for name in prepared:
        below = len(layers) > 1 and name not in layers[-1].get(
            "prepare", {}
        )  # descriptions in a base may be left unused
        if name not in used and not below:
            raise UserError(f'{origin}: [prepare.{name}] is used by no run: write data.source = "{name}" where it is')
    return Sweep(origin, folder, _ranks(swept.get("ranks", 1) if ranks is None else ranks, origin), tuple(runs))


def _combinations(swept: Values, origin: str, chosen: Values) -> Iterator[tuple[Values, Values]]:
    """(labels, values by key) of every run, in the order of the file."""
    variants = {kind: tables for kind, tables in swept.items() if _is_variants(kind, tables)}
    axes = _axes({key: value for key, value in swept.items() if key != "ranks" and key not in variants}, origin)
    named = [[_variant(kind, table, origin) for table in tables] for kind, tables in variants.items()]
    for together in product(*named):
        fixed: Values = {}
        crossed: dict[str, list[Any]] = {}
        label: Values = {}
        for variant in together:
            if twice := sorted(({**fixed, **crossed}).keys() & {**variant.fixed, **variant.crossed}.keys()):
                names = " and ".join(map(str, {**label, **variant.label}.values()))
                raise UserError(f"{origin}: {twice[0]} is set by each of {names}: let one of them set it")
            fixed, crossed, label = fixed | variant.fixed, crossed | variant.crossed, label | variant.label
        taken = _with_alternatives({**fixed, **crossed, **chosen})
        outer = {key: values for key, values in axes.items() if key not in taken}
        inner = {key: values for key, values in crossed.items() if key not in _with_alternatives(chosen)}
        lists = outer | inner
        for values in product(*lists.values()):
            own: Values = {}
            for key, value in zip(lists, values, strict=True):
                flat = dotted({key: value})
                if twice := sorted(own.keys() & flat.keys()):
                    raise UserError(f"{origin}: two lists in [sweep] set {twice[0]}: leave it out of one of them")
                own |= {name: inner for name, inner in flat.items() if name not in chosen}
            yield label | own, fixed | own


def _lists_of(table: Any, origin: str) -> Values:
    """Return a table [sweep]: lists by key, and lists of variants by the name of their tables."""
    swept = _table(table, f"{origin}: sweep")
    variants = {name: value for name, value in swept.items() if _is_variants(name, value)}
    return {**variants, **dotted({name: value for name, value in swept.items() if name not in variants})}


def _axes(table: Values, origin: str) -> dict[str, list[Any]]:
    """Lists of values by key."""
    axes = {}
    known = [*all_keys(), "ranks", "run"]
    for key, values in table.items():
        if not isinstance(values, list):
            if key not in known and not key.startswith(PREPARE) and get_close_matches(key, known, n=1, cutoff=0.5):
                raise UserError(unknown_key(key, f"[sweep] of {origin}", known))
            raise UserError(
                f"{origin}: {key} = {shown(values, repr)} in [sweep] is one value: write a list of values, or set it "
                "outside of [sweep] for all runs"
            )
        axes[key] = _several(key, values, origin)
    return axes


def _several(key: str, values: list[Any], origin: str) -> list[Any]:
    if not values:
        raise UserError(f"{origin}: {key} = [] in [sweep] leaves no run: write at least one value")
    written = [shown_value(value) for value in values]
    for value in written:
        if written.count(value) > 1:
            raise UserError(f"{origin}: {key} in [sweep] holds {value} twice")
    return values


def _is_variants(name: str, value: Any) -> bool:
    """Check whether a value in [sweep] is a list of variants; a list of components belongs to a key."""
    return not _chooses(name) and isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _chooses(name: str) -> bool:
    """Check whether a key can have a table as its value, such as a component with options."""
    field = Config.model_fields.get(name)
    tables = field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, Table)
    return "." in name or (field is not None and not tables)


def _variant(kind: str, table: Values, origin: str) -> Variant:
    """One of the [[sweep.KIND]] tables."""
    where = f"{origin}: [[sweep.{kind}]]"
    if kind in Config.model_fields or kind in ("ranks", "prepare"):
        raise UserError(f"{where}: {kind} is a table of keys; lists of variants have another name, as [[sweep.run]]")
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str) or not name.strip():
        raise UserError(f'{where} needs a name: name = "…"')
    flat = dotted(values)
    crossed = {key: _several(key, value, origin) for key, value in flat.items() if isinstance(value, list)}
    return Variant({kind: name}, {key: value for key, value in flat.items() if key not in crossed}, crossed)


def _with_alternatives(keys: Mapping[str, Any]) -> set[str]:
    """The keys, and those that give way to them."""
    return {*keys, *(other for pair in ALTERNATIVES for other in pair if any(key in keys for key in pair))}


def _configured(
    base: Values,
    values: Values,
    settings: Sequence[str],
    prepared: Mapping[str, Values],
    origin: str,
    name: str,
    out: Path,
    short: Mapping[str, str],
) -> tuple[Config, Preparation | None]:
    """The complete configuration of a run, and its shards where they are to be prepared."""
    own = {key: value for key, value in values.items() if not key.startswith(PREPARE)}
    changed = {key.removeprefix(PREPARE): value for key, value in values.items() if key.startswith(PREPARE)}
    shared = dict(base)
    drop_alternatives(shared, own)
    layers: list[Layer] = [(origin, shared), (f"{origin}, run {name}", own), *setting_layers(settings)]
    together = {key: value for _, layer in layers for key, value in layer.items()}
    shards = together.get(SHARDS)
    source = shards if isinstance(shards, str) and shards in prepared else "" if shards is None else None
    if source is None or source not in prepared:
        if changed:
            raise UserError(f"{origin}, run {name}: {PREPARE}{next(iter(changed))} has no effect: no [prepare] is used")
        return _built(layers, origin, name), None
    seed = together.get("seed", 0)
    data = _preparation(source, prepared[source], changed, seed, origin, out, short)
    return _built([*layers, (origin, {"data": {"source": str(data.folder)}})], origin, name), data


def _built(layers: Sequence[Layer], origin: str, name: str) -> Config:
    try:
        return build_config(layers)
    except UserError as error:
        whole = f"{origin}, run {name}"
        if whole in str(error):
            raise
        where = f"run {name}" if origin in str(error) else whole
        raise UserError(f"{where}: {error}") from error


def _refuse_models(runs: Sequence[PlannedRun], origin: str) -> None:
    """A model that there is not, or options that it does not take: what no configuration asks, as it imports torch."""
    from fedmpi.models import check_model_options

    different: dict[str, PlannedRun] = {}
    for run in runs:
        different.setdefault(repr((run.config.model.name, run.config.model.options)), run)
    for run in different.values():
        try:
            check_model_options(run.config.model.choice, run.config.model.options)
        except UserError as error:
            raise UserError(f"{origin}, run {run.name}: {error}") from error


def _refuse_objects(runs: Sequence[PlannedRun], origin: str) -> None:
    """Objects from Python that no file holds: every run is a separate process, started from one."""
    for run in runs:
        sentences = not_repeatable(run.config)
        if run.config.data.source.name.startswith(ARRAYS):
            sentences.append("data.source are arrays in memory: name a function that makes them, module:function")
        for sentence in sentences:
            raise UserError(f"{origin}, run {run.name}: runs of a sweep are started from files, and {sentence}")


def _preparations(table: Values, origin: str) -> dict[str, Values]:
    """Return the [prepare] tables by name, "" if there is just one. Keys of [prepare] itself apply to all."""
    named = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    common = {name: value for name, value in table.items() if name not in named}
    if DIGITS in named:
        raise UserError(f"{origin}: [prepare.{DIGITS}] has the name of the embedded data: choose another")
    if not named:
        return {"": common} if common else {}
    return {name: {**common, **own} for name, own in named.items()}


def _preparation(
    name: str, options: Values, changed: Values, seed: Any, origin: str, out: Path, short: Mapping[str, str]
) -> Preparation:
    where = f"{origin}: [prepare{f'.{name}' if name else ''}]"
    given = {**options, **changed}
    by_seed = any(
        SEED in one
        for value in given.values()
        for one in (value if isinstance(value, list) else [value])
        if isinstance(one, str)
    )
    filled = {key: _filled(value, seed) for key, value in given.items()}
    words = words_of(filled, where)
    labels: Values = {PREPARE + key: value for key, value in changed.items()} | ({"seed": seed} if by_seed else {})
    title = name or str(filled["dataset"])
    ends = {key: key.removeprefix(PREPARE) for key in labels}
    varied = run_name({"preset": title, **labels}, (), {**ends, **short})
    folder = filled.get("out", str(out / "shards" / varied))
    if not isinstance(folder, str) or not folder.strip():
        raise UserError(f"{where}: out = {shown(folder, repr)}: give the folder of the shards as a text")
    return Preparation(name, Path(os.path.abspath(folder)), words)  # found from whatever folder a run is started in


def _filled(value: Any, seed: Any) -> Any:
    if isinstance(value, list):
        return [_filled(one, seed) for one in value]
    return value.replace(SEED, str(seed)) if isinstance(value, str) else value


def _refuse_twins(runs: Sequence[PlannedRun], origin: str) -> None:
    names: dict[str, PlannedRun] = {}
    configs: dict[str, PlannedRun] = {}
    for run in runs:
        if run.name == "shards":
            raise UserError(f"{origin}: a run cannot have the name shards, which is that of the folder of the shards")
        if run.name in names:
            raise UserError(
                f"{origin}: two runs would have the same folder, {run.folder}: let their values differ more"
            )
        text = config_toml(run.config)
        if text in configs:
            raise UserError(f"{origin}: the runs {configs[text].name} and {run.name} are the same: leave out one")
        names[run.name] = configs[text] = run


def _refuse_shared_folders(runs: Sequence[PlannedRun], origin: str) -> None:
    there: dict[Path, Preparation] = {}
    for data in (run.data for run in runs if run.data is not None):
        if there.setdefault(data.folder, data).words != data.words:
            raise UserError(f"{origin}: different shards would share the folder {data.folder}. Give each its own out")


def _ranks(given: Any, origin: str) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_RANKS:
        raise UserError(f"{origin}: ranks = {shown(given, repr)}: give a number from 1 to {MOST_RANKS}")
    return given


def _table(value: Any, where: str) -> Values:
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is a table of keys: write [{where.rpartition(' ')[2]}] and its keys below it")
    return dict(value)


BASE = "base"
"""The key."""

DROP = "drop"
"""Key of a named table: with `drop = true`, the table of that name below is left out."""


def read_layers(given: Path | Mapping[str, Any]) -> list[Values]:
    """The tables of a file (or the same from Python) and of those below it, the lowest first."""
    path = Path("the sweep") if isinstance(given, Mapping) else given
    table = dict(given) if isinstance(given, Mapping) else read_toml(given)
    layers, met = [table], {path.resolve()}
    while BASE in table:
        below = table.pop(BASE)
        if not isinstance(below, str) or not below.strip():
            raise UserError(f"{path}: base = {shown(below, repr)}: give the name of a sweep's file as a text")
        above, path = path, path.parent / below
        if path.resolve() in met:
            raise UserError(f"{path} is its own base, through {len(met)} files: name another file, or leave out base")
        met.add(path.resolve())
        try:
            table = read_toml(path)
        except UserError as error:
            raise UserError(f"{above} has base = {shown(below, repr)}: {error}") from error
        layers.insert(0, table)
    return layers


def refuse_overruled_lists(layers: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Reject a layer's single value for a key with a list in [sweep] of a lower layer: the list would override it."""
    listed: set[str] = set()
    for layer in layers:
        swept = layer.get("sweep")
        own = set(dotted(dict(swept))) if isinstance(swept, Mapping) else set()
        for key, value in dotted({name: part for name, part in layer.items() if name != "sweep"}).items():
            if key in listed - own:
                raise UserError(
                    f"{origin}: {key} = {shown(value, repr)} would change no run, for [sweep] of the file below has a "
                    "list of it: set it in [sweep], as a list"
                )
        listed |= own


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """One table over another: inner tables key by key, lists of variants name by name, all else replaced."""
    found = dict(below)
    for key, value in above.items():
        under = found.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            found[key] = laid_over(under, value)
        elif not _chooses(key) and _all_named(value) and _all_named(under):
            found[key] = _by_name(key, under, value)
        else:
            found[key] = value
    return found


def _by_name(kind: str, below: list[Values], above: list[Values]) -> list[Values]:
    for names in ([table["name"] for table in tables] for tables in (below, above)):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(
                f"two [[sweep.{kind}]] have the name {shown(twice, repr)}. A file over another one finds "
                "its tables by name, so give each its own"
            )
    places = {table["name"]: table for table in below}
    for table in above:
        if DROP in table:
            _drop(kind, places, table)
        else:
            merged = dotted(places.get(table["name"], {}))
            put_over(merged, dotted(table))
            places[table["name"]] = merged
    if not places:
        raise UserError(f"[[sweep.{kind}]]: all of them are dropped, so that nothing is left to run: keep one")
    return list(places.values())


def _drop(kind: str, places: Values, table: Values) -> None:
    name = table["name"]
    if table[DROP] is not True or len(table) > 2:
        raise UserError(f"[[sweep.{kind}]] {shown(name, repr)}: drop = true allows no other key except name")
    if name not in places:
        raise UserError(
            f"[[sweep.{kind}]] {shown(name, repr)} cannot be dropped: the file below has {shown(list(places))}"
        )
    del places[name]


def _all_named(value: Any) -> TypeGuard[list[Values]]:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in value)


LONGEST = 150
"""Bytes of a name; file systems take 255."""
BY_THEMSELVES = ("preset", "data.source", "model")
"""Keys whose values say enough without the key."""


def run_name(labels: Mapping[str, Any], variants: Iterable[str], short: Mapping[str, str]) -> str:
    """The name of a run: variants' names first, then the preset, other keys, and the seed last."""
    named = set(variants)
    bare = {*named, *BY_THEMSELVES}
    order = sorted(labels, key=lambda key: (key == "seed", key not in named, key != "preset"))
    pieces = [("" if key in bare else f"{short.get(key, key)}=") + _slug(labels[key]) for key in order]
    name = ",".join(pieces) or "run"
    if len(name.encode()) > LONGEST:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name.encode()[:LONGEST].decode(errors='ignore')}~{digest}"
    return name


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Each key without its table, where no other key of them ends alike."""
    listed = list(dict.fromkeys(keys))
    ends = [key.rpartition(".")[2] for key in listed]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(listed, ends, strict=True)}


def labels_text(labels: Mapping[str, Any]) -> str:
    """Return a run's value of each thing that differs, in a line."""
    return ", ".join(f"{key} = {shown_value(value)}" for key, value in labels.items())


def shown_value(value: Any) -> str:
    """A value as a configuration file has it, without quotes; a component with its options in brackets."""
    value = written(value)
    if isinstance(value, Mapping):
        options = ", ".join(f"{key} = {shown_value(inner)}" for key, inner in value.items() if key != "name")
        return f"{value.get('name', '')}({options})" if options else str(value.get("name", "{}"))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(shown_value, value)) + "]"
    return str(value)


def _slug(value: Any) -> str:
    """A value as part of a name: letters, digits and some signs, others as -."""
    value = written(value)
    if isinstance(value, int | float):
        return shown_value(value)
    text = Path(value).as_posix() if isinstance(value, str) else shown_value(value)
    return re.sub(r"-{2,}", "-", re.sub(r"[^\w.+~-]", "-", text)).strip("-.") or "-"
