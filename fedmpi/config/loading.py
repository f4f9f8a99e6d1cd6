"""From preset, file and --set to a validated configuration, and back to TOML."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from fedmpi.common.errors import UserError, shown
from fedmpi.common.files import read_plain
from fedmpi.common.registry import DIGITS, is_digits
from fedmpi.config.base import written
from fedmpi.config.checks import why_meaningless
from fedmpi.config.choices import option_values, without_foreign_options
from fedmpi.config.parts import Config
from fedmpi.config.presets import preset_named

Table = dict[str, Any]
LARGEST_FILE = 1 << 24
"""Bytes of a configuration."""
DEEPEST = 16
"""Names between the dots of a key: options of a model may be tables of tables."""
OF_A_SWEEP = ("sweep", "prepare")
"""Tables that a file has beside those of a configuration when it describes many runs."""
ALTERNATIVES = (("participation.count", "participation.fraction"), ("local.epochs", "local.steps"))


def load_config(path: Path | None, settings: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file (or of the defaults) with `--set` assignments on top.

    Raises
    ------
    UserError
        When the file cannot be read, a key is unknown or meaningless, a value is out of range or choices contradict.
    """
    layers = [(str(path), read_toml(path))] if path is not None else []
    layers += [(f"--set {setting}", _parse_setting(setting)) for setting in settings]
    return build_config(layers)


def given_config(given: str | Path | Mapping[str, Any] | Config, overrides: Mapping[str, Any]) -> Config:
    """The configuration that Python code describes.

    Parameters
    ----------
    given : str, Path, mapping or Config
        A preset's name; a TOML file (a Path, or a text that ends in .toml or holds a path); keys and values; or a
        complete configuration.
    overrides : mapping
        Values by key, as {"local.lr": 0.1} or {"local": {"lr": 0.1}}, over those of `given`.

    Raises
    ------
    UserError
        As `load_config`.
    """
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


def nested(values: Mapping[str, Any], origin: str) -> Table:
    """{"part.key": value} as nested tables; those that are nested already stay as they are."""
    table: Table = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise UserError(f"{origin}: keys are texts like local.lr, not {key!r}")
        part, dot, name = key.partition(".")
        if (dot or isinstance(value, Mapping)) and not isinstance(table.setdefault(part, {}), dict):
            raise UserError(f"{origin}: {shown(part)} is a table of keys, and cannot be {shown(table[part], repr)} too")
        if dot:
            table[part][name] = value
        elif isinstance(value, Mapping):
            table[part].update(value)
        else:
            table[part] = value
    return table


def filled(values: Mapping[str, Any]) -> Table:
    """Nested tables over those of the preset that they name, if they name one."""
    if values.get("preset") is None:
        return dict(values)
    own = _flatten({key: _plain(value) for key, value in values.items()}, "Config")
    table = _preset_values(str(values["preset"]), own)
    _drop_alternatives(table, own)
    together = without_foreign_options({**table, **own}, dict.fromkeys(own, "Config"), _tables())
    return nested(together, "Config")


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def build_config(layers: Sequence[tuple[str, Table]], base: Table | None = None) -> Config:
    """Merge named layers (later ones win) over their preset and validate the result.

    What `base` holds counts like a preset's values: it gives way, and is left out where it means nothing.
    """
    origins: dict[str, str] = {}
    user: Table = {}
    for origin, table in layers:
        flat = _flatten(table, origin)
        _drop_alternatives(user, flat)
        user.update(flat)
        origins.update(dict.fromkeys(flat, origin))
    values: Table = {}
    if base is not None:
        values = _flatten(base, "the configuration")
        if user.get("preset") != values.get("preset") and "preset" in user:
            raise UserError(
                f"preset = {user['preset']!r}: a complete Config cannot change its preset, {values.get('preset')!r}; "
                "start from the preset and override that"
            )
        _refuse_values_of_digits(values, user)
    elif user.get("preset") is not None:
        values = _preset_values(str(user["preset"]), user)
    _drop_alternatives(values, user)
    values.update(user)
    values = without_foreign_options(values, origins, _tables())
    config = _validate(values, origins)
    _refuse_meaningless(config, origins)
    kept = {key: value for key, value in values.items() if _relevant(config, key)}
    return _validate(kept | option_values(config), origins)


