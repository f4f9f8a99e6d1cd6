"""Operations watched: whether they write to some memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Those with memory of their own among what an operation is given, in its lists too: sparse ones have none."""
    if isinstance(given, list | tuple):
        for one in given:
            yield from tensors_in(one)
    elif isinstance(given, Tensor) and given.layout is torch.strided:
        yield given


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation changes in place."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))


def span(tensor: Tensor) -> tuple[int, int]:
    """The first byte, and the one behind the last; of a tensor without numbers nothing between."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + reach) * tensor.element_size()


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: `__torch_dispatch__` is called for every operation, as it stands.

    Torch would load its compiler to keep it from that method, which costs every start more than a second.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Written(Watching):
    """Within: it is seen whether an operation changes numbers of a vector in place, whoever holds a view of them."""

    def __init__(self, vector: Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.memory, self.spans = False, set[int](), set[tuple[int, int]]()
        self._first = vector.data_ptr()
        self._end = self._first + vector.numel() * vector.element_size()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for one in written_by(func, args, kwargs):
            self.found |= self._first <= one.data_ptr() < self._end
            self.memory.add(one.untyped_storage().data_ptr())
            self.spans.add(span(one))
        return func(*args, **kwargs)
