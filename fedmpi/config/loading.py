"""Load and validate a configuration: preset, file and --set merged, the later ones before the earlier ones.

Values are kept flat: {"local.lr": 0.1, "clients.sampler": "weighted", "clients.sampler.replace": False}. The name of a
component is the value of the component's own key, whether it was written as a text or as `name` in its table.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from fedmpi.common.errors import UserError, shown, suggestion
from fedmpi.common.files import read_plain
from fedmpi.common.options import location, reason_of
from fedmpi.common.registry import Component, is_digits
from fedmpi.config.base import ALTERNATIVES, Table, Values
from fedmpi.config.checks import contradiction
from fedmpi.config.keys import all_keys, owners_of, unknown_key, without_effect
from fedmpi.config.tables import ConfigTables, ModelOptions

Layer = tuple[str, Mapping[str, Any]]
"""Origin of values, for messages, and the values, nested or flat."""
OF_A_SWEEP = ("sweep", "prepare", "base")
"""Keys of a file that describes many runs."""
OF_EVERY_MODEL = tuple(f"model.{option}" for option in ModelOptions.model_fields)


class Config(ConfigTables):
    """A complete run: `Config(preset="fedavg", rounds=20, local={"lr": 0.1})`; missing keys have their defaults.

    Raises
    ------
    UserError
        An unknown preset or key, one without effect beside the others, a value out of range, or choices that contradict
        each other.
    """

    _layers: list[Layer] = []
    """Layers of given values, to which overrides are added."""

    def __init__(self, **values: Any):
        self._fill([("Config", values)])

    def _fill(self, layers: list[Layer]) -> None:
        """Merge layers over their preset, later ones win; validate all values, and drop the preset's without effect."""
        flat, origins = merged(layers)
        self._validate(flat, origins)
        lacking = {key: reason for key, reason in without_effect(self).items() if key in flat}
        for key in origins.keys() & lacking.keys():
            raise UserError(
                f"{key} (from {origins[key]}) has no effect here: it needs {lacking[key]}. Remove it, or change that."
            )
        if lacking:
            self._validate({key: value for key, value in flat.items() if key not in lacking}, origins)
        self._layers = layers

    def _validate(self, flat: Values, origins: Mapping[str, str]) -> None:
        values = nested(flat)
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except ValidationError as error:
            raise UserError(sentence(error, values, origins)) from None

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        reason = contradiction(self)
        if reason is not None:
            raise ValueError(reason)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and dict(self) == dict(other)


def build_config(layers: Sequence[Layer]) -> Config:
    """Return the configuration of layers; later ones win."""
    config = Config.__new__(Config)
    config._fill(list(layers))
    return config


def load_config(path: Path | None, settings: Sequence[str] = ()) -> Config:
    """Return the configuration of a TOML file (or of the defaults) with `--set` assignments on top."""
    layers: list[Layer] = [(str(path), read_toml(path))] if path is not None else []
    return build_config([*layers, *setting_layers(settings)])


def given_config(given: str | Path | Mapping[str, Any] | Config, overrides: Mapping[str, Any]) -> Config:
    """Return the configuration that Python code describes."""
    if not isinstance(overrides, Mapping):
        raise UserError(f'overrides are a dict like {{"local.lr": 0.1}}, not {type(overrides).__name__}')
    if isinstance(given, Config):
        layers = given._layers
    elif isinstance(given, Mapping):
        layers = [("the configuration", given)]
    elif isinstance(given, Path) or (isinstance(given, str) and (given.endswith(".toml") or os.sep in given)):
        layers = [(str(given), read_toml(Path(given)))]
    elif isinstance(given, str):
        layers = [("the preset", {"preset": given})]
    else:
        raise UserError(
            f"a configuration is a preset's name, a TOML file, a dict or a fedmpi.Config, not {type(given).__name__}"
        )
    return build_config([*layers, ("the overrides", overrides)])


