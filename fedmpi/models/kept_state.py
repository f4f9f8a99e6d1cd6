"""What a module keeps from call to call beside its parameters, and how it is put back: buffers and attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError

KINDS = int, float, complex, str, type(None), Tensor
"""Of attributes that begin anew; those that forward passes create do so whatever they are."""


class KeptState:
    """Buffers and attributes of a module and its parts, as they are first.

    Which attributes and float buffers forward passes change is found out by trial passes (`watched`); integer buffers,
    and tensors put in the places of buffers, are put back in any case.

    Parameters
    ----------
    module : nn.Module
    travelling : sequence of Tensor
        Buffers whose values are not put back, being part of the model that travels.
    """

    def __init__(self, module: nn.Module, travelling: Sequence[Tensor]):
        self.module = module
        self._places: list[tuple[Any, str, Tensor | None]] = [
            (part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()
        ]
        own = self._own = {id(buffer) for buffer in travelling}
        self._travelling = [(held, name, one) for held, name, one in self._places if one is not None and id(one) in own]
        self._staying = [one for one in module.buffers() if id(one) not in own and one.is_floating_point()]
        self._values = [(one, one.clone()) for one in module.buffers() if not one.is_floating_point()]
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._created: list[tuple[dict[str, Any], str]] = []

    def restart(self) -> None:
        """Put everything back, other than the values of travelling buffers."""
        for buffers, name, buffer in self._places:
            if name not in buffers or buffers[name] is not buffer:
                buffers[name] = buffer
        for part, name, value in self._attributes:
            part._modules.pop(name, None)  # None may have become a layer
            part._parameters.pop(name, None)
            vars(part)[name] = value
        for held, name in self._created:
            held.pop(name, None)
        for tensor, first in self._values:
            tensor.data.copy_(first)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around trial passes: what they change is put back at the end, and by every `restart` from then on.

        Raises
        ------
        UserError
            They make parameters, which nobody would train.
        """
        there = {id(one) for one in self.module.parameters()}
        parts = [part for part in self.module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        first = [(part, dict(vars(part)), set(part._buffers)) for part in parts]
        attributes = [one for _, own, _ in first for one in own.values() if isinstance(one, Tensor)]
        held = [one for one in attributes if id(one) not in self._own]  # a travelling buffer may have two names
        values = [(one, one.detach().clone()) for one in (*self._staying, *held) if _comparable(one)]
        yield
        made = [name for name, one in self.module.named_parameters() if id(one) not in there]
        if made:
            raise UserError(
                f"the model's forward pass makes parameters ({made[0]}), which nobody would train: make them when the "
                "model is built"
            )
        for part, own, buffers in first:
            now = vars(part)
            self._attributes += [
                (part, name, one) for name, one in own.items() if isinstance(one, KINDS) and _changed(now, name, one)
            ]
            self._created += [(now, name) for name in now if name not in own]
            self._created += [(part._buffers, name) for name in part._buffers if name not in buffers]
        self._values += [(one, value) for one, value in values if not torch.equal(one, value)]
        self.restart()

    def take_replaced(self) -> None:
        """Copy tensors that the forward pass put in the places of travelling buffers into these, and put these back.

        Raises
        ------
        UserError
            One has another shape.
        """
        for buffers, name, buffer in self._travelling:
            new = buffers[name]
            if new is buffer:
                continue
            if new is None or new.shape != buffer.shape:
                raise UserError(
                    f"the model's forward pass puts something of another shape in the place of its buffer {name}, "
                    f"which travels: its shape must stay {tuple(buffer.shape)}, or register it with persistent=False"
                )
            buffer.data.copy_(new.detach())
            buffers[name] = buffer


def _comparable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def _changed(now: dict[str, Any], name: str, first: Any) -> bool:
    """Whether an attribute is another object, of numbers and words another value."""
    if name not in now:
        return True
    one = now[name]
    if one is first:
        return False
    return isinstance(first, Tensor) or type(one) is not type(first) or bool(one != first)
