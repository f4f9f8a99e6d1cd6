"""What a followed forward pass does with parameters and buffers that are no attributes when it reads them: the graph
misses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.models.first_values import lies_elsewhere
from fedmpi.models.flat import travelling_buffers
from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.lines import line
from fedmpi.models.written import Watching, span, tensors_in, written_by

_OF_KIND = "new_", "empty", "zeros", "ones", "full", "rand", "detach", "alias", "lift"
"""How names of operations begin that read no values."""


class Untouched(Watching):
    """Within: operations on a module's parameters and travelling buffers raise, other than those that the graph notes;
    what these change of parameters is put back at the end.
    """

    def __init__(self, module: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]
        self.noting = False
        self._parameters = [(one, one.data) for one in module.parameters() if one.layout is torch.strided]
        self._travelling = _memory_of([one for one, _ in self._parameters if one.requires_grad])
        self._travelling |= _memory_of(travelling_buffers(module))
        self._memory = self._travelling | _memory_of([one for one, _ in self._parameters])
        self._spans = [span(data) for _, data in self._parameters if data.numel()]
        self._first: list[tuple[Tensor, Tensor]] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for written, values in reversed(self._first):
            written.data.copy_(values)
        self._first.clear()
        replaced = [(one, data) for one, data in self._parameters if lies_elsewhere(one, data)]
        for one, data in replaced:
            one.data = data
        if replaced and error[0] is None:
            raise NotStackable("the forward pass replaces the values of parameters")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = list(written_by(func, args, kwargs))
        if self.noting:
            self._first += [(one, one.detach().clone()) for one in written if self._is_of_parameters(one)]
        else:
            name = func._schema.name.split("::")[1]
            if _memory_of(written) & self._memory:
                raise NotStackable(f"{line()}: {name} changes parameters or buffers")
            if not name.startswith(_OF_KIND) and _memory_of((*args, *kwargs.values())) & self._memory:
                raise NotStackable(f"{line()}: {name} reads parameters or buffers that are not called by their names")
        return func(*args, **kwargs)

    def _is_of_parameters(self, written: Tensor) -> bool:
        """Whether a tensor lies where parameters do; buffers may lie behind these in the same memory."""
        if not written.numel():
            return False
        first, last = span(written)
        return any(first < end and begin < last for begin, end in self._spans)

    def check_read(self, given: Tensor) -> None:
        """Refuse a tensor that an operation of the graph is to read, where it lies in what travels."""
        if _memory_of(given) & self._travelling:
            raise NotStackable(f"{line()}: parameters or buffers are read that are not called by their names")


def _memory_of(given: Any) -> set[int]:
    """Where a tensor lies, or those of a list; the memory of two is one where they are views of one."""
    return {one.untyped_storage().data_ptr() for one in tensors_in(given) if one.numel()}
