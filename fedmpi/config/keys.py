"""Every key that a configuration can have, the sentence about one that it cannot, and which keys mean something.

An option means something with the parts that have it; any other key with the conditions in its annotation.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache

from pydantic import BaseModel

from fedmpi.common.errors import shown
from fedmpi.config.base import Condition
from fedmpi.config.choices import means_something, options_alone
from fedmpi.config.own_options import condition
from fedmpi.config.tables import ConfigTables


def key_descriptions() -> list[tuple[str, str, str]]:
    """(key, default, description) of every key of the configuration, in order."""
    rows: list[tuple[str, str, str]] = []
    for name, field in ConfigTables.model_fields.items():
        part = field.annotation
        if isinstance(part, type) and issubclass(part, BaseModel):
            rows.append((f"[{name}]", "", (part.__doc__ or "").strip()))
            for key, inner in part.model_fields.items():
                rows.append((f"{name}.{key}", _shown(inner.default), " ".join((inner.description or "").split())))
        else:
            rows.append((name, _shown(field.default), " ".join((field.description or "").split())))
    return rows


def _shown(default: object) -> str:
    if default is None:
        return "unset"
    return str(default).lower() if isinstance(default, bool) else str(default)


def all_keys() -> list[str]:
    """Every table and every key, as users write them."""
    return [row[0].strip("[]") for row in key_descriptions()]


def unknown_key(key: str, origin: str, known: Iterable[str]) -> str:
    """The sentence about a key that there is not, with the nearest of those that are known."""
    candidates = list(known)
    near = get_close_matches(key, candidates, n=1, cutoff=0.5)
    if not near:
        last = key.rsplit(".", 1)[-1]
        by_name = {k.rsplit(".", 1)[-1]: k for k in candidates}
        near = [by_name[m] for m in get_close_matches(last, by_name, n=1, cutoff=0.5)]
    hint = f"; did you mean {near[0]}?" if near else "; `fedmpi show --help-fields` lists all keys"
    return f"unknown key {shown(key)} in {shown(origin)}{hint}"


def tables_by_name() -> dict[str, type[BaseModel]]:
    """The tables of the configuration by name."""
    annotated = {name: field.annotation for name, field in ConfigTables.model_fields.items()}
    return {name: part for name, part in annotated.items() if isinstance(part, type) and issubclass(part, BaseModel)}


@cache
def conditions() -> dict[str, tuple[Condition, ...]]:
    """The conditions of every key that has some, the keys in them with their tables."""
    found: dict[str, tuple[Condition, ...]] = {}
    for name, table in tables_by_name().items():
        for key, field in table.model_fields.items():
            own = [item for item in field.metadata if isinstance(item, Condition)]
            if own:
                found[f"{name}.{key}"] = tuple(item.within(name) for item in own)
    return found


def why_meaningless(config: ConfigTables, key: str) -> str | None:
    """What would have to be chosen for a key to mean something, in words; None where it does already."""
    table, _, name = key.partition(".")
    if name and name in options_alone(getattr(config, table)):
        return None
    if name and not means_something(config, table, name):
        return condition(table, name)
    missing = [str(wanted) for wanted in conditions().get(key, ()) if not _holds(config, wanted)]
    return " and ".join(missing) or None


def _holds(config: ConfigTables, wanted: Condition) -> bool:
    """Whether a condition holds, or is about an option that the chosen parts do not have."""
    table, _, name = wanted.key.partition(".")
    return wanted.holds(getattr(getattr(config, table), name)) or not means_something(config, table, name)
