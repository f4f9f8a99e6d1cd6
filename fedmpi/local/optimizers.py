"""Local optimizers on a flat vector, in place: SGD and Adam (Kingma & Ba 2015), with FedProx's proximal term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel, add_gradients


class LocalOptimizer(Protocol):
    """Takes one step after the other on the vector it was made for."""

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Change the vector in place; one gradient a parameter."""


@dataclass
class AdamState:
    """Adam's memory over the t trainable values: moments and the number of steps taken.

    Attributes
    ----------
    first, second : Tensor (t,)
        Running means of the gradient and of its square.
    steps : int
    """

    first: Tensor
    second: Tensor
    steps: int = 0

    @classmethod
    def fresh(cls, model: FlatModel) -> AdamState:
        """A state before the first step."""
        zeros = torch.zeros(model.trainable, dtype=model.dtype, device=model.device)
        return cls(zeros, zeros.clone())

    def reset(self) -> None:
        """Forget everything."""
        self.first.zero_()
        self.second.zero_()
        self.steps = 0


class SGD:
    """w ← w − η (∇ℓ(w) + μ (w − w_start)).

    Parameters
    ----------
    values : Tensor (t,)
        The trainable part of the working vector; changed in place.
    views : list of Tensor
        The same memory in the shape of the parameters.
    rule : LocalRule
        lr and proximal_mu.
    start : Tensor (t,) or None
        w_start; needed when μ > 0.
    correction : Tensor (t,) or None
        Added to every gradient.
    """

    def __init__(
        self,
        values: Tensor,
        views: list[Tensor],
        rule: LocalRule,
        start: Tensor | None,
        correction: Tensor | None = None,
    ):
        self.values, self.views = values, views
        self.lr, self.pull = rule.lr, rule.lr * rule.proximal_mu
        self.start, self.correction = start, correction

    def step(self, gradients: Sequence[Tensor]) -> None:
        if self.start is not None:
            self.values.lerp_(self.start, self.pull)
        if self.correction is not None:
            self.values.add_(self.correction, alpha=-self.lr)
        add_gradients(self.views, gradients, -self.lr)


class Adam:
    """Bias-corrected Adam; the proximal term is part of the gradient.

    Parameters
    ----------
    values, rule, start, correction
        As for `SGD`.
    state : AdamState
        Changed in place.
    gradient, scratch : Tensor (t,)
        Working memory.
    gradient_views : list of Tensor
        `gradient` in the shape of the parameters.
    """

    def __init__(
        self,
        values: Tensor,
        rule: LocalRule,
        start: Tensor | None,
        state: AdamState,
        gradient: Tensor,
        gradient_views: list[Tensor],
        scratch: Tensor,
        correction: Tensor | None = None,
    ):
        self.values, self.rule, self.start, self.state = values, rule, start, state
        self.gradient, self.gradient_views, self.scratch = gradient, gradient_views, scratch
        self.correction = correction

    def step(self, gradients: Sequence[Tensor]) -> None:
        rule, state, gradient, scratch = self.rule, self.state, self.gradient, self.scratch
        torch._foreach_copy_(self.gradient_views, list(gradients))
        if self.start is not None:
            torch.sub(self.values, self.start, out=scratch)
            gradient.add_(scratch, alpha=rule.proximal_mu)
        if self.correction is not None:
            gradient.add_(self.correction)
        state.steps += 1
        state.first.lerp_(gradient, 1 - rule.beta1)
        state.second.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
        torch.sqrt(state.second, out=scratch)
        scratch.div_((1 - rule.beta2**state.steps) ** 0.5).add_(rule.epsilon)
        self.values.addcdiv_(state.first, scratch, value=-rule.lr / (1 - rule.beta1**state.steps))
