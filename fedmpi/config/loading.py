"""Load and validate a configuration from preset, file and --set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from fedmpi.common.errors import UserError, shown
from fedmpi.common.options import location, reason_of
from fedmpi.config.base import ALTERNATIVES, Values
from fedmpi.config.checks import contradiction
from fedmpi.config.keys import all_keys, unknown_key, variants_with, why_without_effect
from fedmpi.config.layers import (
    assignments,
    dotted,
    drop_alternatives,
    flatten,
    nested,
    preset_values,
    put_over,
    read_toml,
)
from fedmpi.config.tables import ConfigTables

Layer = tuple[str, Mapping[str, Any]]
"""Origin of values, for messages, and the values, nested or flat."""


class Config(ConfigTables):
    """A complete run: `Config(preset="fedavg", rounds=20, local={"lr": 0.1})`; missing keys have their defaults.

    Raises
    ------
    UserError
        An unknown preset or key, one without effect beside the others, a value out of range, or choices that contradict
        each other.
    """

    _layers: list[Layer] = []
    """What the user gave, to which overrides are added."""

    def __init__(self, **values: Any):
        self._fill([("Config", values)])

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
        """Return the configuration of a TOML file, with some of its keys overridden.

        Parameters
        ----------
        path : str or Path
        overrides : mapping, optional
            Values by key, as {"local.lr": 0.1} or {"local": {"lr": 0.1}}.

        Raises
        ------
        UserError
            As the constructor; or the file cannot be read.
        """
        return given_config(Path(path), overrides or {})

    def _fill(self, layers: list[Layer]) -> None:
        """Merge layers over their preset, later ones win; validate all values, and drop the preset's without effect."""
        flat, origins = merged(layers)
        self._validate(flat, origins)
        without = {key: reason for key in flat if (reason := why_without_effect(self, key)) is not None}
        for key in origins.keys() & without.keys():
            raise UserError(
                f"{key} (from {_setting(origins[key], key)}) has no effect here: it needs {without[key]}. "
                "Remove it, or change that."
            )
        if without:
            self._validate({key: value for key, value in flat.items() if key not in without}, origins)
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


def setting_layers(settings: Sequence[str]) -> list[Layer]:
    """Return the layer of all `--set` arguments."""
    return [(f"--set {' --set '.join(settings)}", assignments(settings))] if settings else []


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


def merged(layers: Sequence[Layer]) -> tuple[Values, dict[str, str]]:
    """Return all values, flat, and the origin of those that layers set."""
    user: Values = {}
    origins: dict[str, str] = {}
    for origin, table in layers:
        flat = flatten(table, origin)
        put_over(user, flat)
        origins = {key: value for key, value in origins.items() if key in user} | dict.fromkeys(flat, origin)
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


def sentence(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return the first error, with the key and its origin."""
    first, *others = error.errors(include_url=False)
    key, message = ".".join(location(first, values)), reason_of(first)
    if not key:
        message = str(first["msg"]).removeprefix("Value error, ")
        preset = values.get("preset")
        of_preset = [key for key in dotted(values) if preset and f"{key} = " in message and key not in origins]
        return f"{message} (preset {preset} sets {', '.join(of_preset)})" if of_preset else message
    origin = _setting(origins.get(key, ""), key)
    where = f" (from {shown(origin)})" if origin else ""
    if first["type"] == "extra_forbidden":
        if needed := variants_with(key):
            return f"{key}{where} has no effect here: it needs {needed}. Remove it, or change that."
        return unknown_key(key, origin or "the configuration", all_keys())
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


def _setting(origin: str, key: str) -> str:
    """Return the one `--set` among several that sets a key; any other origin as it is."""
    settings = [part for part in origin.split("--set ") if part.startswith(key)]
    return f"--set {settings[-1].strip()}" if origin.startswith("--set ") and settings else origin
