"""Values as they are first, with what lies in them: whether they are others now, and how they are put back."""

from __future__ import annotations

from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedmpi.models.object_attributes import attributes_of, is_a_users, of_a_users_class, remove_attribute, set_attribute

NUMBERS_AND_WORDS = int, float, complex, str, np.generic
SEQUENCES = list, tuple, deque
CONTAINERS: tuple[Any, ...] = (*SEQUENCES, OrderedDict, dict, set, bytearray, array)
"""Those that may be of a user's class are read and filled by the methods that these have."""
AROUND_CONTAINERS = UserDict, UserList, ChainMap
"""What keeps its entries in a dictionary or lists that are its attributes."""
MOST_ENTRIES = 10_000
"""Of a list or dictionary whose entries are compared: larger ones are tables, which nobody keeps books in."""


@dataclass(frozen=True, slots=True)
class FirstValue:
    """A value that may be changed or replaced.

    Lists, tuples, deques and dictionaries are compared with all that lies in them, sets by their elements, tensors and
    arrays by their numbers, objects of a user's class by their attributes, but for those within other objects, modules
    that are no parts of a model (`self.teacher = [teacher]`) by their parameters and buffers. All of these are put back
    in place, since others may hold the same objects. Of anything else it counts whether it is the same object.
    """

    value: Any
    content: Any = None  # What lies in it: a `FirstValue` each, or a copy; None where nothing is known of it
    # Where the numbers of a tensor lie that has a copy: `value.data = …` may have it lie where others do
    memory: Tensor | None = None
    # Of an object, be it a container of a user's class: a `FirstValue` each
    attributes: dict[str, FirstValue] | None = None

    @classmethod
    def of(
        cls, value: Any, fixed: Set[int] = frozenset(), within: tuple[int, ...] = (), objects: bool = True
    ) -> FirstValue:
        """How a value is now."""
        if isinstance(value, Tensor):
            known = id(value) not in fixed and _writable(value)
            return cls(value, value.detach().clone(), value.data) if known else cls(value)
        if isinstance(value, np.ndarray):
            return cls(value, value.copy() if value.flags.writeable and not value.dtype.hasobject else None)
        if id(value) in within or (isinstance(value, CONTAINERS) and len(value) > MOST_ENTRIES):
            return cls(value)
        if isinstance(value, nn.Module):
            return cls(value, [cls.of(one, fixed) for one in (*value.parameters(), *value.buffers())])
        within, attributes = (*within, id(value)), None
        content: Any = None
        if isinstance(value, AROUND_CONTAINERS) or (objects and of_a_users_class(value)):
            deeper = objects and isinstance(value, AROUND_CONTAINERS)
            attributes = {name: cls.of(one, fixed, within, deeper) for name, one in attributes_of(value).items()}
        if isinstance(value, set):
            content = set(value)
        elif isinstance(value, bytearray | array):
            content = value[:]
        elif isinstance(value, SEQUENCES):
            content = [cls.of(one, fixed, within, objects) for one in _method(value, "__iter__")()]
        elif isinstance(value, dict):
            content = {key: cls.of(one, fixed, within, objects) for key, one in _method(value, "items")()}
        return cls(value, content, None, attributes)

    def changed(self, now: Any) -> bool:
        """Whether what is in its place now is another value."""
        value, content = self.value, self.content
        if content is None and self.attributes is None:
            same = isinstance(value, NUMBERS_AND_WORDS) and type(now) is type(value) and bool(now == value)
            return now is not value and not same
        if isinstance(value, Tensor):
            if now is not value or (self.memory is not None and lies_elsewhere(value, self.memory)):
                return True
            return not (torch.equal(value, content) or _alike(value, content))
        if type(now) is not type(value) or (self.attributes is not None and _differ(self.attributes, now)):
            return True
        if content is None:
            return now is not value
        if isinstance(value, nn.Module):
            return now is not value or any(first.changed(first.value) for first in content)
        if isinstance(value, np.ndarray):
            return now is not value or not _alike(value, content)
        if isinstance(value, set):
            return bool(set(now) != content)
        if isinstance(value, bytearray | array):
            return bytes(now) != bytes(content)
        if isinstance(value, dict):
            found = dict(_method(now, "items")())
            same = found.keys() == content.keys() and list(map(hash, found)) == list(map(hash, content))  # and order
            return not same or any(first.changed(found[key]) for key, first in content.items())
        entries = list(_method(now, "__iter__")())
        return len(entries) != len(content) or any(map(FirstValue.changed, content, entries))

    def lies_in(self, memory: Set[int]) -> bool:
        """Whether a tensor that can be put back, it or one within it, lies in one of these storages (by address)."""
        if isinstance(self.value, Tensor):
            return self.memory is not None and self.memory.untyped_storage().data_ptr() in memory
        within = list((self.attributes or {}).values())
        if isinstance(self.content, dict):
            within += self.content.values()
        elif isinstance(self.value, (*SEQUENCES, nn.Module)):
            within += self.content or ()
        return any(one.lies_in(memory) for one in within)

    def put_back(self) -> Any:
        """The value, with what lay in it first."""
        value, content = self.value, self.content
        if self.attributes is not None:
            for name in attributes_of(value).keys() - self.attributes.keys():
                remove_attribute(value, name)
            for name, one in self.attributes.items():
                set_attribute(value, name, one.put_back())
        if content is None:
            return value
        if isinstance(value, Tensor):
            if self.memory is not None and lies_elsewhere(value, self.memory):
                value.data = self.memory
            value.data.copy_(content)
        elif isinstance(value, np.ndarray):
            value[...] = content
        elif isinstance(value, bytearray | array):
            value[:] = content
        elif isinstance(value, set):
            _method(value, "clear")()
            _method(value, "update")(content)
        elif isinstance(value, dict):
            first = {key: one.put_back() for key, one in content.items()}
            _method(value, "clear")()
            for key, one in first.items():
                _method(value, "__setitem__")(key, one)
        else:
            items = [one.put_back() for one in content]
            if not isinstance(value, tuple | nn.Module):
                _method(value, "clear")()
                _method(value, "extend")(items)
        return value


def _method(value: Any, name: str) -> Any:
    """A method of a container, whatever class of a user's is made of it; of what only passes for one, its own."""
    kind = next((kind for kind in CONTAINERS if issubclass(type(value), kind)), None)
    return getattr(value, name) if kind is None else partial(getattr(kind, name), value)


def _differ(first: dict[str, FirstValue], now: Any) -> bool:
    found = attributes_of(now)
    return found.keys() != first.keys() or any(one.changed(found[name]) for name, one in first.items())


class ClassValues:
    """Attributes of the classes of some objects, as far as these are a user's: what is put there stands for all
    objects.
    """

    def __init__(self, objects: Iterable[Any]):
        mros = [(one if isinstance(one, type) else type(one)).__mro__ for one in objects]
        kinds = {kind for mro in mros for kind in mro if is_a_users(kind)}
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
