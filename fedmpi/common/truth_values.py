"""Rejection of true and false for numbers, and of numbers for true and false."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Any

import numpy as np

NUMBERS = (int, float, complex)


def mistaken(annotation: Any, value: Any) -> str:
    """Return the value to use instead of true or false for a number, or of a number for them; "" if it is correct."""
    choices = list(_alternatives(annotation))
    if isinstance(value, list | tuple | Mapping):
        found = [_mistaken_within(choice, value) for choice in choices if typing.get_origin(choice) is not None]
        return found[0] if found and all(found) else ""
    truth = isinstance(value, bool | np.bool_)
    if not truth and not isinstance(value, (*NUMBERS, np.number)):
        return ""
    if any(_takes(choice, value) for choice in choices if choice is not bool and choice not in NUMBERS):
        return ""
    wants_truth, wants_number = bool in choices, any(choice in NUMBERS for choice in choices)
    if truth:
        return "give a number, not true or false" if wants_number and not wants_truth else ""
    return "give true or false, not a number" if wants_truth and not wants_number else ""


def _mistaken_within(annotation: Any, values: Any) -> str:
    """Return the same for the elements of a list, a tuple or a table."""
    inner = typing.get_args(annotation)
    if isinstance(values, Mapping):
        pairs = [(inner[-1], value) for value in values.values()] if inner else []
    elif len(inner) == 1 or inner[1:] == (...,):
        pairs = [(inner[0], value) for value in values]
    else:
        pairs = list(zip(inner, values, strict=False))
    return next(filter(None, (mistaken(wanted, value) for wanted, value in pairs)), "")


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of a union type, or the types of the values of a Literal or an Enum."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _alternatives(inner[0])
    elif origin in (typing.Union, UnionType):
        for choice in inner:
            yield from _alternatives(choice)
    elif origin is typing.Literal:
        yield from map(type, inner)
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (type(member.value) for member in annotation)
    elif isinstance(annotation, typing.NewType):
        yield from _alternatives(annotation.__supertype__)
    else:
        yield annotation


def _takes(annotation: Any, value: Any) -> bool:
    """Check whether a value may have a type, as for Any and numbers.Number, or if this is unknown."""
    if typing.get_origin(annotation) is not None:
        return False  # lists, tuples and tables of another type
    try:
        return isinstance(value, annotation)
    except TypeError:
        return True
