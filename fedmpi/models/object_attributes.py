"""What an object holds under its names: in its `__dict__` and in the slots of its classes."""

from __future__ import annotations

import sys
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

from torch import nn

OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "fedmpi"}
"""Packages whose objects are not looked into."""


def is_a_users(kind: type) -> bool:
    """Whether a class is neither Python's, torch's, numpy's nor ours."""
    return kind.__module__.split(".")[0] not in OTHERS


def of_a_users_class(value: Any) -> bool:
    """Whether a value is an object with attributes, of a user's class and no module."""
    if isinstance(value, type | nn.Module):
        return False
    return isinstance(value, SimpleNamespace) or (is_a_users(type(value)) and has_attributes(value))


def has_attributes(value: Any) -> bool:
    """Whether an object can hold something under a name."""
    return _dictionary_of(value) is not None or bool(_slots(type(value)))


def attributes_of(value: Any) -> dict[str, Any]:
    """Names and what they stand for; slots that are not filled are left out."""
    return {**(_dictionary_of(value) or {}), **slots_of(value)}


def slots_of(value: Any) -> dict[str, Any]:
    """The filled ones of its classes, as far as these are a user's."""
    found = {}
    for name, slot in _slots(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue
    return found


def set_attribute(value: Any, name: str, to: Any) -> None:
    """Set one, whatever the class's own `__setattr__` does."""
    slot = _slots(type(value)).get(name)
    if slot is None:
        value.__dict__[name] = to
    else:
        slot.__set__(value, to)


def remove_attribute(value: Any, name: str) -> None:
    """Have a name stand for nothing; it may do so already."""
    slot = _slots(type(value)).get(name)
    if slot is None:
        value.__dict__.pop(name, None)
    elif name in slots_of(value):
        slot.__delete__(value)


def _dictionary_of(value: Any) -> dict[str, Any] | None:
    """Its `__dict__`, whatever the class's own `__getattr__` answers; None where it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(kind: type) -> dict[str, Any]:
    return {
        name: one
        for of in reversed(kind.__mro__)
        if "__slots__" in vars(of) and is_a_users(of)
        for name, one in vars(of).items()
        if isinstance(one, MemberDescriptorType)
    }
