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


class Joining(SignDescent):
    """Lays all parameters into one vector, and steps on that."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.join()

    def join(self):
        self.vector = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        parts = self.vector.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.data = part.view_as(parameter)

    def step(self):
        self.vector.sub_(torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters]), alpha=self.lr)


class JoiningLater(Joining):
    """The same, in its first step."""

    def __init__(self, parameters, lr):
        SignDescent.__init__(self, parameters, lr)
        self.vector = None

    def step(self):
        if self.vector is None:
            self.join()
        super().step()


class Exchanging(SignDescent):
    """Descent of two models in turns; the other one waits in memory of the optimizer."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.waiting = [parameter.detach().clone() for parameter in parameters]

    def step(self):
        for place, parameter in enumerate(self.parameters):
            parameter.data.sub_(parameter.grad, alpha=self.lr)
            parameter.data, self.waiting[place] = self.waiting[place], parameter.data


class Copying(Exchanging):
    """The same, by copies."""

    def step(self):
        for parameter, waiting in zip(self.parameters, self.waiting, strict=True):
            now = parameter.detach() - self.lr * parameter.grad
            parameter.data.copy_(waiting)
            waiting.copy_(now)


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
