"""From preset, file and --set to a validated configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator
from pydantic_core import ErrorDetails

from fedmpi.common.errors import UserError, shown
from fedmpi.common.registry import KINDS, Part, resolve
from fedmpi.config.base import ALTERNATIVES, Table, Values
from fedmpi.config.checks import contradiction
from fedmpi.config.choices import (
    check_options,
    defaults_of_shared_keys,
    option_values,
    without_foreign_options,
)
from fedmpi.config.keys import tables_by_name, why_meaningless
from fedmpi.config.layers import (
    assignment,
    drop_alternatives,
    flatten,
    given_keys,
    nested,
    preset_values,
    put_over,
    read_toml,
    refuse_values_of_digits,
    with_preset,
)
from fedmpi.config.objects import taken_apart
from fedmpi.config.own_options import chosen_by, of_this_name
from fedmpi.config.tables import ConfigTables
from fedmpi.config.writing import chosen_table


class Config(ConfigTables):
    """A complete run: `Config(preset="fedavg", rounds=20, local={"lr": 0.1})`; what is left out has its default.

    Raises
    ------
    UserError
        An unknown preset or key, one that means nothing beside the others, a value out of range, or choices that
        contradict each other.
    """

    def __init__(self, **values: Any):
        own = given_keys(values)
        table = with_preset(own)
        try:
            super().__init__(**nested(table, "Config"))
            if defaults := defaults_of_shared_keys(self):
                table |= defaults
                super().__init__(**nested(table, "Config"))
        except ValidationError as error:
            raise UserError(f"{sentence(error)}{_of_the_same_name(table, error)}") from error
        if meaningless := [key for key in own if why_meaningless(self, key) is not None]:
            preset = {} if self.preset is None else preset_values(self.preset, own)
            news = [key for key in meaningless if not _says_nothing_new(self, key, own[key], preset)]
            _refuse_meaningless(self, dict.fromkeys(news, "Config"))

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
        """The configuration of a TOML file, with some of its keys set otherwise.

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

    @classmethod
    def exactly(cls, values: Mapping[str, Any]) -> Config:
        """Nested tables as they stand: validated, without a look at what the preset says beside them.

        Raises
        ------
        pydantic.ValidationError
        """
        config = cls.__new__(cls)
        cls.__pydantic_validator__.validate_python(dict(values), self_instance=config)
        return config

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        check_options(self)
        within_tables = (table.refusal() for _, table in self if isinstance(table, Table))
        reason = next(filter(None, within_tables), None) or contradiction(self)
        if reason is not None:
            raise ValueError(reason)
        return self


