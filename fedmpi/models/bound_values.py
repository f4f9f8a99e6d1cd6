"""Where a module's values lie: views of one vector, also after a forward pass has given them other memory, or in memory
of their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.models.first_values import lies_elsewhere
from fedmpi.models.shared_memory import values_of
from fedmpi.models.written import span


class BoundValues:
    """The views that parameters and buffers are, and are again where somebody sets their `data`."""

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor], buffers: Sequence[Tensor]):
        self.module = module
        self._tensors, self._parameters = [*parameters, *buffers], len(parameters)
        self._views: list[tuple[Tensor, Tensor]] = []
        self._loose = False

    def give(self, views: Sequence[Tensor]) -> None:
        """Make the values these views, parameters first."""
        self._views, self._loose = list(zip(self._tensors, views, strict=True)), False
        for tensor, view in self._views:
            tensor.data = view

    def give_again(self, parameters: bool) -> None:
        """Have all be the views that they were given; `parameters` as for `displaced`."""
        if self._loose:
            self.give([view for _, view in self._views])
        else:
            self.put_back(parameters)

    def loosen(self) -> None:
        """Have parameters lie in memory of their own until they are given views: whoever keeps that of one parameter
        (`old = p.data`) or lays some together keeps nothing of the vector, to which `take_over` copies them."""
        for tensor, view in self._views[: self._parameters]:
            tensor.data = view.clone()
        self._loose = True

    def displaced(self, parameters: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Values that have other memory now (`self.fc.weight.data = …`), with the views that they were."""
        views = self._views if parameters and not self._loose else self._views[self._parameters :]
        return [(tensor, view) for tensor, view in views if lies_elsewhere(tensor, view)]

    def put_back(self, parameters: bool) -> None:
        """Have them be the views again, with the values that these hold; `parameters` as for `displaced`."""
        for tensor, view in self.displaced(parameters):
            tensor.data = view

    def take_over(self, parameters: bool, by: str = "the model's forward pass") -> None:
        """Have them be the views again, with the values that they have now, or the views hold those of loose ones."""
        if parameters and self._loose:
            for tensor, view in self._views[: self._parameters]:
                self._check_shape(tensor, view, by)
                view.copy_(tensor.detach())
        displaced, now = self.displaced(parameters), []
        for tensor, view in displaced:
            self._check_shape(tensor, view, by)
            within = tensor.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
            if within and tensor.requires_grad and tensor.data_ptr() != view.data_ptr():
                raise UserError(
                    f"{by} gives {self._name_of(tensor)} the memory of another value that travels (a.data = b.data), "
                    "and steps would change both: let both be one parameter (self.a = self.b), or write b.data.clone()"
                )
            now.append(tensor.detach().clone() if within else tensor.detach())
        self._check_left(displaced, by)
        for (tensor, view), value in zip(displaced, now, strict=True):
            view.copy_(value)
            tensor.data = view

    def _check_left(self, displaced: Sequence[tuple[Tensor, Tensor]], by: str) -> None:
        """Refuse that what does not travel lies in memory that values have left: it is written over."""
        left = [(*span(view), tensor) for tensor, view in displaced if view.numel()]
        own = {id(tensor) for tensor in self._tensors}
        for name, one in values_of(self.module) if left else ():
            if id(one) in own:
                continue
            former = next((tensor for first, last, tensor in left if first <= one.data_ptr() < last), None)
            if former is not None:
                raise UserError(
                    f"{by} leaves {name} the memory of {self._name_of(former)} (old = a.data; a.data = …, or a.data, "
                    "b.data = b.data, a.data), which stays where it is in the vector that travels: keep or exchange "
                    "copies (….data.clone())"
                )

    def kept_from_before(self) -> str:
        """The name of a parameter that lies where it lay in a vector bound before; "" where none does."""
        for tensor, view in self.displaced():
            alone = tensor.untyped_storage().nbytes() == tensor.nbytes
            if not alone and tensor.storage_offset() == view.storage_offset():
                return self._name_of(tensor)
        return ""

    def _check_shape(self, tensor: Tensor, view: Tensor, by: str) -> None:
        if tensor.shape != view.shape:
            raise UserError(
                f"{by} gives {self._name_of(tensor)}, which travels, another shape, "
                f"{tuple(tensor.shape)}: its shape must stay {tuple(view.shape)}"
            )

    def _name_of(self, tensor: Tensor) -> str:
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return next(name for name, one in named if one is tensor)
