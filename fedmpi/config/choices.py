"""The parts that a configuration chooses, and the options that stand beside them in the same table."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedmpi.common.data_choices import makes_data
from fedmpi.common.errors import UserError, shown
from fedmpi.common.options import REQUIRED, positional
from fedmpi.common.registry import KINDS, SOURCE, Part, resolve
from fedmpi.config.base import ALTERNATIVES, Values, written
from fedmpi.config.open_table import OpenTable
from fedmpi.config.own_options import (
    chosen_by,
    condition,
    goes_to_any,
    is_common,
    is_fedmpis,
    is_own,
    listed_choices,
    of_this_name,
    open_kinds,
    parts_with,
)

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables


def chosen(config: ConfigTables, kind: str) -> Part:
    """The part of a kind that the configuration chooses."""
    table, _, key = KINDS[kind].key.partition(".")
    return resolve(kind, getattr(getattr(config, table), key))


def all_chosen(config: ConfigTables, kind: str) -> list[Part]:
    """The parts of a kind that the configuration chooses: one, or as many as its key lists."""
    table, _, key = KINDS[kind].key.partition(".")
    value = getattr(getattr(config, table), key)
    return [resolve(kind, choice) for choice in listed_choices(KINDS[kind], value)]


def data_options(config: ConfigTables) -> dict[str, Any]:
    """The options of what makes the data; {} of a folder and of arrays."""
    return options(config, SOURCE) if makes_data(config.data.shards) else {}


def options(config: ConfigTables, kind: str) -> dict[str, Any]:
    """The values that the configuration gives to the options of the chosen part; those unset are left out.

    A part of one's own keeps its own defaults, whatever those of the table's keys are.
    """
    return options_of_part(config, chosen(config, kind))


def options_of_part(config: ConfigTables, part: Part) -> dict[str, Any]:
    """The same of one of several chosen parts."""
    name = KINDS[part.kind].table
    table: BaseModel = getattr(config, name)
    fields = type(table).model_fields.keys()
    keys = fields & table.model_fields_set if part.foreign else fields
    declared = {o.name: getattr(table, o.name) for o in part.options if o.name in keys}
    given = {key: value for key, value in declared.items() if value is not None}
    alone = options_alone(table)
    given |= {key: value for key, value in alone.items() if part.option(key) is not None}
    if part.takes_any:
        selected = chosen_in(config, name)
        given |= {key: alone[key] for key in alone if goes_to_any(name, key, type(table), part, selected)}
    return given


def made(config: ConfigTables, kind: str) -> Any:
    """The chosen part, ready for use: a function with its options bound, or an instance."""
    return chosen(config, kind).make(options(config, kind))


def check_options(config: ConfigTables) -> None:
    """Refuse names that no part has, and options that the chosen parts do not know, lack, or cannot take."""
    for name, table in config:
        if not isinstance(table, BaseModel) or not open_kinds(name):
            continue
        selected = chosen_in(config, name)
        for key in table.model_extra or {}:
            if not _known(key, selected):
                raise UserError(_refusal(name, key, "the configuration", selected, type(table)))
        for part in selected:
            given = options_of_part(config, part)
            if part.foreign:
                _refuse_unsuited_keys(part, given, type(table), own_options(table))
            part.checked(given)


def _refuse_unsuited_keys(part: Part, given: Values, table: type[BaseModel], own: Values) -> None:
    """Refuse options of the user's own part that cannot take what is given to the key of fedmpi's of that name."""
    for key in (key for key in given if key in table.model_fields and key not in own):
        dotted, option = KINDS[part.kind].option_key(key), part.option(key)
        try:
            if option is not None and dotted != part.key:
                option.converted(given[key])
        except ValueError as error:
            reason = f"{str(error)[:1].lower()}{str(error)[1:]}"
            value = shown(given[key], repr)
            raise UserError(
                f"{dotted} = {value} does not suit {part.name}: {reason}; {of_this_name(part, key, table)}"
            ) from None


def option_values(config: ConfigTables) -> Values:
    """{"table.key": value} of every option without a declared field, converted; defaults where the user set none.

    Of a part of one's own also those that have one, where the user did not set it, nor what says the same otherwise. Of
    the embedded digits only those that are set: their name may hold the others. No default where parts have several.
    """
    values: Values = {}
    for name, table in config:
        selected = chosen_in(config, name) if isinstance(table, BaseModel) else []
        several = {key for key in _with_several_defaults(selected) if not _is_read(config, name, key)}
        for part in selected:
            given = part.checked(options_of_part(config, part))
            unset = {} if part.kind == SOURCE and not part.foreign else {o.name: o.default for o in part.options}
            stated = [key for key in unset if key not in several and not _said_otherwise(table, f"{name}.{key}")]
            found = {key: unset[key] for key in stated} | given
            for key, value in found.items():
                if (part.foreign or key not in type(table).model_fields) and storable(value):
                    values[f"{name}.{key}"] = value
    return values


def defaults_of_shared_keys(config: ConfigTables) -> Values:
    """{"table.key": default} of the user's own parts, where fedmpi reads the key too and nobody has set it."""
    values: Values = {}
    for dotted, value in option_values(config).items():
        name, _, key = dotted.partition(".")
        table: BaseModel = getattr(config, name)
        if key not in table.model_fields_set and _is_read(config, name, key):
            values[dotted] = value
    return values


