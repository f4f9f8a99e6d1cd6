"""Preset, file and --set merged: texts read, keys with their tables, the later ones before the earlier ones.

Values are kept flat: {"local.lr": 0.1, "clients.sampler": "oort", "clients.sampler.explore": 0.5}. The name of a
component is the value of the component's own key, whether it was written as a text or as `name` in its table.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedmpi.common.errors import UserError, shown
from fedmpi.common.files import read_plain
from fedmpi.common.registry import Chosen, is_digits
from fedmpi.config.base import ALTERNATIVES, Table, Values
from fedmpi.config.keys import all_keys, unknown_key
from fedmpi.config.presets import preset_named
from fedmpi.config.tables import ConfigTables

LARGEST_FILE = 1 << 24
"""Largest size of a configuration in bytes."""
DEEPEST = 16
"""Largest number of names in a key: options of a model may be tables of tables."""
OF_A_SWEEP = ("sweep", "prepare", "base")
"""Keys of a file that describes many runs."""
DATA = "data.source"


def read_toml(path: Path) -> Values:
    """A TOML file as a table; unreadable or malformed files raise UserError."""
    try:
        return tomllib.loads(read_plain(path, LARGEST_FILE).decode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {shown(path)} ({error.strerror}). Check the path") from error
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or numbers of thousands of digits
        twice = re.search("overwrite|mutate", str(error))
        advice = '. Write a component with options as { name = "oort", explore = 0.5 }' if twice else ""
        raise UserError(f"{path} is not valid TOML: {error}{advice}") from error


def flatten(table: Mapping[str, Any], origin: str) -> Values:
    """Return the tables of a configuration as flat values; reject unknown tables."""
    for name in table:
        if not isinstance(name, str):
            raise UserError(f"{origin}: keys are texts like local.lr, not {name!r}")
        if name in OF_A_SWEEP and origin.endswith(".toml"):
            raise UserError(
                f"{shown(origin)} describes a sweep of many runs. Start it with fedmpi sweep {shown(origin)}"
            )
    flat: Values = {}
    for key, value in _pairs(table):
        if key in flat:
            raise UserError(f"{origin}: {shown(key)} is given twice. Leave one out")
        first = key.partition(".")[0]
        field = ConfigTables.model_fields.get(first)
        if field is None:
            raise UserError(unknown_key(key, origin, all_keys()))
        if key == first and isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            if value == {}:
                continue
            raise UserError(f"{origin}: {key} is a table of keys, not a single value. Write [{key}] or {key}.key")
        flat[key] = value
    return flat


def dotted(table: Mapping[str, Any]) -> Values:
    """Return nested tables as flat values; the name of a component has the component's own key."""
    return dict(_pairs(table))


def _pairs(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        key = prefix.removesuffix(".") if name == "name" and prefix else f"{prefix}{name}"
        key = key.removesuffix(".name") if isinstance(name, str) else key
        if isinstance(value, BaseModel):
            value = {inner: getattr(value, inner) for inner in value.model_fields_set}
        if isinstance(value, Chosen):
            value = {"name": value.choice, **value.given}
        deeper = isinstance(value, Mapping) and value and key.count(".") < DEEPEST
        found += _pairs(value, f"{key}.") if deeper else [(key, value)]
    return found


def nested(flat: Mapping[str, Any]) -> Values:
    """Return flat values as nested tables."""
    tables: Values = {}
    for key in sorted(flat, key=lambda key: key.count(".")):
        *way, name = key.split(".")
        table = tables
        for step in way:
            inner = table.get(step)
            if not isinstance(inner, dict):
                inner = table[step] = {} if inner is None or isinstance(inner, bool) else {"name": inner}
            table = inner
        table[name] = dict(flat[key]) if isinstance(flat[key], Mapping) else flat[key]
    return tables


def put_over(older: Values, newer: Mapping[str, Any]) -> None:
    """Put newer values over older ones; another component drops the options of the one that it replaces."""
    for key, value in newer.items():
        if value != older.get(key, _default_name(key)) or isinstance(value, bool):
            for option in [name for name in older if name.startswith(f"{key}.")]:
                del older[option]
    older.update(newer)


def _default_name(key: str) -> Any:
    """Return the name of the component that a key chooses by default; None for other keys."""
    value: Any = _defaults()
    for name in key.split("."):
        value = getattr(value, name, None)
    return getattr(value, "name", None)


@cache
def _defaults() -> ConfigTables:
    return ConfigTables()


def assignments(settings: Sequence[str]) -> Values:
    """Return the values of `--set` arguments, flat; a component and its options may be set by several."""
    found: Values = {}
    for setting in settings:
        found.update(flatten(assignment(setting), f"--set {setting}"))
    return found


def assignment(setting: str) -> Values:
    """Return the value of one `--set` argument as nested tables; UserError if it is no assignment."""
    key, separator, text = setting.partition("=")
    names = key.strip().split(".")
    if not separator or not key.strip() or len(names) > DEEPEST:
        raise UserError(
            f"--set {shown(setting)} is not key=value. Write table.key=value, for example --set local.lr=0.01"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    table: Any = value
    for name in reversed(names):
        table = {name: table}
    return dict(table)


def preset_values(name: str, user: Mapping[str, Any]) -> Values:
    """Return the values of a preset, flat, with those for the embedded digits if these are the data."""
    preset = preset_named(name)
    values = flatten(preset.table, f"preset {name}")
    if on_digits(user):
        own = flatten(preset.digits, f"preset {name}")
        drop_alternatives(values, own)
        put_over(values, own)
    return values


def on_digits(user: Mapping[str, Any]) -> bool:
    """Check whether a configuration trains on the embedded digits."""
    return is_digits(user.get(DATA, "digits"))


def drop_alternatives(older: Values, newer: Mapping[str, Any]) -> None:
    """Remove from `older` the alternatives of keys in `newer`: number or share of the clients, epochs or steps."""
    for pair in ALTERNATIVES:
        if any(key in newer for key in pair):
            for key in pair:
                older.pop(key, None)


def remarks(table: Mapping[str, Any]) -> list[str]:
    """Return in words where a complete configuration has its preset's values for the embedded digits."""
    if table.get("preset") is None or not on_digits(table):
        return []
    preset = preset_named(table["preset"])
    general, found = flatten(preset.table, "preset"), []
    for key, value in flatten(preset.digits, "preset").items():
        if table.get(key) == value:
            pair = next((pair for pair in ALTERNATIVES if key in pair), (key,))
            before = [str(general[k]) if k == key else f"{k} = {general[k]}" for k in pair if k in general]
            found.append(f"{key} = {value} (else {before[0] if before else 'unset'})")
    return [f"preset {table['preset']} on the embedded digits: {', '.join(found)}"] if found else []
