"""Every key that a configuration can have, and the sentence about one that it cannot."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import BaseModel

from fedmpi.common.errors import shown
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
