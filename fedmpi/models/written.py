"""Whether operations write to some memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: it is seen whether an operation changes numbers of a vector in place, whoever holds a view of them.

    Parameters
    ----------
    vector : Tensor (d,)

    Attributes
    ----------
    found : bool
    """

    def __init__(self, vector: Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        self._first = vector.data_ptr()
        self._end = self._first + vector.numel() * vector.element_size()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.is_write:
                    given = args[place] if place < len(args) else kwargs.get(argument.name)
                    self._look(given)
        return func(*args, **kwargs)

    def _look(self, given: Any) -> None:
        if isinstance(given, Tensor):
            self.found |= self._first <= given.data_ptr() < self._end
        elif isinstance(given, list | tuple):
            for one in given:
                self._look(one)
