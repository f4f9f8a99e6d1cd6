"""The parts that a configuration chooses, and the options that stand beside them in the same table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedmpi.common.data_choices import makes_data
from fedmpi.common.errors import UserError
from fedmpi.common.options import REQUIRED, positional
from fedmpi.common.registry import KINDS, SOURCE, Kind, Part, parts, resolve
from fedmpi.config.base import ALTERNATIVES, Values, written

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables


NORM_KEYS = ("features", "levels", "restore", "probe", "refresh", "refresh_who", "projection_above")
STRATA_KEYS = (*NORM_KEYS, "opening", "clustering", "strata", "min_samples", "xi", "noise", "spread")
SERVICES: dict[str, dict[str, tuple[str, ...]]] = {"participation": {"norms": NORM_KEYS, "strata": STRATA_KEYS}}
"""Table → what its parts can need → the keys that say how it is to be made."""


@cache
def open_kinds(table: str) -> list[Kind]:
    """What the keys of a table choose, as far as options are checked with the configuration."""
    return [kind for kind in KINDS.values() if kind.modules and not kind.late and kind.table == table]


def chosen(config: ConfigTables, kind: str) -> Part:
    """The part of a kind that the configuration chooses."""
    table, _, key = KINDS[kind].key.partition(".")
    return resolve(kind, getattr(getattr(config, table), key))


def all_chosen(config: ConfigTables, kind: str) -> list[Part]:
    """The parts of a kind that the configuration chooses: one, or as many as its key lists."""
    table, _, key = KINDS[kind].key.partition(".")
    value = getattr(getattr(config, table), key)
    return [resolve(kind, choice) for choice in _listed_choices(KINDS[kind], value)]


def data_options(config: ConfigTables) -> dict[str, Any]:
    """The options of what makes the data; {} of a folder and of arrays."""
    return options(config, SOURCE) if makes_data(config.data.shards) else {}


def _listed_choices(kind: Kind, value: Any) -> list[Any]:
    """The choices that a key's value stands for: each of a list; none where data are a folder or arrays."""
    if kind.several and isinstance(value, list | tuple):
        return list(value)
    return [] if kind.name == SOURCE and not makes_data(value) else [value]


def options(config: ConfigTables, kind: str) -> dict[str, Any]:
    """The values that the configuration gives to the options of the chosen part; those unset are left out.

    A part of one's own keeps its own defaults, whatever those of the table's keys are.
    """
    return options_of_part(config, chosen(config, kind))


def options_of_part(config: ConfigTables, part: Part) -> dict[str, Any]:
    """The same of one of several chosen parts."""
    table: BaseModel = getattr(config, KINDS[part.kind].table)
    extra = table.model_extra or {}
    keys = table.model_fields_set if part.foreign else set(type(table).model_fields)
    declared = {o.name: getattr(table, o.name) for o in part.options if o.name in keys}
    given = {name: value for name, value in declared.items() if value is not None}
    given |= {name: extra[name] for name in extra if part.option(name) is not None}
    if part.takes_any:
        others = [p for p in chosen_in(config, KINDS[part.kind].table) if (p.kind, p.name) != (part.kind, part.name)]
        given |= {name: value for name, value in extra.items() if not any(p.option(name) for p in others)}
    return given


def made(config: ConfigTables, kind: str) -> Any:
    """The chosen part, ready for use: a function with its options bound, or an instance."""
    return chosen(config, kind).make(options(config, kind))


def check_options(config: ConfigTables) -> None:
    """Refuse names that no part has, and options that the chosen parts do not know, lack, or cannot take.

    Raises
    ------
    UserError
    """
    for name, table in config:
        if not isinstance(table, BaseModel) or not open_kinds(name):
            continue
        selected = chosen_in(config, name)
        for key in table.model_extra or {}:
            if not _known(key, selected):
                raise UserError(_refusal(name, key, "the configuration", selected, type(table)))
        for part in selected:
            part.checked(options_of_part(config, part))


def option_values(config: ConfigTables) -> Values:
    """{"table.key": value} of every option without a declared field, converted; defaults where the user set none.

    Of a part of one's own also those that have one, where the user did not set it, nor what says the same otherwise. Of
    the embedded digits only those that are set: their name may hold the others.
    """
    values: Values = {}
    for name, table in config:
        for part in chosen_in(config, name) if isinstance(table, BaseModel) else []:
            given = part.checked(options_of_part(config, part))
            unset = {} if part.kind == SOURCE and not part.foreign else {o.name: o.default for o in part.options}
            unset = {key: value for key, value in unset.items() if not _said_otherwise(table, f"{name}.{key}")}
            found = unset | given
            for key, value in found.items():
                if (part.foreign or key not in type(table).model_fields) and storable(value):
                    values[f"{name}.{key}"] = value
    return values


def _said_otherwise(table: BaseModel, key: str) -> bool:
    """Whether the alternative of a key is set: their number where a share of the clients is, epochs where steps are."""
    others = [other for pair in ALTERNATIVES if key in pair for other in pair if other != key]
    return any(getattr(table, other.partition(".")[2]) is not None for other in others)


def defaults_of_parts(config: ConfigTables) -> Values:
    """{"table.key": default} of the chosen parts' options, as a file holds them."""
    tables = [(name, table) for name, table in config if isinstance(table, BaseModel)]
    options = [(name, option) for name, _ in tables for part in chosen_in(config, name) for option in part.options]
    return {
        f"{name}.{option.name}": written(option.default) for name, option in options if option.default is not REQUIRED
    }


