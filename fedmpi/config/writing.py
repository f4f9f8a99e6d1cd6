"""A configuration as TOML and as keys with values; differences between two of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel

from fedmpi.common.imports import OBJECT, holds_values
from fedmpi.common.registry import Chosen
from fedmpi.config.base import Values, storable, written
from fedmpi.config.keys import components_of, value_of, why_without_effect
from fedmpi.config.loading import dotted
from fedmpi.config.tables import ConfigTables


def config_table(config: ConfigTables) -> Values:
    """Return the complete configuration as a file holds it: every key that has an effect."""
    table: Values = written(_table(config, config, ""))
    return table


def flat_table(config: ConfigTables) -> Values:
    """Return `config_table` as flat values."""
    return dotted(config_table(config))


def _table(config: ConfigTables, table: BaseModel, prefix: str) -> Values:
    """Return a table's keys that have an effect; a component as a table of its name and options."""
    found: Values = {}
    for name, value in table:
        key = f"{prefix}{name}"
        if value is None or why_without_effect(config, key) is not None:
            continue
        if isinstance(value, Chosen):
            options = {
                option: inner
                for option, inner in _options(value).items()
                if option in value.given or (storable(inner) and value.without_effect(option) is None)
            }
            found[name] = {"name": value.choice, **_unpacked(config, options, f"{key}.")} if options else value.choice
        elif isinstance(value, BaseModel):
            if inner := _table(config, value, f"{key}."):
                found[name] = _short(inner)
        elif isinstance(value, tuple) and any(isinstance(one, Chosen) for one in value):
            found[name] = [one.choice if not one.given else {"name": one.choice, **one.given} for one in value]
        else:
            found[name] = value
    return found


def _options(chosen: Chosen) -> Values:
    if not chosen.is_component:
        return {}
    return dict(chosen.given) if chosen.late else chosen.values


def _unpacked(config: ConfigTables, options: Values, prefix: str) -> Values:
    return {
        name: _short(_table(config, value, f"{prefix}{name}.")) if isinstance(value, BaseModel) else value
        for name, value in options.items()
    }


def _short(table: Values) -> Any:
    return table["name"] if list(table) == ["name"] else table


def config_toml(config: ConfigTables) -> str:
    """Return the complete configuration as TOML text; loading it again gives the same configuration."""
    return tomli_w.dumps(config_table(config))


def not_repeatable(config: ConfigTables) -> list[str]:
    """Return a sentence for every object from Python whose values config.toml cannot hold."""
    sentences = []
    for key, chosen in components_of(config):
        if holds_values(chosen.choice) and not isinstance(chosen.choice, str) and chosen.is_component:
            sentences.append(
                f"{key} was given as an object that config.toml names as {chosen.name!r} and cannot hold: only Python "
                "code that gives it again can repeat this run; give a function or class of a file, and its options in "
                "a table"
            )
        for name, value in chosen.given.items():
            if value is None or (OBJECT in str(written(value)) and not isinstance(value, str)):
                sentences.append(
                    f"{key}.{name} is {written(value)!r} in config.toml, which holds texts, numbers and lists of them: "
                    "only Python code that gives it again can repeat this run; give it in such a form"
                )
    return sentences


def differences(table: Values, config: ConfigTables) -> list[tuple[str, str, str]]:
    """Return (key, value in `table`, value in `config`) where a table read from TOML and a configuration differ.

    A key that the table lacks has its default: an earlier version without the key wrote it.
    """
    there, here = dotted(table), dotted(tomllib.loads(config_toml(config)))
    here = {key: value for key, value in here.items() if key in there or not is_default(config, key)}
    keys = [*here, *(key for key in there if key not in here)]
    shown = [(key, _value(there, key), _value(here, key)) for key in keys]
    return [(key, old, new) for key, old, new in shown if old != new]


def is_default(config: ConfigTables, key: str) -> bool:
    """Check whether a key has its default value."""
    above, _, name = key.rpartition(".")
    table: Any = value_of(config, above) if above else config
    if isinstance(table, Chosen):
        option = table.component.options.get(name) if table.is_component else None
        return option is not None and written(option.default) == written(table.values.get(name))
    field = type(table).model_fields.get(name) if isinstance(table, BaseModel) else None
    return field is not None and getattr(table, name) == field.get_default(call_default_factory=True)


def _value(flat: Values, key: str) -> str:
    return repr(flat[key]) if key in flat else "unset"


def shown_value(value: Any) -> str:
    """Return a value of a file without quotes; a component with its options in brackets."""
    if isinstance(value, Mapping):
        options = ", ".join(f"{key} = {shown_value(inner)}" for key, inner in value.items() if key != "name")
        return f"{value.get('name', '')}({options})" if options else str(value.get("name", "{}"))
    if isinstance(value, list):
        return "[" + ", ".join(map(shown_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
