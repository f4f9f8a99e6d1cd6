"""What all tables of the configuration share: their base and the ranges of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from fedmpi.common.made_with import OBJECT, holds_values
from fedmpi.common.own_code import object_name
from fedmpi.common.registry import built_in_name
from fedmpi.common.truth_values import mistaken

Values = dict[str, Any]
"""Values by key: {"rounds": 20, "local": {"lr": 0.1}}, or flat, {"local.lr": 0.1}."""

ALTERNATIVES = (("participation.count", "participation.fraction"), ("local.epochs", "local.steps"))
"""Keys that say the same in two ways, of which one is set."""


def limits(least: float, most: float, why: str) -> AfterValidator:
    """Bounds of a number, zero let through; the refusal gives the reason."""

    def within(value: Any) -> Any:
        if value and not least <= value <= most:
            bound = f"at least {_number(least)}" if value < least else f"at most {_number(most)}"
            raise ValueError(f"{bound} is possible: {why}")
        return value

    return AfterValidator(within)


OWN = "package.module:object"
"""Among the values of an `only_with`: a part of the user's own."""


@dataclass(frozen=True)
class Condition:
    """What another key has to be for a key to mean something; stands in the annotation of the latter.

    Attributes
    ----------
    key : str
        The other one: of the same table, or "table.key".
    values : tuple
    wanted : bool
        Whether it has to be one of the values, or none of them.
    """

    key: str
    values: tuple[Any, ...]
    wanted: bool = True

    def within(self, table: str) -> Condition:
        """The same, its key with its table."""
        return self if "." in self.key else replace(self, key=f"{table}.{self.key}")

    def holds(self, value: Any) -> bool:
        """Whether it holds with this value of the other key."""
        own = not isinstance(value, str) or ":" in value
        return any(own if known is OWN else known == value for known in self.values) is self.wanted

    def __str__(self) -> str:
        if self.values == (None,):
            return self.key
        alternatives = " or ".join("one of your own" if value is OWN else _shown(value) for value in self.values)
        return f"{self.key} {'=' if self.wanted else 'other than'} {alternatives}"


def only_with(key: str, *values: Any) -> Condition:
    """The key means something only where the other one is one of these values."""
    return Condition(key, values)


def not_with(key: str, *values: Any) -> Condition:
    """The key means nothing where the other one is one of these values."""
    return Condition(key, values, wanted=False)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


SINGLE = limits(1e-30, 1e30, "products of numbers beyond leave the range of single precision")
EXACT = limits(0, 2**53, "larger whole numbers are not told apart in records and in sums")
PLANNED = limits(0, 10**6, "a client's batches are laid out before it trains")

Count = Annotated[int, Field(ge=1), EXACT]
WholeOrZero = Annotated[int, Field(ge=0), EXACT]
Probability = Annotated[float, Field(gt=0, le=1), SINGLE]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), SINGLE]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), SINGLE]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _choice(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, str) and not callable(value):
        raise ValueError('give a name, "package.module:object", or the object itself')
    return built_in_name(value) or value


Choice = Annotated[Any, BeforeValidator(_choice)]
"""A name, "package.module:object", or (from Python) the object itself."""


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _each_once(choices: tuple[Any, ...]) -> tuple[Any, ...]:
    for place, choice in enumerate(choices):
        if choice in choices[:place]:
            raise ValueError(f"{written(choice)} is listed twice")
    return choices


Choices = Annotated[tuple[Choice, ...], BeforeValidator(_listed), AfterValidator(_each_once)]
"""Any number of them, each once; one alone needs no list."""


def written(value: Any) -> Any:
    """A value of the configuration as a file can hold it: an object is written as its name.

    The name of one that holds values of its own ends with (...), and nothing is found by it. So does what stands for
    None in a list or a table, and for a table whose keys are no texts, of which no file holds any.
    """
    if value is None or isinstance(value, (str, bool, int, float)) or _is_moment(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_written_within(inner) for inner in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _written_within(inner) for key, inner in value.items()}
    if isinstance(value, np.generic):
        return written(value.item())
    name: str | None = getattr(value, "config_name", None)
    return name or object_name(value) + (OBJECT if holds_values(value) else "")


def _is_moment(value: Any) -> bool:
    """Whether it is one of TOML's dates and times, of which those of no day have no time zone."""
    return type(value) in (date, datetime) or (type(value) is time and value.tzinfo is None)


def _written_within(value: Any) -> Any:
    return object_name(value) + OBJECT if value is None else written(value)


class Table(BaseModel):
    """Base of all tables: unknown keys are errors, values are immutable, docstrings describe the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for 1, and 1 for true."""
        if info.field_name is not None and (reason := mistaken(cls.model_fields[info.field_name].annotation, value)):
            raise ValueError(reason)
        return value

    def refusal(self) -> str | None:
        """Why values of this table exclude one another, whatever the other tables hold; None where they do not."""
        return None