def without_foreign_options(
    values: Values, older: Values, origins: Mapping[str, str], tables: Mapping[str, type[BaseModel]]
) -> Values:
    """The values without options of a preset's part that another choice has replaced.

    A part that was chosen in the place of the preset's has its own defaults, also of options of the same name.

    Parameters
    ----------
    values : dict
        {"table.key": value} of preset, file and settings together.
    older : dict
        Those of the preset alone.
    origins : mapping
        Where the user set a key.
    tables : mapping
        The type of each table.

    Raises
    ------
    UserError
        When the user set a key that neither the table nor the chosen part knows.
    """
    meant_for_another = _options_of_the_replaced(values, older, origins, tables)
    kept = {}
    for dotted, value in values.items():
        if dotted in meant_for_another:
            continue
        name, _, key = dotted.partition(".")
        if key and open_kinds(name) and key not in tables[name].model_fields:
            selected = list(chosen_by(values, name, tables[name]))
            if not _known(key, selected):
                if dotted in origins:
                    raise UserError(_refusal(name, key, origins[dotted], selected, tables[name]))
                continue
        kept[dotted] = value
    return kept


def _options_of_the_replaced(
    values: Values, older: Values, origins: Mapping[str, str], tables: Mapping[str, type[BaseModel]]
) -> set[str]:
    """Keys that the preset alone sets, for a part in whose place the user has put one with an option of that name.

    An option that the preset's part does not have was meant for another built-in part, and stays for that.
    """
    found: set[str] = set()
    for name in {dotted.partition(".")[0] for dotted in older if "." in dotted}:
        before, now = (list(chosen_by(given, name, tables[name])) for given in (older, values))
        replaced = {(part.kind, part.name) for part in before}
        for part in (part for part in now if (part.kind, part.name) not in replaced):
            others = [other for other in now if other is not part]
            found |= {
                f"{name}.{option.name}"
                for option in part.options
                if (_of_another(before, part.kind, option.name) or (part.foreign and parts_with(name, option.name)))
                and not any(other.option(option.name) for other in others)
            }
    return found - origins.keys()


def _of_another(before: list[Part], kind: str, option: str) -> bool:
    return any(part.kind == kind and part.option(option) is not None for part in before)


@cache
def parts_with(table: str, key: str) -> list[Part]:
    """The built-in parts among whose options (or those of what they need) a key of a table is; [] of common keys."""
    return [part for kind in open_kinds(table) for part in parts(kind.name) if _has(part, key)]


def means_something(config: ConfigTables, table: str, key: str) -> bool:
    """Whether a declared key is common to all choices of its table, or an option of one of the chosen parts."""
    if not parts_with(table, key):
        return True
    return any(part.takes_any or _has(part, key) for part in chosen_in(config, table))


def condition(table: str, key: str) -> str:
    """Which choices give an option its meaning, in words: 'participation.clients = "weighted"'."""
    by_key: dict[str, list[str]] = {}
    for part in parts_with(table, key):
        by_key.setdefault(part.key, []).append(f'"{part.name}"')
    return " or ".join(f"{chooser} = {' or '.join(names)}" for chooser, names in by_key.items())


def _has(part: Part, key: str) -> bool:
    services = SERVICES.get(KINDS[part.kind].table, {})
    served = any(key in services.get(need, ()) for need in part.marks.get("needs", ()))
    return served or part.option(key) is not None


def _known(key: str, selected: list[Part]) -> bool:
    return any(part.takes_any or part.option(key) is not None for part in selected)


def chosen_in(config: ConfigTables, table: str) -> list[Part]:
    """The parts that the keys of a table choose, those left out whose options are checked later."""
    return [part for kind in open_kinds(table) for part in all_chosen(config, kind.name)]


def chosen_by(values: Values, name: str, table: type[BaseModel]) -> Iterator[Part]:
    """The parts that {"table.key": value} choose in a table, which need not be valid otherwise."""
    for kind in open_kinds(name):
        value = values.get(kind.key, table.model_fields[kind.key.partition(".")[2]].default)
        yield from (resolve(kind.name, choice) for choice in _listed_choices(kind, value))


def _refusal(table: str, key: str, origin: str, selected: list[Part], fields: type[BaseModel]) -> str:
    """The sentence about a key that neither its table nor the chosen parts know."""
    others = condition(table, key)
    if others:
        return f"{table}.{key} (from {origin}) means nothing here: it needs {others}: remove it or change that"
    own = {option.name: part for part in selected for option in part.options}
    near = get_close_matches(key, [*own, *fields.model_fields], n=1, cutoff=0.5)
    foreign = [part for part in selected if part.foreign]
    for part in foreign:
        if key in positional(part.object):
            return part.unknown(key)
    if near and near[0] in own and own[near[0]].foreign:
        return f"{table}.{key} (from {origin}) is unknown to {own[near[0]].name}: did you mean {table}.{near[0]}?"
    hint = f"; did you mean {table}.{near[0]}?" if near else "; `fedmpi show --help-fields` lists all keys"
    if foreign and not near:
        hint = "".join(f"; {part.name} has {_listed(part)}" for part in foreign)
    return f"unknown key {table}.{key} in {origin}{hint}"


def _listed(part: Part) -> str:
    names = [option.name for option in part.options]
    return f"the options {', '.join(names)}" if names else "no options"


def storable(value: Any) -> bool:
    """Whether a file can hold an option's value as it is."""
    if isinstance(value, tuple | list):
        return all(map(storable, value))
    return isinstance(value, str | int | float | bool)
