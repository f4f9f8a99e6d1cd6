"""Parameters of many clients in a graph of stacked layers: values that autograd sees, updates that need no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedmpi.models.stacked.base import Parameters, Slot, Step


class Weight:
    """One parameter of the k bound clients.

    A weight that one layer alone reads is updated in the backward pass of that layer, where its gradient is a matrix
    product that need not be formed; others get their gradients from autograd.
    """

    __slots__ = ("alone", "axes", "done", "owner", "step", "target", "value")

    def __init__(self, value: Tensor, target: Tensor, step: Step, alone: bool, axes: tuple[int, ...] | None = None):
        self.value, self.target, self.step, self.alone, self.axes = value, target, step, alone, axes
        self.done = False
        self.owner = self

    @classmethod
    def of(cls, slot: Slot, parameters: Parameters, alone: bool) -> Weight:
        """The parameter that lies in the slot, in the order of the stack."""
        value, target = parameters.value(slot, *slot.arranged), parameters.target(slot, *slot.arranged)
        return cls(value.data.requires_grad_(), target, parameters.step, alone, slot.axes)

    @classmethod
    def constant(cls, value: Tensor, clients: int) -> Weight:
        """A parameter that is not trained, the same for all clients."""
        return cls(value.detach().expand(clients, *value.shape), value, Step(1, 0), False)

    def seen_as(self, see: Callable[[Tensor], Tensor]) -> Weight:
        """The same parameter with its axes in another order, or joined; `see` makes such a view of a tensor."""
        seen = Weight(see(self.value), see(self.target), self.step, self.alone)
        seen.owner = self.owner
        return seen

    @property
    def natural(self) -> Weight:
        """The same with the axes in the parameter's own order."""
        if self.axes is None:
            return self
        back = [0, *(1 + self.axes.index(axis) for axis in range(len(self.axes)))]
        return self.seen_as(lambda tensor: tensor.permute(back))

    @property
    def trained(self) -> bool:
        """Whether it has a gradient."""
        return self.value.requires_grad

    def product(self, left: Tensor, right: Tensor) -> Tensor | None:
        """For a gradient left @ right, (k, m, n): returns it for autograd, or None after updating the target."""
        if not self.trained:
            return None
        if not self.alone:
            return torch.bmm(left, right)
        self.step.product(self.target, left, right)
        self.owner.done = True
        return None

    def plain(self, gradient: Tensor) -> Tensor | None:
        """For a gradient that is given: returns it for autograd, or None after updating the target."""
        if not self.trained:
            return None
        gradient = gradient.view(self.value.shape)
        if not self.alone:
            return gradient
        self.step.plain(self.target, gradient)
        self.owner.done = True
        return None


def finish(weights: Sequence[Weight], gradients: Sequence[Tensor | None]) -> None:
    """Update the weights that no layer has updated in its backward pass, with the gradients that autograd gave."""
    targets, given = [], []
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            targets.append(weight.target)
            given.append(gradient)
        elif not weight.done and weight.step.keep != 1:
            weight.target.mul_(weight.step.keep)
        weight.done = False
    if not targets:
        return
    step = weights[0].step
    if step.keep == 1:
        torch._foreach_add_(targets, given, alpha=step.rate)
        return
    for target, gradient in zip(targets, given, strict=True):
        step.plain(target, gradient)
