"""Values as they are first, with what lies in them: whether they are others now, and how they are put back."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

NUMBERS_AND_WORDS = int, float, complex, str, np.generic
SEQUENCES = list, tuple, deque
MOST_ENTRIES = 10_000
"""Of a list or dictionary whose entries are compared: larger ones are tables, which nobody keeps books in."""
OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "fedmpi"}
"""Packages whose objects are not looked into."""


@dataclass(frozen=True, slots=True)
class FirstValue:
    """A value that may be changed or replaced.

    Lists, tuples, deques and dictionaries are compared with all that lies in them, sets by their elements, tensors and
    arrays by their numbers, objects of a user's class by their attributes, but for those within other objects, modules
    that are no parts of a model (`self.teacher = [teacher]`) by their parameters and buffers. All of these are put back
    in place, since others may hold the same objects. Of anything else it counts whether it is the same object.

    Attributes
    ----------
    value : any
    content : any
        What lies in it: a `FirstValue` each, of an object that of its attributes, or a copy; None where nothing is
        known of it.
    memory : Tensor, optional
        Where the numbers of a tensor lie that has a copy: `value.data = …` may have it lie where others do.
    """

    value: Any
    content: Any = None
    memory: Tensor | None = None

    @classmethod
    def of(
        cls, value: Any, fixed: Set[int] = frozenset(), within: tuple[int, ...] = (), objects: bool = True
    ) -> FirstValue:
        """How a value is now.

        Parameters
        ----------
        value : any
        fixed : set of int
            Ids of tensors whose numbers may change.
        within : tuple of int
            Ids of the containers around it.
        objects : bool
            Whether objects of a user's class are looked into.
        """
        if isinstance(value, Tensor):
            known = id(value) not in fixed and _writable(value)
            return cls(value, value.detach().clone(), value.data) if known else cls(value)
        if isinstance(value, np.ndarray):
            return cls(value, value.copy() if value.flags.writeable and not value.dtype.hasobject else None)
        if id(value) in within or (isinstance(value, (*SEQUENCES, dict, set)) and len(value) > MOST_ENTRIES):
            return cls(value)
        if isinstance(value, set):
            return cls(value, set(value))
        if isinstance(value, nn.Module):
            return cls(value, [cls.of(one, fixed) for one in (*value.parameters(), *value.buffers())])
        within = *within, id(value)
        if isinstance(value, SEQUENCES):
            return cls(value, [cls.of(one, fixed, within, objects) for one in value])
        if isinstance(value, dict):
            return cls(value, {key: cls.of(one, fixed, within, objects) for key, one in value.items()})
        if objects and _of_a_users_class(value):
            return cls(value, cls.of(vars(value), fixed, within, objects=False))
        return cls(value)

    def changed(self, now: Any) -> bool:
        """Whether what is in its place now is another value."""
        value, content = self.value, self.content
        if content is None:
            same = isinstance(value, NUMBERS_AND_WORDS) and type(now) is type(value) and bool(now == value)
            return now is not value and not same
        if isinstance(value, Tensor):
            if now is not value or (self.memory is not None and lies_elsewhere(value, self.memory)):
                return True
            return not (torch.equal(value, content) or _alike(value, content))
        if type(now) is not type(value):
            return True
        if isinstance(content, FirstValue):
            return now is not value or content.changed(vars(now))
        if isinstance(value, nn.Module):
            return now is not value or any(first.changed(first.value) for first in content)
        if isinstance(value, np.ndarray):
            return now is not value or not _alike(value, content)
        if isinstance(value, set):
            return bool(now != content)
        if len(now) != len(content):
            return True
        if isinstance(value, dict):
            return list(now) != list(content) or any(first.changed(now[key]) for key, first in content.items())
        return any(first.changed(one) for first, one in zip(content, now, strict=True))

    def lies_in(self, memory: Set[int]) -> bool:
        """Whether a tensor that can be put back, it or one within it, lies in one of these storages (by address)."""
        if isinstance(self.value, Tensor):
            return self.memory is not None and self.memory.untyped_storage().data_ptr() in memory
        if isinstance(self.content, FirstValue):
            return self.content.lies_in(memory)
        if self.content is None or not isinstance(self.value, (*SEQUENCES, dict, nn.Module)):
            return False
        within = self.content.values() if isinstance(self.value, dict) else self.content
        return any(one.lies_in(memory) for one in within)

    def put_back(self) -> Any:
        """The value, with what lay in it first."""
        value, content = self.value, self.content
        if content is None:
            return value
        if isinstance(content, FirstValue):
            content.put_back()
        elif isinstance(value, Tensor):
            if self.memory is not None and lies_elsewhere(value, self.memory):
                value.data = self.memory
            value.data.copy_(content)
        elif isinstance(value, np.ndarray):
            value[...] = content
        elif isinstance(value, set):
            value.clear()
            value.update(content)
        elif isinstance(value, dict):
            first = {key: one.put_back() for key, one in content.items()}
            value.clear()
            value.update(first)
        else:
            items = [one.put_back() for one in content]
            if not isinstance(value, tuple | nn.Module):
                value.clear()
                value.extend(items)
        return value


def _of_a_users_class(value: Any) -> bool:
    """Whether a value is an object with attributes, of a class that is neither Python's, torch's, numpy's nor ours."""
    if not hasattr(value, "__dict__") or isinstance(value, type | nn.Module):
        return False
    return isinstance(value, SimpleNamespace) or _is_a_users(type(value))


def _is_a_users(kind: type) -> bool:
    return kind.__module__.split(".")[0] not in OTHERS


class ClassValues:
    """Attributes of the classes of a module and its parts, as far as these are a user's: what is put there stands for
    all objects.

    Parameters
    ----------
    module : nn.Module
    """

    def __init__(self, module: nn.Module):
        kinds = {kind for part in module.modules() for kind in type(part).__mro__ if _is_a_users(kind)}
        self._first = {kind: {name: FirstValue.of(one) for name, one in _data_of(kind)} for kind in kinds}

    def changed(self) -> list[tuple[type, str, FirstValue | None]]:
        """Class, name and first value of those that are others now, None for new ones."""
        found: list[tuple[type, str, FirstValue | None]] = []
        for kind, first in self._first.items():
            now = dict(_data_of(kind))
            found += [(kind, name, one) for name, one in first.items() if name not in now or one.changed(now[name])]
            found += [(kind, name, None) for name in now if name not in first]
        return found


def put_back_in_class(kind: type, name: str, first: FirstValue | None) -> None:
    """Give an attribute of a class its first value again; None: there was none."""
    if first is not None:
        setattr(kind, name, first.put_back())
    elif name in vars(kind):
        delattr(kind, name)


def _data_of(kind: type) -> list[tuple[str, Any]]:
    """Names and values of a class that are no methods."""
    return [(name, one) for name, one in vars(kind).items() if not name.startswith("__") and not callable(one)]


def lies_elsewhere(tensor: Tensor, memory: Tensor) -> bool:
    """Whether the numbers of a tensor do not lie where those of `memory` do, in the same shape and order."""
    same = tensor.data_ptr() == memory.data_ptr() and tensor.shape == memory.shape
    return not same or tensor.stride() != memory.stride()


def _writable(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor can be compared and put back: not those of what repeats them, by `expand`."""
    if is_lazy(tensor) or tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return not any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _alike(one: Any, other: Any) -> bool:
    """Whether two tensors or arrays hold the same numbers, and NaN in the same places."""
    return one.shape == other.shape and bool(((one == other) | (one != one) & (other != other)).all())
