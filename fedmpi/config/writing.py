"""A configuration as TOML and as keys with values; differences between two of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel

from fedmpi.common.imports import OBJECT, holds_values
from fedmpi.common.registry import Component
from fedmpi.config.base import Values, written
from fedmpi.config.keys import components_of, entries, without_effect
from fedmpi.config.loading import dotted, nested
from fedmpi.config.tables import ConfigTables


def config_table(config: ConfigTables) -> Values:
    """Return the complete configuration as a file holds it: every key that has an effect."""
    lacking, flat = without_effect(config), {}
    for key, (value, _) in entries(config).items():
        if isinstance(value, Component | BaseModel):
            value = getattr(value, "name", None)
        if value is not None and key not in lacking:
            flat[key] = written(value)
    return nested(flat)


def flat_table(config: ConfigTables) -> Values:
    """Return `config_table` as flat values."""
    return dotted(config_table(config))


def config_toml(config: ConfigTables) -> str:
    """Return the complete configuration as TOML text; loading it again gives the same configuration."""
    return tomli_w.dumps(config_table(config))


def not_repeatable(config: ConfigTables) -> list[str]:
    """Return a sentence for every object from Python whose values config.toml cannot hold."""
    given: Values = {}
    for key, chosen in components_of(config):
        if holds_values(chosen.choice) and not isinstance(chosen.choice, str) and chosen.is_component:
            given[key] = chosen.choice
        given |= {
            f"{key}.{name}": value
            for name, value in chosen.given.items()
            if value is None or (OBJECT in str(written(value)) and not isinstance(value, str))
        }
    return [
        f"{key} is {written(value)!r} in config.toml, which holds names, numbers and lists of them. Only Python code "
        "that gives it again can repeat this run. Give a function or class of a file, and its options in a table"
        for key, value in given.items()
    ]


def differences(table: Values, config: ConfigTables) -> list[tuple[str, str, str]]:
    """Return (key, value in `table`, value in `config`) where a table read from TOML and a configuration differ."""
    there, here = dotted(table), dotted(tomllib.loads(config_toml(config)))
    shown = [(key, *(repr(flat[key]) if key in flat else "unset" for flat in (there, here))) for key in here | there]
    return [(key, old, new) for key, old, new in shown if old != new]


def shown_value(value: Any) -> str:
    """Return a value of a file without quotes; a component with its options in brackets."""
    if isinstance(value, Mapping):
        options = ", ".join(f"{key} = {shown_value(inner)}" for key, inner in value.items() if key != "name")
        return f"{value.get('name', '')}({options})" if options else str(value.get("name", "{}"))
    if isinstance(value, list):
        return "[" + ", ".join(map(shown_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