def _preset_values(name: str, user: Table) -> Table:
    """{"part.key": value} of a preset, with those for the embedded digits where these are the data."""
    preset = preset_named(name)
    values = _flatten(preset.table, f"preset {name}")
    if is_digits(user.get("data.shards", DIGITS)):
        own = _flatten(preset.digits, f"preset {name}")
        _drop_alternatives(values, own)
        values |= own
    return values


def values_for_digits(table: Table) -> list[tuple[str, str, str]]:
    """(key, the preset's value, the one used) wherever a complete configuration has its preset's value for the digits.

    Parameters
    ----------
    table : dict
        {"part.key": value}, as `flat_table` gives it.
    """
    if table.get("preset") is None or not is_digits(table.get("data.shards", DIGITS)):
        return []
    preset = preset_named(table["preset"])
    general, found = _flatten(preset.table, "preset"), []
    for key, value in _flatten(preset.digits, "preset").items():
        if table.get(key) == value:
            pair = next((pair for pair in ALTERNATIVES if key in pair), (key,))
            before = [
                f"{k.partition('.')[2]} = {general[k]}" if k != key else str(general[k]) for k in pair if k in general
            ]
            found.append((key, before[0] if before else "unset", str(value)))
    return found


def words_about_digits(table: Table) -> str:
    """`values_for_digits` as half a sentence; "" where there are none."""
    found = values_for_digits(table)
    told = ", ".join(f"{key} = {here} (else {general})" for key, general, here in found)
    return f"preset {table['preset']} on the embedded digits: {told}" if found else ""


def _refuse_values_of_digits(base: Table, user: Table) -> None:
    """Refuse to take what a complete configuration holds for the embedded digits to other data."""
    if is_digits(user.get("data.shards", DIGITS)):
        return
    kept = [(key, here) for key, _, here in values_for_digits(base) if key not in user]
    if kept:
        key, here = kept[0]
        raise UserError(
            f"data.shards = {written(user['data.shards'])!r}: this complete Config has the values of preset "
            f"{base['preset']} for the embedded digits, such as {key} = {here}: start from the preset and override that"
        )


