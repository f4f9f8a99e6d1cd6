"""All keys of a configuration, the error about an unknown key, and the keys that have no effect."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedmpi.common.errors import shown
from fedmpi.common.options import conditions_of, names_of, names_with, one_line, tables_in
from fedmpi.common.registry import KINDS, Chosen, components
from fedmpi.config.tables import ConfigTables


def key_descriptions() -> list[tuple[str, str, str]]:
    """Return (key, default, description) of every key of the configuration, in order; a table has no default.

    The description ends with the allowed values and the conditions without which the key has no effect.
    """
    fields = ConfigTables.model_fields
    single = [row for name, field in fields.items() if not _tables(field) for row in _of_field("", name, field)]
    return [*single, *(row for name, field in fields.items() if _tables(field) for row in _of_table(name, field))]


def _of_table(name: str, field: FieldInfo) -> Iterator[tuple[str, str, str]]:
    tables = list(dict.fromkeys(_tables(field)))
    yield f"[{name}]", "", one_line(field.description) or one_line(tables[0].__doc__)
    for table in tables:
        names = [inner for inner in table.model_fields if inner != "name"]
        if "name" in table.model_fields and names:
            yield f"{name} = {' | '.join(names_of(table))}", "", one_line(table.__doc__)
        for inner in names:
            yield from _of_field(f"{name}.", inner, table.model_fields[inner])


def _of_field(prefix: str, name: str, field: FieldInfo) -> Iterator[tuple[str, str, str]]:
    key = f"{prefix}{name}"
    yield key, "required" if field.is_required() else _default(field.default), _description(field, prefix)
    variants = dict.fromkeys(_tables(field))
    for below in dict.fromkeys(below for inner in variants for below in inner.model_fields if below != "name"):
        having = [inner for inner in variants if below in inner.model_fields]
        owners = [name for inner in having for name in names_of(inner)]
        yield from _owned(_of_field(f"{key}.", below, having[0].model_fields[below]), owners)
    for kind in (kind for kind in KINDS.values() if kind.key == key and not kind.late):
        yield from _of_components(kind.name, key)


def _of_components(kind: str, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield the options of the built-in components of a kind."""
    owners: dict[str, list[str]] = {}
    fields: dict[str, FieldInfo] = {}
    for part in components(kind):
        for name, field in part.options.items():
            fields.setdefault(name, field)
            owners.setdefault(name, []).append(part.name)
    for name, field in fields.items():
        yield from _owned(_of_field(f"{key}.", name, field), owners[name])


def _owned(rows: Iterable[tuple[str, str, str]], owners: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Add the components or variants that have an option to its description, the first of the rows."""
    for number, (key, default, text) in enumerate(rows):
        of = f"Option of {', '.join(owners)}." if owners and number == 0 else ""
        yield key, default, f"{text} {of}".strip()


def _description(field: FieldInfo, prefix: str) -> str:
    sentences = [one_line(field.description)]
    if typing.get_origin(field.annotation) is typing.Literal:
        sentences.append(f"One of {', '.join(map(str, typing.get_args(field.annotation)))}.")
    elif names := [name for inner in dict.fromkeys(_tables(field)) for name in names_of(inner)]:
        sentences.append(f"One of {', '.join(names)}.")
    conditions = [
        str(item if "." in item.key or item.key in ConfigTables.model_fields else item.within(prefix[:-1], [item.key]))
        for item in conditions_of(field)
    ]
    if conditions:
        sentences.append(f"Needs {' and '.join(conditions)}.")
    return " ".join(sentences)


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    value = getattr(value, "name", value)
    if isinstance(value, BaseModel):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tables(field: FieldInfo) -> list[type[BaseModel]]:
    return list(tables_in(field.annotation))


@cache
def all_keys() -> tuple[str, ...]:
    """Return every table and every key, as users write them."""
    return tuple(dict.fromkeys(row[0].partition(" = ")[0].strip("[]") for row in key_descriptions()))


def unknown_key(key: str, origin: str, known: Iterable[str]) -> str:
    """Return the error text about an unknown key, with the nearest of the known ones."""
    candidates = list(known)
    near = get_close_matches(key, candidates, n=1, cutoff=0.5)
    if not near:
        last = key.rsplit(".", 1)[-1]
        by_name = {k.rsplit(".", 1)[-1]: k for k in reversed(candidates)}  # the first of several: local.lr
        near = [by_name[m] for m in get_close_matches(last, by_name, n=1, cutoff=0.5)]
    hint = f"; did you mean {near[0]}?" if near else "; `fedmpi config --help-keys` lists all keys"
    return f"unknown key {shown(key)} in {shown(origin)}{hint}"


def variants_with(key: str) -> str:
    """Return the values of a table's name with which a key exists, as a condition; "" if there is no such key."""
    *way, name = key.split(".")
    annotation: Any = ConfigTables
    for step in way:
        fields = [table.model_fields[step] for table in tables_in(annotation) if step in table.model_fields]
        annotation = fields[0].annotation if fields else None
    names = names_with(annotation, name)
    return f"{'.'.join(way)} = {names}" if names else ""


def why_without_effect(config: ConfigTables, key: str) -> str | None:
    """Return the condition without which a key has no effect, in words; None if it has one."""
    value: Any = config
    missing: list[str] = []
    place = ""
    for name in key.split("."):
        if isinstance(value, Chosen):
            if not value.is_component or value.late or name == "name":
                break
            if (reason := value.without_effect(name)) is not None:
                missing.append(reason)
            value = value.values.get(name)
        elif isinstance(value, BaseModel):
            field = type(value).model_fields.get(name)
            for item in conditions_of(field):
                full = item.within(place, type(value).model_fields) if place else item
                if not full.holds(value_of(config, full.key)):
                    missing.append(str(full))
            value = getattr(value, name, None)
        else:
            break
        place = f"{place}.{name}" if place else name
    return " and ".join(missing) or None


def value_of(config: ConfigTables, key: str) -> Any:
    """Return the value of a key: of a table's field, or of a component's option."""
    value: Any = config
    for name in key.split("."):
        value = value.values.get(name) if isinstance(value, Chosen) else getattr(value, name, None)
    return value


def components_of(config: ConfigTables) -> Iterator[tuple[str, Chosen]]:
    """Yield (key, component) of everything that a configuration chooses; folders of data and arrays among them."""
    yield from _components("", config)


def _components(prefix: str, table: BaseModel) -> Iterator[tuple[str, Chosen]]:
    for name, value in table:
        if isinstance(value, Chosen):
            yield f"{prefix}{name}", value
        elif isinstance(value, BaseModel):
            yield from _components(f"{prefix}{name}.", value)
        elif isinstance(value, tuple):
            yield from ((f"{prefix}{name}", one) for one in value if isinstance(one, Chosen))
