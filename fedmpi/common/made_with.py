"""Options with which an object of a class was made, so that a file can describe an equal object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar

NOTED = "__fedmpi_made_with__"
"""Attribute in which an object of a marked class keeps the options of its constructor."""
OBJECT = "(...)"
"""Suffix of the name of an object whose values no file contains; such a name cannot be resolved."""
DEEPEST = 8
"""Levels of nested attributes that are compared."""

Made = TypeVar("Made", bound=type)


def noting(made: Made) -> Made:
    """Return the class, whose objects from now on record the named arguments of their constructor."""
    plain: Callable[..., None] = made.__init__  # type: ignore[misc]
    if plain is object.__init__:
        return made

    @wraps(plain)
    def constructed(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        if type(self) is made and hasattr(self, "__dict__"):
            vars(self)[NOTED] = options

    made.__init__ = constructed  # type: ignore[misc]
    return made


def made_with(made: Any, names: list[str]) -> dict[str, Any] | None:
    """Return the options with which its class makes an object like this one; None if they are unknown.

    They are the recorded arguments of the constructor or, for classes without a mark, the attributes with the options'
    names. An object that its class would not make again, because it was changed or made differently, has none.
    """
    own = getattr(made, "__dict__", {})
    options = own.get(NOTED)
    if options is None:
        options = {name: own[name] for name in names if name in own}
    try:
        again = type(made)(**options)
    except Exception:
        return None
    return dict(options) if _alike(_without_note(again), _without_note(made), DEEPEST) else None


def holds_values(chosen: Any) -> bool:
    """Check whether a choice has values that its name does not restore: an object, a partial, a function in one."""
    if isinstance(chosen, partial | MethodType):
        return True
    if not hasattr(chosen, "__qualname__") or not hasattr(chosen, "__module__"):
        return True
    return bool(getattr(chosen, "__closure__", None)) and not _leads_to(chosen)


def found_by_name(chosen: Any) -> bool:
    """Check whether the name of a function leads to it, unlike a lambda's; a partial has the name of its function.

    For objects, the name of the class counts.
    """
    named = chosen.func if isinstance(chosen, partial) else chosen
    return not hasattr(named, "__code__") or _leads_to(named)


def _leads_to(chosen: Any) -> bool:
    found: Any = sys.modules.get(chosen.__module__)
    for step in chosen.__qualname__.split("."):
        found = getattr(found, step, None)
    return found is chosen


def _without_note(made: Any) -> dict[str, Any]:
    return {name: value for name, value in getattr(made, "__dict__", {}).items() if name != NOTED}


def _alike(one: Any, other: Any, depth: int) -> bool:
    """Check whether two values are equal, as far as that can be determined."""
    if one is other:
        return True
    if type(one) is not type(other) or not depth:
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key], depth - 1) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_alike(*both, depth - 1) for both in zip(one, other, strict=True))
    try:
        same = one == other
        if bool(same.all() if hasattr(same, "all") else same):
            return not hasattr(one, "shape") or one.shape == other.shape
    except Exception:  # different shapes
        return False
    compares: Any = type(one).__eq__
    return compares is object.__eq__ and _alike(_without_note(one), _without_note(other), depth - 1)