def read_toml(path: Path) -> Table:
    """A TOML file as a table; unreadable or malformed files raise UserError."""
    try:
        return tomllib.loads(read_plain(path, LARGEST_FILE).decode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {shown(path)} ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:  # what is no TOML or no UTF-8, numbers of thousands of digits
        raise UserError(f"{path} is not valid TOML: {error}") from error


def config_table(config: Config) -> Table:
    """The complete configuration as a file holds it: every key that means something under the chosen values."""
    table = chosen_table(config)
    return {
        name: {key: written(inner) for key, inner in value.items()} if isinstance(value, dict) else written(value)
        for name, value in table.items()
    }


def chosen_table(config: Config) -> Table:
    """As `config_table`, with objects as they were given."""
    table: Table = {}
    for name, value in config:
        if isinstance(value, BaseModel):
            part = {k: v for k, v in value.model_dump().items() if v is not None and _relevant(config, f"{name}.{k}")}
            table[name] = part
        elif value is not None:
            table[name] = value
    return table


def config_toml(config: Config) -> str:
    """The complete configuration as TOML text; loading it again gives the same configuration."""
    return tomli_w.dumps(config_table(config))


def flat_table(config: Config) -> Table:
    """`config_table` as {"part.key": value}."""
    return dotted(config_table(config))


def differences(table: Table, config: Config) -> list[tuple[str, str, str]]:
    """(key, its value in `table`, its value in `config`) wherever a table read from TOML and a configuration differ.

    A key that the table lacks counts as its default: an earlier version wrote it, which did not know the key.
    """
    there, here = dotted(table), dotted(tomllib.loads(config_toml(config)))
    here = {key: value for key, value in here.items() if key in there or not _is_default(config, key)}
    keys = [*here, *(key for key in there if key not in here)]
    shown = [(key, _value(there, key), _value(here, key)) for key in keys]
    return [(key, old, new) for key, old, new in shown if old != new]


def _is_default(config: Config, key: str) -> bool:
    """Whether a key of the configuration itself, not an option of a part, has the value that it has unless set."""
    table, _, name = key.rpartition(".")
    model = getattr(config, table) if table else config
    field = type(model).model_fields.get(name)
    return field is not None and getattr(model, name) == field.get_default(call_default_factory=True)


def _value(flat: Table, key: str) -> str:
    return repr(flat[key]) if key in flat else "unset"


def dotted(table: Table, prefix: str = "") -> Table:
    """A table of tables as {"part.key": value}."""
    flat: Table = {}
    for name, value in table.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def key_descriptions() -> list[tuple[str, str, str]]:
    """(key, default, description) of every key of the configuration, in order."""
    rows: list[tuple[str, str, str]] = []
    for name, field in Config.model_fields.items():
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


def assignments(settings: Sequence[str]) -> Table:
    """What `--set` says, as {"part.key": value}.

    Raises
    ------
    UserError
        When one is no assignment.
    """
    found: Table = {}
    for setting in settings:
        found |= dotted(_parse_setting(setting))
    return found


def _parse_setting(setting: str) -> Table:
    key, separator, text = setting.partition("=")
    if not separator or not key.strip():
        raise UserError(f"--set {setting}: write part.key=value, for example --set local.lr=0.01")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    names = key.strip().split(".")
    if len(names) > DEEPEST:
        raise UserError(f"--set {shown(setting)}: write part.key=value, for example --set local.lr=0.01")
    table: Any = value
    for name in reversed(names):
        table = {name: table}
    return dict(table)


def _flatten(table: Table, origin: str) -> Table:
    """Nested tables as {"part.key": value}; unknown keys are refused with the nearest valid one."""
    flat: Table = {}
    for name, value in table.items():
        field = Config.model_fields.get(name)
        if name in OF_A_SWEEP and origin.endswith(".toml"):
            raise UserError(
                f"{shown(origin)} describes a sweep of many runs: start it with fedmpi sweep {shown(origin)}"
            )
        if field is None:
            raise UserError(unknown_key(name, origin, all_keys()))
        part = field.annotation
        if not (isinstance(part, type) and issubclass(part, BaseModel)):
            flat[name] = value
            continue
        if not isinstance(value, dict):
            raise UserError(f"{origin}: {name} is a table of keys, not a single value: write [{name}] or {name}.key")
        open_ended = part.model_config.get("extra") == "allow"
        for key, inner in value.items():
            if key not in part.model_fields and not open_ended:
                raise UserError(unknown_key(f"{name}.{key}", origin, all_keys()))
            flat[f"{name}.{key}"] = inner
    return flat


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


def _drop_alternatives(older: Table, newer: Table) -> None:
    for pair in ALTERNATIVES:
        if any(key in newer for key in pair):
            for key in pair:
                older.pop(key, None)


def _validate(values: Table, origins: dict[str, str]) -> Config:
    try:
        return Config.exactly(nested(values, "the configuration"))
    except ValidationError as error:
        raise UserError(sentence(error, origins)) from error


def sentence(error: ValidationError, origins: Mapping[str, str] | None = None) -> str:
    """The first thing that is wrong, with the key and where it comes from."""
    first = error.errors(include_url=False)[0]
    location = [str(step) for step in first["loc"]]
    key = ".".join(location[:2])
    message = str(first["msg"]).removeprefix("Value error, ")
    if not location:
        return message
    origin = (origins or {}).get(key)
    where = f" (from {shown(origin)})" if origin else ""
    return f"{key} = {shown(first['input'], repr)}{where}: {message[0].lower()}{message[1:]}"


def _tables() -> dict[str, type[BaseModel]]:
    """The tables of the configuration by name."""
    annotated = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: part for name, part in annotated.items() if isinstance(part, type) and issubclass(part, BaseModel)}


def _relevant(config: Config, key: str) -> bool:
    return why_meaningless(config, key) is None


def _refuse_meaningless(config: Config, origins: dict[str, str]) -> None:
    for key, origin in origins.items():
        if (condition := why_meaningless(config, key)) is not None:
            raise UserError(f"{key} (from {origin}) means nothing here: it needs {condition}: remove it or change that")
