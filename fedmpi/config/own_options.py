"""Whose a key of a table is: fedmpi's, or an option of the user's own part alone that bears the name of one.

A key that only goes with built-in parts is the own part's where none of these is chosen; a key that all choices of
the table have in common is fedmpi's whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from fedmpi.common.data_choices import makes_data
from fedmpi.common.options import first_sentence
from fedmpi.common.registry import KINDS, SOURCE, Kind, Part, components, resolve
from fedmpi.config.base import Condition, Values

NORM_KEYS = ("features", "levels", "restore", "probe", "refresh", "refresh_who", "projection_above")
STRATA_KEYS = (*NORM_KEYS, "opening", "clustering", "strata", "min_samples", "xi", "noise", "spread")
SERVICES: dict[str, dict[str, tuple[str, ...]]] = {"participation": {"norms": NORM_KEYS, "strata": STRATA_KEYS}}
"""Table → what its parts can need → the keys that say how it is to be made."""


@cache
def open_kinds(table: str) -> list[Kind]:
    """What the keys of a table choose, as far as options are checked with the configuration."""
    return [kind for kind in KINDS.values() if kind.modules and not kind.late and kind.table == table]


def listed_choices(kind: Kind, value: Any) -> list[Any]:
    """The choices that a key's value stands for: each of a list; none where data are a folder or arrays."""
    if kind.several and isinstance(value, list | tuple):
        return list(value)
    return [] if kind.name == SOURCE and not makes_data(value) else [value]


def chosen_by(values: Values, name: str, table: type[BaseModel]) -> Iterator[Part]:
    """The parts that {"table.key": value} choose in a table, which need not be valid otherwise."""
    for kind in open_kinds(name):
        value = values.get(kind.key, table.model_fields[kind.key.partition(".")[2]].default)
        yield from (resolve(kind.name, choice) for choice in listed_choices(kind, value))


@cache
def parts_with(table: str, key: str) -> list[Part]:
    """The built-in parts among whose options (or those of what they need) a key of a table is; [] of common keys."""
    return [part for kind in open_kinds(table) for part in parts(kind.name) if has(part, key)]


def condition(table: str, key: str) -> str:
    """Which choices give an option its meaning, in words: 'participation.clients = "weighted"'."""
    by_key: dict[str, list[str]] = {}
    for part in parts_with(table, key):
        by_key.setdefault(part.key, []).append(f'"{part.name}"')
    return " or ".join(f"{chooser} = {' or '.join(names)}" for chooser, names in by_key.items())


def has(part: Part, key: str) -> bool:
    """Whether a key is among a part's options by name, or those of what it needs."""
    return _is_for_what_it_needs(part, key) or part.option(key) is not None


def _is_for_what_it_needs(part: Part, key: str) -> bool:
    services = SERVICES.get(KINDS[part.kind].table, {})
    return any(key in services.get(need, ()) for need in part.marks.get("needs", ()))


@cache
def _conditions_on_choices(name: str, key: str, table: type[BaseModel]) -> tuple[Condition, ...]:
    """Those of a key's conditions that are about what the same table chooses."""
    choosers = [kind.key for kind in open_kinds(name)]
    conditions = [item.within(name) for item in table.model_fields[key].metadata if isinstance(item, Condition)]
    return tuple(condition for condition in conditions if condition.key in choosers)


def may_be_own(name: str, key: str, table: type[BaseModel]) -> bool:
    """Whether there are choices with which a key that a table declares is not fedmpi's."""
    return key in table.model_fields and bool(parts_with(name, key) or _conditions_on_choices(name, key, table))


def is_common(name: str, key: str, table: type[BaseModel], selected: Sequence[Part]) -> bool:
    """Whether a declared key is fedmpi's with these parts chosen, whether or not one of them names it."""
    if key not in table.model_fields or parts_with(name, key):
        return False
    conditions = _conditions_on_choices(name, key, table)
    return all(c.holds(part.name) for c in conditions for part in selected if part.key == c.key)


def is_fedmpis(name: str, key: str, table: type[BaseModel], selected: Sequence[Part]) -> bool:
    """Whether a declared key of a table is read by fedmpi itself, or by a built-in part, with these parts chosen."""
    return is_common(name, key, table, selected) or any(
        _is_for_what_it_needs(part, key) or (not part.foreign and part.option(key) is not None) for part in selected
    )


def is_own(name: str, key: str, table: type[BaseModel], selected: Sequence[Part]) -> bool:
    """Whether a declared key of a table is an option of the user's own part, and not fedmpi's, with these parts
    chosen.
    """
    if key not in table.model_fields or is_fedmpis(name, key, table, selected):
        return False
    return any(part.foreign and (part.takes_any or part.option(key) is not None) for part in selected)


def goes_to_any(name: str, key: str, table: type[BaseModel], part: Part, selected: Sequence[Part]) -> bool:
    """Whether a key is handed to a part of the user's own that names no such option but takes any (**options)."""
    if not part.takes_any or part.option(key) is not None:
        return False
    if key in table.model_fields and not is_own(name, key, table, selected):
        return False
    return not any(other.option(key) for other in selected if (other.kind, other.name) != (part.kind, part.name))


def of_this_name(part: Part, key: str, table: type[BaseModel]) -> str:
    """What to do about an option that cannot take what a key of its name may be, as half a sentence."""
    meaning = first_sentence(" ".join((table.model_fields[key].description or "").split())).rstrip(".")
    return f"{part.name} has an option of this name, which is a key of fedmpi's ({meaning}): give it another one"
