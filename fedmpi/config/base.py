"""Types of the configuration's values: ranges of numbers, components, variants of tables; values as a file has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from fedmpi.common.imports import written_name
from fedmpi.common.options import Table as Table
from fedmpi.common.options import names_of, tables_in
from fedmpi.common.registry import Component

Values = dict[str, Any]
"""Values by key: nested, {"local": {"lr": 0.1}}, or flat, {"local.lr": 0.1, "clients.sampler": "uniform"}."""

ALTERNATIVES = (
    ("clients.count", "clients.fraction"),
    ("local.epochs", "local.steps"),
    ("topology.buffer", "topology.period"),
)
"""Pairs of keys with the same meaning. Only one of each pair is set."""


Count = Annotated[int, Field(ge=1, le=2**53)]
"""Records and sums do not distinguish larger whole numbers."""
WholeOrZero = Annotated[int, Field(ge=0, le=2**53)]
Probability = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
"""Products of larger numbers leave the range of single precision."""
NonNegative = Annotated[float, Field(ge=0, le=1e30)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def chooses(kind: str, default: str | None = None, key: str = "") -> BeforeValidator:
    """Return the reader of a key that chooses a component; without a default, of one that lists any, each once.

    `key` is the key that it reads, if not the first one of the kind. A table without a name has options of the default.
    """

    def one(value: Any) -> Component:
        chosen = Component.read(kind, value, default or "", key)
        if chosen.is_component:
            chosen.options, chosen.services  # noqa: B018 - rejects unknown names and wrong options
        return chosen

    def several(value: Any) -> tuple[Component, ...]:
        found = [one(item) for item in (value if isinstance(value, list | tuple) else [value])]
        for chosen in found:
            if found.count(chosen) > 1:
                raise ValueError(f"{chosen.name} is listed twice")
        return tuple(found)

    return BeforeValidator(several if default is None else one)


@dataclass(frozen=True)
class Variants:
    """Annotation of a union of tables: `name` chooses one of them. A name alone is a table with only this name."""

    default: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tables = {name: handler.generate_schema(table) for table in tables_in(source) for name in names_of(table)}
        chosen = core_schema.tagged_union_schema(tables, _variant_name)
        return core_schema.no_info_before_validator_function(self._read, chosen)

    def _read(self, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        return {"name": self.default, **value} if isinstance(value, Mapping) else value


def _variant_name(value: Any) -> str:
    return str(value.get("name") if isinstance(value, Mapping) else getattr(value, "name", value))


def switch(table: Callable[..., Any]) -> BeforeValidator:
    """Return the reader of an optional table: false or absent is off, true has the defaults."""

    def read(value: Any) -> Any:
        if isinstance(value, bool):
            return table() if value else None
        return value

    return BeforeValidator(read)


def written(value: Any) -> Any:
    """Return a value of the configuration as a file can hold it: an object is written as its name."""
    if value is None or isinstance(value, str | bool | int | float | date):
        return value
    if isinstance(value, Component):
        return {"name": value.name, **written(value.given)} if value.given else value.name
    if isinstance(value, list | tuple):
        return [str(inner) if inner is None else written(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): written(inner) for key, inner in value.items() if inner is not None}
    return written(value.item()) if isinstance(value, np.generic) else written_name(value)


def storable(value: Any) -> bool:
    """Check whether a file can hold an option's value without change."""
    if isinstance(value, tuple | list):
        return all(map(storable, value))
    return isinstance(value, str | int | float | bool | BaseModel | Component)
