"""The keys of a configuration: descriptions, values, and the conditions without which they have no effect."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedmpi.common.errors import shown
from fedmpi.common.options import conditions_of, in_toml, names_of, one_line, tables_in
from fedmpi.common.registry import KINDS, Component, components
from fedmpi.config.base import storable
from fedmpi.config.tables import ConfigTables


class Key(NamedTuple):
    """A key, as users read about it."""

    key: str
    default: str
    description: str  # with the allowed values and the conditions without which the key has no effect
    owners: tuple[str, ...]  # variants or built-in components that have it; () if it always exists


class Entry(NamedTuple):
    """A key of one configuration."""

    value: Any
    field: FieldInfo | None  # None for an option of a component that takes any


def key_descriptions() -> list[tuple[str, str, str]]:
    """Return (key, default, description) of every key of the configuration, in order; a [table] has no default."""
    tables = {name for name, field in ConfigTables.model_fields.items() if _tables(field)}
    rows = sorted(all_keys().values(), key=lambda row: row.key.partition(".")[0] in tables)
    return [(f"[{key}]", "", text) if key in tables else (key, default, text) for key, default, text, _ in rows]


@cache
def all_keys() -> Mapping[str, Key]:
    """Return every table and every key, as users write them."""
    rows = (row for name, field in ConfigTables.model_fields.items() for row in _rows(name, field, ()))
    return {row.key: row for row in rows}


def _rows(key: str, field: FieldInfo, owners: tuple[str, ...]) -> Iterator[Key]:
    """Yield a key, then the options of its variants or components."""
    tables = _tables(field)
    text = [one_line(field.description or (tables[0].__doc__ if tables else ""))]
    variants = [name for table in tables for name in names_of(table)]
    literals = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else variants
    text += [f"One of {', '.join(map(str, literals))}."] if literals else []
    conditions = conditions_of(field)
    text += [f"Needs {' and '.join(map(str, conditions))}."] if conditions else []
    text += [f"Option of {', '.join(owners)}."] if owners else []
    yield Key(key, "required" if field.is_required() else _default(field.default), " ".join(text), owners)
    having: list[tuple[tuple[str, ...], Mapping[str, FieldInfo]]] = [(names_of(t), t.model_fields) for t in tables]
    for kind in KINDS.values():
        if key in (kind.key, *kind.further) and not kind.late:
            having += [((part.name,), part.fields) for part in components(kind.name)]
    options: dict[str, tuple[FieldInfo, list[str]]] = {}
    for names, fields in having:
        for name, option in fields.items():
            options.setdefault(name, (option, []))[1].extend(names)
    options.pop("name", None)
    for name, (option, having_it) in options.items():
        yield from _rows(f"{key}.{name}", option, tuple(having_it))


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    value = getattr(value, "name", value)
    if isinstance(value, BaseModel):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tables(field: FieldInfo) -> list[type[BaseModel]]:
    return list(dict.fromkeys(tables_in(field.annotation)))


def owners_of(key: str) -> str:
    """Return the variants with which a key exists, as a condition on their table; "" if there is no such key."""
    found = all_keys().get(key)
    names = " or ".join(map(in_toml, found.owners)) if found else ""
    return f"{key.rpartition('.')[0]} = {names}" if names else ""


def unknown_key(key: str, origin: str, known: Iterable[str]) -> str:
    """Return the error text about an unknown key, with the nearest of the known ones."""
    candidates = list(known)
    near = get_close_matches(key, candidates, n=1, cutoff=0.6)
    if not near:
        last = key.rsplit(".", 1)[-1]
        by_name = {k.rsplit(".", 1)[-1]: k for k in reversed(candidates)}  # the first of several: local.lr
        near = [by_name[m] for m in get_close_matches(last, by_name, n=1, cutoff=0.7)]
    hint = f"; did you mean {near[0]}?" if near else "; `fedmpi config --help-keys` lists all keys"
    return f"unknown key {shown(key)} in {shown(origin)}{hint}"


def entries(config: ConfigTables) -> dict[str, Entry]:
    """Return every key of a configuration with its value: the keys of tables, and the options of components.

    A table or component comes before its keys. Options that no file can store are left out,
    unless the user gave them.
    """
    return dict(_entries("", type(config).model_fields, dict(config)))


def _entries(prefix: str, fields: Mapping[str, FieldInfo], values: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name == "name":  # of a variant, whose table is the value of the key above
            continue
        yield key, Entry(value, fields.get(name))
        if isinstance(value, Component):
            known = value.fields if not value.late else {}
            stored = {name: one for name, one in value.values.items() if name in value.given or storable(one)}
            yield from _entries(f"{key}.", known, stored)
        elif isinstance(value, BaseModel):
            yield from _entries(f"{key}.", type(value).model_fields, dict(value))


def without_effect(config: ConfigTables) -> dict[str, str]:
    """Return the keys that have no effect in a configuration, each with the condition that it lacks, in words."""
    found, lacking = entries(config), dict[str, str]()
    for key, (_, field) in found.items():
        needed = [one for one in conditions_of(field) if one.key in found and not one.holds(found[one.key].value)]
        above = lacking.get(key.rpartition(".")[0])
        if needed or above:
            lacking[key] = " and ".join([*([above] if above else []), *map(str, needed)])
    return lacking


def components_of(config: ConfigTables) -> Iterator[tuple[str, Component]]:
    """Yield (key, component) of everything that a configuration chooses; folders of data and arrays among them."""
    for key, (value, _) in entries(config).items():
        several = value if isinstance(value, tuple) else (value,)
        yield from ((key, one) for one in several if isinstance(one, Component))
