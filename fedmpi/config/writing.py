"""A configuration as TOML and as keys with values; what differs between two of them."""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w
from pydantic import BaseModel

from fedmpi.config.base import Values, written
from fedmpi.config.choices import defaults_of_parts, option_values, options_alone, own_options
from fedmpi.config.keys import why_meaningless
from fedmpi.config.layers import dotted
from fedmpi.config.objects import as_class_names
from fedmpi.config.tables import ConfigTables


def config_table(config: ConfigTables) -> Values:
    """The complete configuration as a file holds it: every key that means something under the chosen values."""
    table = chosen_table(config)
    for key, value in as_class_names(config).items():
        name, _, inner = key.partition(".")
        table[name][inner] = value
    return {
        name: {key: written(inner) for key, inner in value.items() if inner is not None}
        if isinstance(value, dict)
        else written(value)
        for name, value in table.items()
    }


def chosen_table(config: ConfigTables) -> Values:
    """As `config_table`, with objects as they were given, and None where it was given for an option of a part."""
    table: Values = {}
    used = option_values(config)
    for name, value in config:
        if isinstance(value, BaseModel):
            given = options_alone(value)
            kept = {k: v for k, v in value.model_dump().items() if v is not None or k in given}
            meant = {k: v for k, v in kept.items() if why_meaningless(config, f"{name}.{k}") is None}
            table[name] = meant | {k.partition(".")[2]: v for k, v in used.items() if k.partition(".")[0] == name}
        elif value is not None:
            table[name] = value
    return table


def config_toml(config: ConfigTables) -> str:
    """The complete configuration as TOML text; loading it again gives the same configuration."""
    return tomli_w.dumps(config_table(config))


def flat_table(config: ConfigTables) -> Values:
    """`config_table` as {"part.key": value}."""
    return dotted(config_table(config))


def differences(table: Values, config: ConfigTables) -> list[tuple[str, str, str]]:
    """(key, its value in `table`, its value in `config`) wherever a table read from TOML and a configuration differ.

    A key that the table lacks counts as its default: an earlier version wrote it, which did not know the key.
    """
    there, here = dotted(table), dotted(tomllib.loads(config_toml(config)))
    parts = defaults_of_parts(config)
    here = {
        k: v for k, v in here.items() if k in there or not (is_default(config, k) or (k in parts and parts[k] == v))
    }
    keys = [*here, *(key for key in there if key not in here)]
    shown = [(key, _value(there, key), _value(here, key)) for key in keys]
    return [(key, old, new) for key, old, new in shown if old != new]


def is_default(config: ConfigTables, key: str) -> bool:
    """Whether a key of the configuration itself, not an option of a part, has the value that it has unless set."""
    *tables, name = key.split(".")
    model: Any = config
    for table in tables:
        model = getattr(model, table, None)
    field = type(model).model_fields.get(name) if isinstance(model, BaseModel) else None
    if name in own_options(model):
        return False
    return field is not None and getattr(model, name) == field.get_default(call_default_factory=True)


def _value(flat: Values, key: str) -> str:
    return repr(flat[key]) if key in flat else "unset"
