"""What a preset, a file and --set say, one over the other: texts read, keys named by table, the later ones winning."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedmpi.common.data_choices import DIGITS, is_digits
from fedmpi.common.errors import UserError, shown
from fedmpi.common.files import read_plain
from fedmpi.common.registry import KINDS, resolve
from fedmpi.config.base import ALTERNATIVES, Values, written
from fedmpi.config.choices import without_foreign_options
from fedmpi.config.keys import all_keys, tables_by_name, unknown_key
from fedmpi.config.objects import taken_apart
from fedmpi.config.own_options import parts_with
from fedmpi.config.presets import preset_named
from fedmpi.config.tables import ConfigTables

LARGEST_FILE = 1 << 24
"""Bytes of a configuration."""
DEEPEST = 16
"""Names between the dots of a key: options of a model may be tables of tables."""
OF_A_SWEEP = ("sweep", "prepare", "base")
"""What a file has beside those of a configuration when it describes many runs."""


def read_toml(path: Path) -> Values:
    """A TOML file as a table; unreadable or malformed files raise UserError."""
    try:
        return tomllib.loads(read_plain(path, LARGEST_FILE).decode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {shown(path)} ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:  # what is no TOML or no UTF-8, numbers of thousands of digits
        raise UserError(f"{path} is not valid TOML: {error}") from error


def nested(values: Mapping[str, Any], origin: str) -> Values:
    """{"part.key": value} as nested tables; those that are nested already stay as they are."""
    table: Values = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise UserError(f"{origin}: keys are texts like local.lr, not {key!r}")
        part, dot, name = key.partition(".")
        if (dot or isinstance(value, Mapping)) and not isinstance(table.setdefault(part, {}), dict):
            raise UserError(f"{origin}: {shown(part)} is a table of keys, and cannot be {shown(table[part], repr)} too")
        if dot or isinstance(value, Mapping):
            given = {name: value} if dot else value
            if twice := table[part].keys() & given.keys():
                raise UserError(f"{origin}: {shown(part)}.{shown(min(twice))} is given twice: leave one out")
            table[part].update(given)
        else:
            table[part] = value
    return table


def flatten(table: Values, origin: str) -> Values:
    """Nested tables as {"part.key": value}; unknown keys are refused with the nearest valid one."""
    flat: Values = {}
    for name, value in table.items():
        field = ConfigTables.model_fields.get(name)
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


def dotted(table: Values, prefix: str = "") -> Values:
    """A table of tables as {"part.key": value}."""
    flat: Values = {}
    for name, value in table.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def put_over(older: Values, newer: Values) -> None:
    """Put newer values over older ones; of a table within a table only the keys that it names."""
    for key, value in newer.items():
        both = isinstance(value, dict) and isinstance(older.get(key), dict)
        older[key] = {**older[key], **value} if both else value


def assignments(settings: Sequence[str]) -> Values:
    """What `--set` says, as {"part.key": value}."""
    found: Values = {}
    for setting in settings:
        found |= dotted(assignment(setting))
    return found


def assignment(setting: str) -> Values:
    """What one `--set` says, as nested tables; UserError where it is no assignment."""
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


def preset_values(name: str, user: Values) -> Values:
    """{"part.key": value} of a preset, with those for the embedded digits where these are the data."""
    preset = preset_named(name)
    values = flatten(preset.table, f"preset {name}")
    if is_digits(user.get("data.shards", DIGITS)):
        own = flatten(preset.digits, f"preset {name}")
        drop_alternatives(values, own)
        values |= own
    return values


def drop_alternatives(older: Values, newer: Values) -> None:
    """Take out of `older` what `newer` says by another key: the number of clients or their share, epochs or steps."""
    for pair in ALTERNATIVES:
        if any(key in newer for key in pair):
            for key in pair:
                older.pop(key, None)


def given_keys(values: Mapping[str, Any]) -> Values:
    """Nested tables, or those that pydantic made of them, as {"part.key": value}."""
    return taken_apart(flatten({key: _plain(value) for key, value in values.items()}, "Config"), tables_by_name())


def with_preset(own: Values) -> Values:
    """{"part.key": value} over those of the preset that they name, if they name one."""
    if own.get("preset") is None:
        return own
    table = preset_values(str(own["preset"]), own)
    drop_alternatives(table, own)
    return without_foreign_options({**table, **own}, table, dict.fromkeys(own, "Config"), tables_by_name())


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def values_for_digits(table: Values) -> list[tuple[str, str, str]]:
    """(key, the preset's value, the one used) wherever a complete configuration has its preset's value for the
    digits.
    """
    if table.get("preset") is None or not is_digits(table.get("data.shards", DIGITS)):
        return []
    preset = preset_named(table["preset"])
    general, found = flatten(preset.table, "preset"), []
    for key, value in flatten(preset.digits, "preset").items():
        if table.get(key) == value:
            pair = next((pair for pair in ALTERNATIVES if key in pair), (key,))
            before = [
                f"{k.partition('.')[2]} = {general[k]}" if k != key else str(general[k]) for k in pair if k in general
            ]
            found.append((key, before[0] if before else "unset", str(value)))
    return found


def words_about_digits(table: Values) -> str:
    """`values_for_digits` as half a sentence; "" where there are none."""
    found = values_for_digits(table)
    listed = ", ".join(f"{key} = {here} (else {general})" for key, general, here in found)
    return f"preset {table['preset']} on the embedded digits: {listed}" if found else ""


def words_about_replaced(table: Values) -> str:
    """Which options of the preset's parts other parts have with their own values, as half a
    sentence; "" without any.
    """
    if table.get("preset") is None:
        return ""
    own, replaced = preset_values(table["preset"], table), []
    for key, value in own.items():
        name, _, option = key.partition(".")
        for kind in {part.kind for part in parts_with(name, option)} if table.get(key, value) != value else ():
            chooser = KINDS[kind].key
            before = own.get(chooser, tables_by_name()[name].model_fields[chooser.partition(".")[2]].default)
            if before != table.get(chooser) and resolve(kind, before).option(option) is not None:
                replaced.append(f"{key} = {table[key]} ({value} was for {before})")
    return f"preset {table['preset']} with other parts: {', '.join(replaced)}" if replaced else ""


def remarks(table: Values) -> list[str]:
    """What a user may not expect of a preset under the other choices of a complete configuration."""
    return [remark for remark in (words_about_digits(table), words_about_replaced(table)) if remark]


def refuse_values_of_digits(base: Values, user: Values) -> None:
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