def load_config(path: Path | None, settings: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file (or of the defaults) with `--set` assignments on top."""
    layers = [(str(path), read_toml(path))] if path is not None else []
    layers += [(f"--set {setting}", assignment(setting)) for setting in settings]
    return build_config(layers)


def given_config(given: str | Path | Mapping[str, Any] | Config, overrides: Mapping[str, Any]) -> Config:
    """The configuration that Python code describes."""
    if not isinstance(given, str | Path | Mapping | Config):
        raise UserError(
            f"a configuration is a preset's name, a TOML file, a dict or a fedmpi.Config, not {type(given).__name__}"
        )
    if not isinstance(overrides, Mapping):
        raise UserError(f'overrides are a dict like {{"local.lr": 0.1}}, not {type(overrides).__name__}')
    changes = ("the overrides", nested(overrides, "the overrides"))
    if isinstance(given, Config) and not overrides:
        return given
    if isinstance(given, Config):
        return build_config([changes], base=chosen_table(given))
    if isinstance(given, Mapping):
        return build_config([("the configuration", nested(given, "the configuration")), changes])
    if isinstance(given, Path) or given.endswith(".toml") or os.sep in given:
        return build_config([(str(given), read_toml(Path(given))), changes])
    return build_config([("the preset", {"preset": given}), changes])


def build_config(layers: Sequence[tuple[str, Values]], base: Values | None = None) -> Config:
    """Merge named layers (later ones win) over their preset and validate the result.

    What `base` holds counts like a preset's values: it gives way, and is left out where it means nothing.
    """
    origins: dict[str, str] = {}
    user: Values = {}
    for origin, table in layers:
        flat = taken_apart(flatten(table, origin), tables_by_name())
        put_over(user, flat)
        origins.update(dict.fromkeys(flat, origin))
    values: Values = {}
    if base is not None:
        values = flatten(base, "the configuration")
        if user.get("preset") != values.get("preset") and "preset" in user:
            raise UserError(
                f"preset = {user['preset']!r}: a complete Config cannot change its preset, {values.get('preset')!r}; "
                "start from the preset and override that"
            )
        refuse_values_of_digits(values, user)
    elif user.get("preset") is not None:
        values = preset_values(str(user["preset"]), user)
    _drop_repeated(user, values, origins)
    drop_alternatives(values, user)
    older = dict(values)
    put_over(values, user)
    values = without_foreign_options(values, older, origins, tables_by_name())
    config = _validate(values, origins)
    _refuse_meaningless(config, origins)
    kept = {key: value for key, value in values.items() if why_meaningless(config, key) is None}
    return _validate(kept | option_values(config), origins)


def _drop_repeated(user: Values, preset: Values, origins: Mapping[str, str]) -> None:
    """Let a later layer set the alternative of a preset's value that a complete configuration repeats, such as a run's.

    Two alternatives that a user chose are both kept: the table that holds them rejects them.
    """
    for pair in ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            repeats = key in preset and user.get(key) == preset[key] and origins[key] == origins["preset"]
            if repeats and other in user and origins[other] != origins[key]:
                del user[key]


def _validate(values: Values, origins: dict[str, str]) -> Config:
    try:
        return Config.exactly(nested(values, "the configuration"))
    except ValidationError as error:
        raise UserError(f"{sentence(error, origins)}{_of_the_same_name(values, error)}") from error


def _of_the_same_name(values: Values, error: ValidationError) -> str:
    """What to do where the wrong value is that of an option of the user's own, named like one of fedmpi's keys."""
    name, key, *_ = [*map(str, error.errors(include_url=False)[0]["loc"]), "", ""]
    table, chosen = tables_by_name().get(name), list[Part]()
    with suppress(UserError):  # of a choice that is wrong itself
        if table is not None and key in table.model_fields:
            late = [kind for kind in KINDS.values() if kind.late and kind.table == name and kind.key in values]
            chosen = [*chosen_by(values, name, table), *(resolve(kind.name, values[kind.key]) for kind in late)]
    own = [part for part in chosen if part.foreign and part.option(key) is not None]
    return f"; {of_this_name(own[0], key, table)}" if own and table is not None else ""


def sentence(error: ValidationError, origins: Mapping[str, str] | None = None) -> str:
    """The first thing that is wrong, with the key and where it comes from."""
    first, *others = error.errors(include_url=False)
    location = [str(step) for step in first["loc"]]
    key = ".".join(location[:2])
    message = str(first["msg"]).removeprefix("Value error, ")
    if not location:
        return message
    origin = (origins or {}).get(key)
    where = f" (from {shown(origin)})" if origin else ""
    words = [other["ctx"]["expected"] for other in others if _names_words(other, first)]
    also = "".join(f", or give {word}" for word in words)
    return f"{key} = {shown(first['input'], repr)}{where}: {message[0].lower()}{message[1:]}{also}"


def _names_words(error: ErrorDetails, first: ErrorDetails) -> bool:
    """Whether an error says which words the key of another one takes as well."""
    return error["type"] == "literal_error" and error["loc"][:2] == first["loc"][:2]


def _says_nothing_new(config: Config, key: str, given: Any, preset: Values) -> bool:
    """Whether a value is the default or the preset's: complete configurations hold these of all keys (`model_dump`)."""
    table, _, name = key.partition(".")
    field = type(getattr(config, table)).model_fields.get(name) if name else None
    if field is None:
        return False
    as_it_was = [field.get_default(call_default_factory=True)]
    if key in preset:
        as_it_was.append(preset[key])
    return given in as_it_was or getattr(getattr(config, table), name) in as_it_was


def _refuse_meaningless(config: Config, origins: dict[str, str]) -> None:
    for key, origin in origins.items():
        if (condition := why_meaningless(config, key)) is not None:
            raise UserError(f"{key} (from {origin}) means nothing here: it needs {condition}: remove it or change that")
