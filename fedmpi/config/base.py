"""What all tables of the configuration share: their base and the ranges of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fedmpi.common.registry import built_in_name, object_name


def limits(least: float, most: float, why: str) -> AfterValidator:
    """Bounds of a number, zero let through; the refusal gives the reason.

    Parameters
    ----------
    least, most : float
        The smallest and the largest number that works.
    why : str
        Why no other does.
    """

    def within(value: Any) -> Any:
        if value and not least <= value <= most:
            bound = f"at least {_number(least)}" if value < least else f"at most {_number(most)}"
            raise ValueError(f"{bound} is possible: {why}")
        return value

    return AfterValidator(within)


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
    """A value of the configuration as a file can hold it: an object is written as its name."""
    if value is None or isinstance(value, (str, bool, int, float, dict)):
        return value
    if isinstance(value, (list, tuple)):
        return [written(inner) for inner in value]
    name: str = getattr(value, "config_name", None) or object_name(value)
    return name


class Part(BaseModel):
    """Base of all tables: unknown keys are errors, values are immutable, docstrings describe the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)


class OpenPart(Part):
    """Base of the tables in which the options of chosen parts stand: other keys are theirs."""

    model_config = ConfigDict(extra="allow")
