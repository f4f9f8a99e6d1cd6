"""What a followed forward pass does with parameters that are no attributes when it reads them: the graph misses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.lines import line
from fedmpi.models.written import tensors_in, written_by

_OF_KIND = "new_", "empty", "zeros", "ones", "full", "rand", "detach", "alias", "lift"
"""How names of operations begin that read no values."""


class Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: operations on a module's parameters raise, other than those that are noted in the graph.

    Attributes
    ----------
    noting : bool
        Whether an operation of the graph is being computed, of which its writer knows what it does.
    """

    def __init__(self, module: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]
        self.noting = False
        self._parameters = [(one, one.data) for one in module.parameters() if one.layout is torch.strided]
        self._memory = {one.untyped_storage().data_ptr() for one, _ in self._parameters if one.numel()}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        replaced = [(one, data) for one, data in self._parameters if one.data_ptr() != data.data_ptr()]
        for one, data in replaced:
            one.data = data
        if replaced and error[0] is None:
            raise NotStackable("the forward pass replaces the values of parameters")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.noting:
            name = func._schema.name.split("::")[1]
            if any(map(self._held, written_by(func, args, kwargs))):
                raise NotStackable(f"{line()}: {name} changes parameters")
            if not name.startswith(_OF_KIND) and any(map(self._held, tensors_in((*args, *kwargs.values())))):
                raise NotStackable(f"{line()}: {name} reads parameters that are not called by their names")
        return func(*args, **kwargs)

    def _held(self, given: Tensor) -> bool:
        """Whether a tensor lies in the memory of a parameter."""
        return given.numel() > 0 and given.untyped_storage().data_ptr() in self._memory
