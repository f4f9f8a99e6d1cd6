"""What all tables of the configuration share: their base and the ranges of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fedmpi.common.registry import built_in_name, object_name

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _choice(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, list, tuple, dict)):
        raise ValueError('give a name, "package.module:object", or the object itself')
    return built_in_name(value) or value


Choice = Annotated[Any, BeforeValidator(_choice)]
"""A name, "package.module:object", or (from Python) the object itself."""


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
