"""What all tables of the configuration share: their base and the ranges of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Part(BaseModel):
    """Base of all tables: unknown keys are errors, values are immutable, docstrings describe the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)
