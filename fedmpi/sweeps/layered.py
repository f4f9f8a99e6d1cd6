"""A sweep's file that is another one with changes: `base = "other.toml"`, laid below what the file says itself.

So a small variant of an experiment says what is smaller and nothing else, and stays the same experiment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from fedmpi.common.errors import UserError, shown
from fedmpi.config.base import Values
from fedmpi.config.layers import dotted, read_toml

BASE = "base"
"""The key."""

DROP = "drop"
"""In a named table, `drop = true`: the table of that name below is left out."""


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
    """Refuse a layer's single value for a key of which [sweep] of a lower one has a list, which would win unheard."""
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
    """One table over another: inner tables key by key, lists of named tables name by name, all else replaced."""
    found = dict(below)
    for key, value in above.items():
        under = found.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            found[key] = laid_over(under, value)
        elif _all_named(value) and _all_named(under):
            found[key] = _by_name(key, under, value)
        else:
            found[key] = value
    return found


def _by_name(kind: str, below: list[Values], above: list[Values]) -> list[Values]:
    for names in ([table["name"] for table in tables] for tables in (below, above)):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(
                f"two [[sweep.{kind}]] have the name {shown(twice, repr)}: where one file lies over another names "
                "tell them apart, so give each its own"
            )
    places = {table["name"]: table for table in below}
    for table in above:
        if DROP in table:
            _drop(kind, places, table)
        else:
            places[table["name"]] = laid_over(places.get(table["name"], {}), table)
    if not places:
        raise UserError(f"[[sweep.{kind}]]: all of them are dropped, so that nothing is left to run: keep one")
    return list(places.values())


def _drop(kind: str, places: Values, table: Values) -> None:
    name = table["name"]
    if table[DROP] is not True or len(table) > 2:
        raise UserError(f"[[sweep.{kind}]] {shown(name, repr)}: drop = true stands alone beside the name")
    if name not in places:
        raise UserError(
            f"[[sweep.{kind}]] {shown(name, repr)} cannot be dropped: the file below has {shown(list(places))}"
        )
    del places[name]


def _all_named(value: Any) -> TypeGuard[list[Values]]:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in value)
