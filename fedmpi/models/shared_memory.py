"""Values whose numbers are also those of another value of the model: no vector can hold both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.models.first_values import AROUND_CONTAINERS, MOST_ENTRIES, SEQUENCES
from fedmpi.models.object_attributes import attributes_of, of_a_users_class
from fedmpi.models.written import span, tensors_in


def check_memory(module: nn.Module) -> None:
    """Refuse a module of which a trained parameter shares numbers with another parameter, a buffer or an attribute.

    Steps would change both, until each of them is copied. One tensor under several names is no sharing.
    """
    values = {id(one): (name, one) for name, one in values_of(module, objects=False) if one.numel()}
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


class SharedBuffers:
    """Buffers that travel and share numbers with other values, which may be as long as nobody writes to them."""

    def __init__(self, module: nn.Module, travelling: Sequence[Tensor]):
        self._module, own = module, {id(one) for one in travelling}
        values = [(name, one) for name, one in values_of(module) if one.numel()] if travelling else []
        storages = Counter(one.untyped_storage().data_ptr() for one in {id(one): one for _, one in values}.values())
        several = [(name, one) for name, one in values if storages[one.untyped_storage().data_ptr()] > 1]
        self._pairs = [
            (name, other)
            for name, one in several
            for other, value in several
            if id(one) in own and value is not one and _overlap(one, value)
        ]

    def places(self) -> list[tuple[str, tuple[int, int]]]:
        """Names of the module's values and the bytes where they lie now; none where no buffer shares numbers."""
        return [(name, span(one)) for name, one in values_of(self._module) if one.numel()] if self._pairs else []

    def check_unwritten(
        self, places: Sequence[tuple[str, tuple[int, int]]], spans: Set[tuple[int, int]], changed: Sequence[Tensor]
    ) -> None:
        """Refuse that passes have written to one of them, or to what shares numbers with it."""
        spans = spans | {span(one) for one in changed}
        written = {name for name, (begin, end) in places if any(first < end and begin < last for first, last in spans)}
        for name, other in self._pairs:
            if name in written or other in written:
                raise UserError(
                    f"the model's buffer {name} lies in the memory of {other}, and its forward pass writes there: one "
                    f"would not follow the other, since {name} travels; register one of them, and make the other of "
                    "it in the forward pass (self.both[0])"
                )


def values_of(module: nn.Module, objects: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and tensors among attributes, with their names; not those that torch makes anew in each pass
    (`nn.utils.spectral_norm`).
    """
    for named in (module.named_parameters(), module.named_buffers()):
        yield from ((name, one) for name, one in named for _ in tensors_in(one))
    for prefix, part in module.named_modules():
        made = {getattr(hook, "name", "") for hook in part._forward_pre_hooks.values()}
        for name, value in vars(part).items():
            if not name.startswith("_") and name not in made:
                yield from (
                    (f"{prefix}.{name}".lstrip("."), one) for one in tensors_within(value, 1 + objects, objects)
                )


def tensors_within(value: Any, depth: int = 2, objects: bool = True) -> Iterator[Tensor]:
    """The tensors among a value's entries or attributes, and so many levels below."""
    entries: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield from tensors_in(value)
    elif isinstance(value, (*SEQUENCES, dict)) and len(value) <= MOST_ENTRIES:
        entries = value.values() if isinstance(value, dict) else value
    elif objects and (isinstance(value, AROUND_CONTAINERS) or of_a_users_class(value)):
        entries = attributes_of(value).values()
    for one in entries if depth else ():
        yield from tensors_within(one, depth - 1, objects)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have numbers in one place."""
    (first, last), (other_first, other_last) = span(one), span(other)
    if last <= other_first or other_last <= first:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    return bool(np.isin(_places(one), _places(other)).any())


def _places(tensor: Tensor) -> Ints:
    """The bytes at which its numbers begin."""
    places = np.array(tensor.data_ptr())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, np.arange(size) * step * tensor.element_size())
    return places.reshape(-1)
