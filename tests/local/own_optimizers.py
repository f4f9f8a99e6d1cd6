"""Local optimizers as users write them."""

from __future__ import annotations

import torch


def momentum(parameters, lr, *, decay: float = 0.0):
    """SGD with heavy-ball momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=decay)


def by_keyword(parameters, *, lr: float, decay: float = 0.0):
    """The same, its rate by keyword only."""
    return torch.optim.SGD(parameters, lr=lr, momentum=decay)


def with_a_rate(parameters, *, lr: float = 123.0):
    """A default that is never used."""
    return torch.optim.SGD(parameters, lr=lr)


class SignDescent:
    """Steps of a fixed length in every coordinate."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = parameters, lr

    def step(self):
        for parameter in self.parameters:
            parameter.data.sub_(parameter.grad.sign(), alpha=self.lr)


class Replacing(SignDescent):
    """Descent whose steps give parameters other tensors, as those of many a paper's code do."""

    def step(self):
        for parameter in self.parameters:
            parameter.data = parameter.data - self.lr * parameter.grad


class Forgetting(SignDescent):
    """Optimizer whose steps give parameters another shape."""

    def step(self):
        for parameter in self.parameters:
            parameter.data = parameter.data.new_zeros(3)


def nothing(parameters, lr):
    """Forgets to return an optimizer."""


def failing(parameters, lr):
    """Optimizer whose step fails."""

    class Failing:
        def step(self):
            raise ZeroDivisionError("no such number")

    return Failing()


def decaying(parameters, lr):
    """Steps that also shrink what they are given a gradient of."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5, weight_decay=0.5)
