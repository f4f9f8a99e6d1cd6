"""What an object of a class was made with, read back: what a file must say to make one like it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar

NOTED = "__fedmpi_made_with__"
"""The attribute in which an object of a marked class keeps the options that its constructor was given."""
OBJECT = "(...)"
"""What ends the name of an object whose values no file holds: such a name brings nothing back."""
DEEPEST = 8
"""Levels at which attributes of attributes are compared."""

Made = TypeVar("Made", bound=type)


def noting(made: Made) -> Made:
    """The class, whose objects from now on note what their constructor was given by name."""
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
    """The options with which its class makes an object like this one; None where that cannot be told.

    They are what the constructor was given, or, in classes that nothing marks, the attributes that have the options'
    names. An object that its class does not make so again, because it was changed since or made otherwise, has none.
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
    """Whether a choice holds values that its name does not bring back: an object, a partial, a function within one."""
    if isinstance(chosen, partial | MethodType):
        return True
    if not hasattr(chosen, "__qualname__") or not hasattr(chosen, "__module__"):
        return True
    return bool(getattr(chosen, "__closure__", None)) and not _leads_to(chosen)


def found_by_name(chosen: Any) -> bool:
    """Whether the name of a function leads to it, as no lambda's does; of a partial that of what it binds.

    Of objects, it is their class that has a name.
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
    """Whether two values say the same, as far as that can be seen."""
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
    except Exception:  # of unlike shapes
        return False
    compares: Any = type(one).__eq__
    return compares is object.__eq__ and _alike(_without_note(one), _without_note(other), depth - 1)
