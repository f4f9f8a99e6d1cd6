"""What a module keeps from call to call beside its parameters, and how it is put back: buffers and attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.models.first_values import ClassValues, FirstValue, put_back_in_class
from fedmpi.models.object_attributes import attributes_of, remove_attribute, set_attribute
from fedmpi.models.shared_memory import tensors_within

TORCHS_OWN = {name for name in vars(nn.Module()) if name.startswith("_")}
"""Attributes of every module that hold its parts, buffers and hooks."""


class KeptState:
    """Buffers, frozen parameters and attributes of a module and its parts, attributes of a loss, and those of the
    classes of both, as they are first.

    Which attributes, frozen parameters and float buffers forward passes change is found out by trial passes
    (`watched`); integer buffers, and tensors put in the places of buffers, are put back in any case.
    """

    def __init__(self, module: nn.Module, travelling: Sequence[Tensor], beside: Sequence[Any] = ()):
        self.module, self._beside = module, beside
        self._places: list[tuple[Any, str, Tensor | None]] = [
            (part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()
        ]
        own = self._own = {id(value) for value in travelling}
        self._travelling = [(held, name, one) for held, name, one in self._places if one is not None and id(one) in own]
        self._staying = [*module.parameters(), *(one for one in module.buffers() if one.is_floating_point())]
        self._counts = [FirstValue.of(one) for one in module.buffers() if not one.is_floating_point()]
        self._changed: list[FirstValue] = []
        self._written: Set[int] = frozenset()
        self._attributes: list[tuple[Any, str, FirstValue]] = []
        self._created: list[tuple[Any, str]] = []
        self._created_buffers: list[tuple[Any, str]] = []
        self._replaced = False
        self._of_classes: list[tuple[type, str, FirstValue | None]] = []

    @property
    def changes(self) -> bool:
        """Whether trial passes were seen to change what is put back but integer buffers."""
        created = self._created or self._created_buffers
        return bool(self._attributes or created or self._changed or self._replaced or self._of_classes)

    def restart(self) -> None:
        """Put everything back, other than the values of travelling parameters and buffers."""
        for buffers, name, buffer in self._places:
            if not _holds(buffers, name, buffer):
                buffers[name] = buffer
        for part, name, first in self._attributes:
            set_attribute(part, name, first.put_back())
        for part, name in self._created:
            remove_attribute(part, name)
        for buffers, name in self._created_buffers:
            buffers.pop(name, None)
        for place in self._of_classes:
            put_back_in_class(*place)
        for first in (*self._counts, *self._changed):
            first.put_back()

    def note_written(self, memory: Set[int]) -> None:
        """Within `watched`: operations were seen to write to these storages (by address), be it the numbers there."""
        self._written = memory

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around trial passes: what they change is put back at the end, and by every `restart` from then on."""
        there = {id(one) for one in self.module.parameters()}
        parts = [part for part in self.module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        before = [(part, self._attributes_of(part, TORCHS_OWN)) for part in parts]
        before += [(one, self._attributes_of(one)) for one in self._beside]
        buffered = [(part._buffers, set(part._buffers)) for part in parts]
        classes = ClassValues((*parts, *self._beside))
        staying = [FirstValue.of(one, self._own) for one in self._staying]
        try:
            yield
        finally:
            for part, attributes in before:
                now = attributes_of(part)
                for name, first in attributes.items():
                    if name not in now or first.changed(now[name]) or first.lies_in(self._written):
                        self._attributes.append((part, name, first))
                self._created += [(part, name) for name in now if name not in attributes and name not in TORCHS_OWN]
            self._created_buffers += [(now, name) for now, first in buffered for name in now if name not in first]
            self._of_classes += classes.changed()
            self._replaced = not all(_holds(*place) for place in self._places)
            self._changed += [one for one in staying if one.changed(one.value) or one.lies_in(self._written)]
            self.restart()
        made = [name for name, one in self.module.named_parameters() if id(one) not in there]
        if made:
            raise UserError(
                f"the model's forward pass makes parameters ({made[0]}), which nobody would train: make them when the "
                "model is built"
            )

    def _attributes_of(self, part: Any, but: Set[str] = frozenset()) -> dict[str, FirstValue]:
        return {name: FirstValue.of(one, self._own) for name, one in attributes_of(part).items() if name not in but}

    def take_replaced(self) -> None:
        """Copy tensors that the forward pass put in the places of travelling buffers into these, and put these back."""
        replaced = []
        for buffers, name, buffer in self._travelling:
            if _holds(buffers, name, buffer):
                continue
            new = buffers[name] if name in buffers else None  # noqa: SIM401 (TorchScript's have no get)
            if new is None or new.shape != buffer.shape:
                raise UserError(
                    f"the model's forward pass puts something of another shape in the place of its buffer {name}, "
                    f"which travels: its shape must stay {tuple(buffer.shape)}, or register it with persistent=False"
                )
            one_of_them = any(new is one for _, _, one in self._travelling)
            replaced.append((buffers, name, buffer, new.detach().clone() if one_of_them else new.detach()))
        if replaced:
            self._check_former({id(buffer): name for _, name, buffer, _ in replaced})
        for buffers, name, buffer, new in replaced:
            buffer.data.copy_(new)
            buffers[name] = buffer

    def _check_former(self, replaced: dict[int, str]) -> None:
        places = [*((part, name) for part, name, _ in self._attributes), *self._created]
        for part, name in places:
            former = [replaced[id(one)] for one in tensors_within(attributes_of(part).get(name)) if id(one) in replaced]
            if former:
                raise UserError(
                    f"the model's forward pass keeps its former buffer {former[0]} in {name} (self.last = "
                    f"self.{former[0]}) and puts another in its place, whose values both would have, since the buffer "
                    "travels: keep a copy (….clone())"
                )


def _holds(buffers: Any, name: str, buffer: Tensor | None) -> bool:
    return name in buffers and buffers[name] is buffer
