"""Parts that Python code gives as objects: what keys say of them, and of which of them no keys can say it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedmpi.common.data_choices import ARRAYS
from fedmpi.common.errors import UserError
from fedmpi.common.made_with import OBJECT, holds_values, made_with
from fedmpi.common.options import options_of
from fedmpi.common.own_code import object_name
from fedmpi.common.registry import KINDS, SOURCE, Kind, resolve
from fedmpi.config.base import Values, written
from fedmpi.config.choices import all_chosen, chosen_in, options_alone, own_options, storable
from fedmpi.config.own_options import parts_with

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables

CALLED_THEMSELVES = ("model", "local optimizer", SOURCE)
"""Kinds of which the object that was chosen is called, and not one that is made of its options."""


def taken_apart(given: Values, tables: Mapping[str, type[BaseModel]]) -> Values:
    """The values, with objects that are made anew for every run replaced by their class and its options.

    That are objects with methods, such as samplers and local algorithms, and classes whose options a partial binds.
    Options that are set by their keys stay as they are set.
    """
    found = dict(given)
    for kind in _kinds():
        choice = given.get(kind.key)
        if choice is None or isinstance(choice, str) or inspect.isclass(choice):
            continue
        of_class = isinstance(choice, partial) and inspect.isclass(choice.func)
        if kind.name in CALLED_THEMSELVES or not (of_class or _is_made(choice)):
            continue
        apart = _class_and_options(kind, choice, tables[kind.table])
        if apart is not None:
            found[kind.key] = apart[0]
            found |= {key: value for key, value in apart[1].items() if key not in given}
        elif of_class or not callable(choice):
            if of_class:
                resolve(kind.name, choice)  # which says what the class does not know
            raise UserError(
                f"{kind.key} = an object of {object_name(choice)}: what it was made with cannot be read back and set "
                f"as options: give the class, and its options as keys, {kind.table}.OPTION = VALUE"
            )
    return found


def _is_made(choice: Any) -> bool:
    """Whether it is an object of a class of the user's that cannot be called: what its methods do is wanted."""
    return not callable(choice) and type(choice).__module__ != "builtins"


def as_class_names(config: ConfigTables) -> Values:
    """{"table.key": value} that say the same as the objects in the configuration, where a class and options do.

    Options that are set by their keys stay as they are set.
    """
    found: Values = {}
    for kind, choices, several in _given(config):
        if kind.name in CALLED_THEMSELVES and not any(isinstance(choice, partial) for choice in choices):
            continue
        table = getattr(config, kind.table)
        by_key = {f"{kind.table}.{name}" for name in table.model_fields_set | own_options(table).keys()}
        named: list[Any] = []
        options: Values = {}
        for choice in choices:
            apart = _class_and_options(kind, choice, type(table)) if _is_object(choice) else None
            if apart is None or _option_of_another(config, kind, choice, apart[1]):
                named.append(choice)
            else:
                named.append(apart[0])
                options |= {key: value for key, value in apart[1].items() if key not in by_key}
        if any(new is not old for new, old in zip(named, choices, strict=True)):
            found |= {**options, kind.key: named if several else named[0]}
    return found


def not_repeatable(config: ConfigTables) -> list[str]:
    """A sentence for every object in the configuration of which config.toml says less than repeating the run takes."""
    class_names = as_class_names(config)
    sentences = []
    for kind, choices, _ in _given(config):
        rest = class_names.get(kind.key, choices)
        for choice in rest if isinstance(rest, list | tuple) else [rest]:
            if _is_object(choice) and not getattr(choice, "config_name", "").startswith(ARRAYS):
                sentences.append(
                    f"{kind.key} was given as an object with values of its own, which config.toml names as "
                    f"{written(choice)!r} and cannot hold: only Python code that gives it again can repeat this run; "
                    f"give a function or class instead, and its options as keys of [{kind.table}]"
                )
    for name, table in config:
        for key, value in options_alone(table).items():
            if value is None and not _is_none_by_default(config, name, key):
                sentences.append(
                    f"{name}.{key} is None, which config.toml cannot hold: only Python code that gives it again can "
                    "repeat this run; give what says the same in words or numbers"
                )
            if OBJECT in str(written(value)) and not isinstance(value, str):
                sentences.append(
                    f"{name}.{key} is {written(value)!r} in config.toml, which holds texts, numbers and lists of them: "
                    "only Python code that gives it again can repeat this run; give it in such a form"
                )
    return sentences


def _is_none_by_default(config: ConfigTables, table: str, key: str) -> bool:
    late = [kind.name for kind in _kinds() if kind.late and kind.table == table]
    selected = [*chosen_in(config, table), *(part for kind in late for part in all_chosen(config, kind))]
    return any(option.name == key and option.default is None for part in selected for option in part.options)


def _is_object(choice: Any) -> bool:
    return choice is not None and not isinstance(choice, str) and holds_values(choice)


def _kinds() -> Iterator[Kind]:
    return (kind for kind in KINDS.values() if kind.table)


def _given(config: ConfigTables) -> Iterator[tuple[Kind, list[Any], bool]]:
    """What was given as objects: kind, all its choices, whether its key lists several."""
    for kind in _kinds():
        value = getattr(getattr(config, kind.table), kind.key.partition(".")[2])
        several = isinstance(value, list | tuple)
        choices = list(value) if several else [value]
        if any(choice is not None and not isinstance(choice, str) for choice in choices):
            yield kind, choices, several


def _class_and_options(kind: Kind, choice: Any, table: type[BaseModel]) -> tuple[Any, Values] | None:
    """The class or function behind an object, and {"table.key": value} that make one like it; None where none do."""
    made = choice
    options: dict[str, Any] | None = {}
    if isinstance(choice, partial):
        made, options = choice.func, None if choice.args else dict(choice.keywords)
    else:
        if inspect.isroutine(choice) or options_of(choice)[0]:
            return None
        made = type(choice)
        options = made_with(choice, [option.name for option in options_of(made)[0]])
    names = {option.name for option in options_of(made, positional=kind.name == "model")[0]}
    if options is None or not options.keys() <= names:
        return None
    common = {name for name in options if name in table.model_fields and not parts_with(kind.table, name)}
    if common or not all(map(storable, options.values())):
        return None
    return made, {kind.option_key(name): value for name, value in options.items()}


def _option_of_another(config: ConfigTables, kind: Kind, choice: Any, options: Values) -> bool:
    """Whether another part, chosen in the same table, has one of the options too."""
    keys = {key.partition(".")[2] for key in options}
    for other in (part.object for part in chosen_in(config, kind.table) if part.object is not choice):
        made = type(other) if _is_object(other) and not isinstance(other, partial) else other
        if any(option.name in keys for option in options_of(made)[0]):
            return True
    return False
