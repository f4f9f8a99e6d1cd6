"""What following a forward pass leaves behind in the module: told, and undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from fedmpi.models.first_values import ClassValues, FirstValue, put_back_in_class
from fedmpi.models.object_attributes import remove_attribute, set_attribute, slots_of
from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.values import ValueProxy

FLAT_WEIGHTS = {"_flat_weights", "_flat_weight_refs"}
"""What torch's recurrent layers make of their parameters again when these are others than in the call before."""
Place = tuple[int, Any]
"""A dictionary (by id) and a name in it."""
_OF_EVERY_MODULE = vars(nn.Module()).keys()
_SAMPLES = object()
"""In the place of values that depend on the samples."""


class Left:
    """What forward passes have changed in a module and its parts since this was made."""

    def __init__(self, module: nn.Module):
        parts = list(module.modules())
        own = [(part, one) for part in parts for name, one in vars(part).items() if name not in _OF_EVERY_MODULE]
        tables = [(part, one) for part, one in own if type(one) is dict]
        held = [(part, one) for part in parts for one in part.buffers(False)]
        held += [(part, one) for part, one in own if type(one) is not dict]
        held += [(part, one) for part, table in tables for one in table.values()]
        parameters = {id(one) for one in module.parameters()}
        self._buffers = [(part, part._buffers, dict(part._buffers)) for part in parts]
        self._contents = [(part, FirstValue.of(one, parameters)) for part, one in held]
        self._named: list[tuple[nn.Module, dict[Any, Any], dict[Any, Any]]] = [
            *((part, vars(part), dict(vars(part))) for part in parts),
            *((part, table, dict(table)) for part, table in tables),
        ]
        self._slots = [(part, FirstValue.of(slots_of(part), parameters)) for part in parts]
        self._notes: set[Place] = set()
        self._classes = ClassValues(parts)

    def notes(self, tracer: object) -> dict[Place, Any]:
        """What attributes and entries of dictionaries now hold instead of what they held at first.

        Whether parts are in training mode is none: the layers read it.
        """
        return {
            (id(now), name): _written(now.get(name), tracer)
            for part, now, before in self._named
            for name in _changed(part, now, before)
            if not (now is vars(part) and name == "training")
        }

    def allow(self, notes: Iterable[Place]) -> None:
        """Take these for no change: every pass leaves the same there, and reads nothing else."""
        self._notes.update(notes)

    def undo(self) -> str:
        """Put everything back; the class of a part that had changed, "" where none had."""
        changed = []
        for part, first in self._contents:
            if first.changed(first.value):
                changed.append(part)
                first.put_back()
        for part, now, before in self._buffers:
            if any(now.get(name) is not one for name, one in before.items()):
                changed.append(part)
            now.clear()
            now.update(before)
        for part, now, before in self._named:
            if any((id(now), name) not in self._notes for name in _changed(part, now, before)):
                changed.append(part)
            now.clear()
            now.update(before)
        for part, first in self._slots:
            if first.changed(now := slots_of(part)):
                changed.append(part)
                for name in now:
                    remove_attribute(part, name)
                for name, one in first.put_back().items():
                    set_attribute(part, name, one)
        of_classes = self._classes.changed()
        for place in of_classes:
            put_back_in_class(*place)
        names = [*(type(part).__name__ for part in changed), *(kind.__name__ for kind, _, _ in of_classes)]
        return names[0] if names else ""


def _changed(part: nn.Module, now: dict[Any, Any], before: dict[Any, Any]) -> list[Any]:
    """Names that stand for other objects than before, but for those that torch itself makes new in every pass."""
    made = {hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, WeightNorm)}
    made |= FLAT_WEIGHTS if isinstance(part, nn.RNNBase) else set()
    return [
        name
        for name in now.keys() | before.keys()
        if name not in made
        and (name not in now or name not in before or now[name] is not before[name])
        and not (name not in before and str(name).startswith("_tensor_constant"))  # where torch.fx puts tensors
    ]


def _written(value: Any, tracer: object) -> Any:
    """What a place holds, to be compared with `alike` after another pass."""
    if isinstance(value, tuple | list):
        return [_written(one, tracer) for one in value]
    if isinstance(value, ValueProxy):
        return _SAMPLES if value.tracer is tracer else object()
    return value.clone() if isinstance(value, Tensor) else value


def alike(one: Any, other: Any) -> bool:
    """Whether two objects are one, or tensors, numbers or words of the same value, or hold such ones."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, slice):
        return alike((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(alike, one, other))
    return isinstance(one, int | float | complex | str | torch.dtype | torch.device) and bool(one == other)


@contextmanager
def undone(module: nn.Module) -> Iterator[Left]:
    """Within: attributes may be set on the module and its parts, buffers changed; afterwards they are as before."""
    left, changed = Left(module), ""
    try:
        yield left
    finally:
        changed = left.undo()
    if changed:
        raise NotStackable(f"{changed} keeps something from one call to the next")
