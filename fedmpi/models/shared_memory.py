"""Parameters whose numbers are also those of another value of the model: no vector can hold both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.models.first_values import AROUND_CONTAINERS, MOST_ENTRIES, SEQUENCES
from fedmpi.models.object_attributes import attributes_of, of_a_users_class
from fedmpi.models.written import tensors_in


def check_memory(module: nn.Module) -> None:
    """Refuse a module of which a trained parameter shares numbers with another parameter, a buffer or an attribute.

    Steps would change both, until each of them is copied. One tensor under several names is no sharing.

    Raises
    ------
    UserError
        Naming both.
    """
    values = {id(one): (name, one) for name, one in values_of(module) if one.numel()}
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad and id(one) in values]
    storages = {one.untyped_storage().data_ptr() for _, one in trained}
    beside = [(name, one) for name, one in values.values() if one.untyped_storage().data_ptr() in storages]
    if len(beside) <= len(storages):
        return
    for name, parameter in trained:
        for other, value in beside:
            if value is not parameter and _overlap(parameter, value):
                raise UserError(
                    f"the model's parameter {name} lies in the memory of {other}, which would not follow it in "
                    "training: clone it (….detach().clone()), let both be one parameter (self.a = self.b), or compute "
                    "it in the forward pass"
                )


def values_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and tensors among attributes, with their names; not those that torch makes anew in each pass
    (`nn.utils.spectral_norm`)."""
    for found in (module.named_parameters(), module.named_buffers()):
        yield from ((name, one) for name, one in found for _ in tensors_in(one))
    for prefix, part in module.named_modules():
        made = {getattr(hook, "name", "") for hook in part._forward_pre_hooks.values()}
        for name, value in vars(part).items():
            if not name.startswith("_") and name not in made:
                yield from ((f"{prefix}.{name}".lstrip("."), one) for one in _within(value))


def _within(value: Any, depth: int = 2) -> Iterator[Tensor]:
    """The tensors among a value's entries or attributes, and among those of these."""
    if isinstance(value, Tensor):
        yield from tensors_in(value)
    elif depth and isinstance(value, (*SEQUENCES, dict)) and len(value) <= MOST_ENTRIES:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _within(one, depth - 1)
    elif depth and (isinstance(value, AROUND_CONTAINERS) or of_a_users_class(value)):
        for one in attributes_of(value).values():
            yield from _within(one, depth - 1)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have numbers in one place."""
    (first, last), (other_first, other_last) = span(one), span(other)
    if last <= other_first or other_last <= first:
        return False
    return bool(np.isin(_places(one), _places(other)).any())


def span(tensor: Tensor) -> tuple[int, int]:
    """The first byte, and the one behind the last."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + reach) * tensor.element_size()


def _places(tensor: Tensor) -> Ints:
    """The bytes at which its numbers begin."""
    places = np.array(tensor.data_ptr())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, np.arange(size) * step * tensor.element_size())
    return places.reshape(-1)
