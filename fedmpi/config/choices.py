"""The parts that a configuration chooses, and the options that stand beside them in the same table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedmpi.common.registry import KINDS, Part, resolve

if TYPE_CHECKING:
    from fedmpi.config.parts import Config


def chosen(config: Config, kind: str) -> Part:
    """The part of a kind that the configuration chooses."""
    table, _, key = KINDS[kind].key.partition(".")
    return resolve(kind, getattr(getattr(config, table), key))


def options(config: Config, kind: str) -> dict[str, Any]:
    """The values that the configuration gives to the options of the chosen part; those unset are left out."""
    part = chosen(config, kind)
    table: BaseModel = getattr(config, KINDS[kind].table)
    extra = table.model_extra or {}
    declared = {o.name: getattr(table, o.name) for o in part.options if o.name in type(table).model_fields}
    given = {name: value for name, value in declared.items() if value is not None}
    return given | {name: extra[name] for name in extra if part.option(name) is not None}