def _with_several_defaults(selected: list[Part]) -> set[str]:
    """Options that several parts have, each with a default of its own."""
    defaults: dict[str, set[str]] = {}
    for option in (option for part in selected for option in part.options):
        defaults.setdefault(option.name, set()).add(repr(option.default))
    return {name for name, found in defaults.items() if len(found) > 1}


def _is_read(config: ConfigTables, name: str, key: str) -> bool:
    """Whether a key of a table is declared, and read by fedmpi with the parts chosen."""
    return key in type(getattr(config, name)).model_fields and means_something(config, name, key)


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
    """Keys that the preset alone sets, for a part in whose place the user has put one that would take them for its own.

    An option that the preset's part does not have was meant for another built-in part, and stays for that.
    """
    found: set[str] = set()
    for name in {dotted.partition(".")[0] for dotted in older if "." in dotted}:
        before, now = (list(chosen_by(given, name, tables[name])) for given in (older, values))
        for key in (dotted.partition(".")[2] for dotted in older if dotted.startswith(f"{name}.")):
            if not is_common(name, key, tables[name], now) and _is_for_another(name, key, tables[name], before, now):
                found.add(f"{name}.{key}")
    return found - origins.keys()


def _is_for_another(name: str, key: str, table: type[BaseModel], before: list[Part], now: list[Part]) -> bool:
    """Whether a key that was set with some parts chosen would, with those chosen now, reach one that it was not for."""
    kept = [part for part in now if _among(before, part)]
    new = [part for part in now if not _among(before, part)]
    if any(part.option(key) is not None for part in kept):
        return False
    then_any, now_any = ([p for p in parts if goes_to_any(name, key, table, p, parts)] for parts in (before, now))
    if any(_among(then_any, part) for part in now_any):
        return False
    if is_own(name, key, table, before):
        return True
    if named := [part for part in new if part.option(key) is not None]:
        replaced = {part.kind for part in before if part.option(key) is not None}
        return all(part.foreign or part.kind in replaced for part in named)
    return bool(now_any)


def _among(parts: list[Part], part: Part) -> bool:
    return any((one.kind, one.name) == (part.kind, part.name) for one in parts)


def means_something(config: ConfigTables, table: str, key: str) -> bool:
    """Whether a declared key means something to fedmpi: it is common to all choices, or goes with those made."""
    fields = type(getattr(config, table))
    return not parts_with(table, key) or is_fedmpis(table, key, fields, chosen_in(config, table))


def own_options(table: Any) -> Values:
    """What a table holds for options of the user's own parts that bear the name of a declared key."""
    return table.own_options if isinstance(table, OpenTable) else {}


def options_alone(table: Any) -> Values:
    """What a table holds for options of parts alone: its undeclared keys, and `own_options`; {} of a single value."""
    return dict(table.model_extra or {}) | own_options(table) if isinstance(table, BaseModel) else {}


def _known(key: str, selected: list[Part]) -> bool:
    return any(part.takes_any or part.option(key) is not None for part in selected)


def chosen_in(config: ConfigTables, table: str) -> list[Part]:
    """The parts that the keys of a table choose, those left out whose options are checked later."""
    return [part for kind in open_kinds(table) for part in all_chosen(config, kind.name)]


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