def sentence(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return the first error, with the key and its origin."""
    first, *others = error.errors(include_url=False)
    key, message = ".".join(location(first, values)), reason_of(first)
    if not key:
        message = str(first["msg"]).removeprefix("Value error, ")
        preset = values.get("preset")
        of_preset = [key for key in dotted(values) if preset and f"{key} = " in message and key not in origins]
        return f"{message} (preset {preset} sets {', '.join(of_preset)})" if of_preset else message
    where = f" (from {shown(origins[key])})" if key in origins else ""
    if first["type"] == "extra_forbidden":
        if needed := owners_of(key):
            return f"{key}{where} has no effect here: it needs {needed}. Remove it, or change that."
        return unknown_key(key, origins.get(key, "the configuration"), all_keys())
    if first["type"] == "missing":
        return f"{key} is missing: set it"
    words = [
        one["ctx"]["expected"]
        for one in others
        if one["type"] == "literal_error" and one["loc"][:2] == first["loc"][:2]
    ]
    also = "".join(f", or give {word}" for word in words)
    given = first["input"]
    if isinstance(given, Mapping) and set(given) == {"name"}:
        given = given["name"]
    return f"{key} = {shown(given, repr)}{where}: {message}{also}"


# --- layers ---


def read_toml(path: Path) -> Values:
    """A TOML file as a table; unreadable or malformed files raise UserError."""
    try:
        return tomllib.loads(read_plain(path).decode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {shown(path)} ({error.strerror}). Check the path") from error
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or numbers of thousands of digits
        twice = re.search("overwrite|mutate", str(error))
        advice = '. Write a component with options as { name = "power-of-choice", candidates = 20 }' if twice else ""
        raise UserError(f"{path} is not valid TOML: {error}{advice}") from error


def setting_layers(settings: Sequence[str]) -> list[Layer]:
    """Return a layer for each `--set` argument; options come after the components that they belong to."""
    layers = [(f"--set {setting}", assignment(setting)) for setting in settings]
    return sorted(layers, key=lambda layer: next(iter(layer[1])).count("."))


def assignments(settings: Sequence[str]) -> Values:
    """Return the values of `--set` arguments, flat."""
    layers = setting_layers(settings)
    return {key: value for origin, table in layers for key, value in flatten(table, origin).items()}


def assignment(setting: str) -> Values:
    """Return key and value of one `--set` argument."""
    key, separator, text = setting.partition("=")
    if not separator or not key.strip():
        raise UserError(
            f"--set {shown(setting)} is not key=value. Write table.key=value, for example --set local.lr=0.01"
        )
    try:
        return {key.strip(): tomllib.loads(f"value = {text}")["value"]}
    except (ValueError, RecursionError):
        return {key.strip(): text.strip()}


def merged(layers: Sequence[Layer]) -> tuple[Values, dict[str, str]]:
    """Return all values, flat, and the origin of those that layers set."""
    user: Values = {}
    origins: dict[str, str] = {}
    for origin, table in layers:
        flat = flatten(table, origin)
        put_over(user, flat)
        origins |= dict.fromkeys(flat, origin)
    values = {} if user.get("preset") is None else preset_values(str(user["preset"]), user)
    _drop_repeated(user, values, origins)
    drop_alternatives(values, user)
    put_over(values, user)
    return values, {key: origin for key, origin in origins.items() if key in user}


def _drop_repeated(user: Values, preset: Values, origins: Mapping[str, str]) -> None:
    """Drop a preset's value that a complete configuration repeats, such as a run's, if a later layer sets its
    alternative.

    Two alternatives that a user chose are both kept: their table rejects them.
    """
    for pair in ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            repeats = key in preset and user.get(key) == preset[key] and origins[key] == origins["preset"]
            if repeats and other in user and origins[other] != origins[key]:
                del user[key]


def drop_alternatives(older: Values, newer: Mapping[str, Any]) -> None:
    """Remove from `older` the alternatives of keys in `newer`: number or share of the clients, epochs or steps."""
    for pair in ALTERNATIVES:
        if any(key in newer for key in pair):
            for key in pair:
                older.pop(key, None)


def put_over(older: Values, newer: Mapping[str, Any]) -> None:
    """Put newer values over older ones; another component drops the options of the one that it replaces."""
    for key, value in newer.items():
        if value != older.get(key, _default_name(key)):
            for option in [
                name for name in older if name.startswith(f"{key}.") and not name.startswith(OF_EVERY_MODEL)
            ]:
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


# --- flat and nested values ---


def flatten(table: Mapping[str, Any], origin: str) -> Values:
    """Return the tables of a configuration as flat values; reject unknown tables."""
    flat: Values = {}
    for key, value in _pairs(table):
        first = key.partition(".")[0]
        if first in OF_A_SWEEP and origin.endswith(".toml"):
            raise UserError(
                f"{shown(origin)} describes a sweep of many runs. Start it with fedmpi sweep {shown(origin)}, or on "
                "SLURM with fedmpi submit"
            )
        if key in flat:
            raise UserError(f"{origin}: {shown(key)} is given twice. Leave one out")
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
        key = f"{prefix}{name}".removesuffix(".name")
        if isinstance(value, BaseModel):
            value = {inner: getattr(value, inner) for inner in value.model_fields_set}
        if isinstance(value, Component):
            value = {"name": value.choice, **value.given}
        found += _pairs(value, f"{key}.") if isinstance(value, Mapping) and value else [(key, value)]
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


# --- presets ---


@dataclass(frozen=True)
class Preset:
    """A published method."""

    name: str
    title: str  # One-line description
    paper: str  # Publication
    example: str  # A command that runs it
    table: dict[str, Any]  # Its components and their values
    digits: dict[str, Any]  # Changed values for the embedded digits, whose 20 clients have 72 samples each


def presets() -> list[Preset]:
    """Return every published method, in order of name."""
    return [preset_named(name) for name in sorted(_preset_files())]


def preset_named(name: str) -> Preset:
    """Return the preset of a name; an unknown one raises UserError with the nearest."""
    known = _preset_files()
    if name not in known:
        listed = f"there are {', '.join(sorted(known))}"
        raise UserError(f"unknown preset {name!r}; {suggestion(name, known, listed)}")
    table = tomllib.loads(known[name].read_text(encoding="utf-8"))
    about, digits = table.pop("about"), table.pop("digits", {})
    return Preset(name, about["title"], about["paper"], about["example"], table, digits)


@cache
def _preset_files() -> dict[str, Traversable]:
    """Return the files in fedmpi/presets, each of which describes one published method, by name."""
    entries = (files("fedmpi") / "presets").iterdir()
    return {entry.name.removesuffix(".toml"): entry for entry in entries if entry.name.endswith(".toml")}


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
    return is_digits(user.get("data.source", "digits"))


def remarks(table: Mapping[str, Any]) -> list[str]:
    """Return in words which values a configuration's preset has for the embedded digits only, if these are the data."""
    name = table.get("preset")
    digits = dotted(preset_named(name).digits) if name is not None and on_digits(table) else {}
    values = ", ".join(f"{key} = {value}" for key, value in digits.items())
    return [f"preset {name} on the embedded digits, unless set otherwise: {values}"] if digits else []
