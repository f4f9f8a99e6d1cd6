"""In-place optimizers over a stack of clients: SGD fused into the layers' matrix products, Adam, the proximal term."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedmpi.local.algorithms import shrinking_sum
from fedmpi.local.batched.layers import Step
from fedmpi.local.optimizers import adam_step
from fedmpi.local.work import LocalRule

LEAST_PULL = 1e-15
"""ημ below which the proximal term is smaller than rounding errors."""


@dataclass(frozen=True)
class Block:
    """Values of several clients that are updated together."""

    values: Tensor  # `gradient` is unused by SGD
    gradient: Tensor
    start: Tensor  # the values that the server sent; broadcasts over `values`
    first: Tensor  # Adam's moments and working memory; unused by SGD
    second: Tensor
    scratch: Tensor
    correction: Tensor | None = None  # vector added to every gradient, as `StackOptimizer.prepare` writes it

    @classmethod
    def of(cls, values: Tensor, gradient: Tensor, start: Tensor, memory: int) -> Block:
        """Build a block, with fresh moments if `memory` needs them."""
        first, second, scratch = (torch.zeros_like(values) if memory else values for _ in range(3))
        return cls(values, gradient, start, first, second, scratch)

    def cut(self, count: int, first: int = 0) -> Block:
        """Return the first `count` rows, with the columns from `first` on."""
        given: dict[str, Tensor | None] = vars(self)
        return replace(self, **{name: one[:count, first:] for name, one in given.items() if one is not None})


class StackOptimizer:
    """Changes of the stack in a step besides the layers' own part: none. Layers write gradients over the values."""

    fused: ClassVar[bool] = True  # True if the layers change the values themselves; else they fill the gradients
    finishes = False  # True if `finish` has any effect without corrections
    step = Step(keep=0, rate=1)  # how the layers use a gradient

    def prepare(self, corrections: Tensor, start: Tensor, into: Tensor) -> None:
        """Write corrections into those of a block in the form that `finish` needs, before the first step."""

    def finish(self, block: Block, number: int) -> None:
        """Complete step `number` (from 1) after the layers' part."""


class StackSGD(StackOptimizer):
    """w ← (1 − ημ) w − η ∇ℓ(w) + ημ w_start − η c; the layers do two of these terms with their products.

    With corrections c the last two terms are one vector v, computed before the first step. For LEAST_PULL < ημ < 1/2
    the layers compute w − η/(1 − ημ) ∇ℓ(w). `finish` then computes (1 − ημ) w + v, or without corrections a linear
    interpolation towards w_start: one pass over the values instead of two. Otherwise the layers compute (1 − ημ) w − η
    ∇ℓ(w), and `finish` adds the rest.
    """

    def __init__(self, rule: LocalRule):
        self._pull = pull = rule.lr * rule.proximal_mu
        self.keep, self.rate = 1 - pull, -rule.lr
        self._towards, self.finishes = LEAST_PULL < pull < 0.5, pull > 0
        self.step = Step(keep=1, rate=-rule.lr / (1 - pull)) if self._towards else Step(keep=1 - pull, rate=-rule.lr)

    def prepare(self, corrections: Tensor, start: Tensor, into: Tensor) -> None:
        """Write v = ημ w_start − η c."""
        torch.mul(corrections, self.rate, out=into)
        if self._pull:
            into.add_(start, alpha=self._pull)

    def finish(self, block: Block, number: int) -> None:
        if block.correction is not None and self._towards:
            torch.add(block.correction, block.values, alpha=self.keep, out=block.values)
        elif block.correction is not None:
            block.values.add_(block.correction)
        elif self._towards:
            block.values.lerp_(block.start, self._pull)
        elif self._pull:
            block.values.add_(block.start, alpha=self._pull)

    def summed(self, steps: int) -> float:
        """Return Σ (1 − ημ)^j over so many steps j: the total effect of adding 1 in every step."""
        return shrinking_sum(steps, self._pull)


class StackAdam(StackOptimizer):
    """Steps of `adam_step` on the clients' gradients, clipped if the rule says so."""

    fused = False
    finishes = True

    def __init__(self, rule: LocalRule):
        self.rule = rule

    def prepare(self, corrections: Tensor, start: Tensor, into: Tensor) -> None:
        """Copy the corrections, which are added to the gradient itself."""
        if into is not corrections:
            into.copy_(corrections)

    def finish(self, block: Block, number: int) -> None:
        rule, gradient = self.rule.at(number), block.gradient
        if rule.clip_norm is not None:  # the rows are clients
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((rule.clip_norm / (norms + 1e-6)).clamp_(max=1.0))
        self.move(rule, block, number, block.start if rule.proximal_mu else None)

    def move(self, rule: LocalRule, block: Block, number: int, start: Tensor | None) -> None:
        """Change the values by step `number`."""
        moments = block.first, block.second, block.scratch
        adam_step(rule, number, block.values, block.gradient, start, block.correction, *moments)


class StackMomentum(StackAdam):
    """Steps of torch.optim.SGD."""

    def __init__(self, rule: LocalRule):
        super().__init__(rule)
        self.options = {} if rule.own is None else rule.own.part.values

    def move(self, rule: LocalRule, block: Block, number: int, start: Tensor | None) -> None:
        values, gradient, momentum = block.values, block.gradient, self.options.get("momentum", 0.0)
        if start is not None:
            gradient.add_(torch.sub(values, start, out=block.scratch), alpha=rule.proximal_mu)
        if block.correction is not None:
            gradient.add_(block.correction)
        if decay := self.options.get("weight_decay", 0.0):
            gradient.add_(values, alpha=decay)
        if momentum:
            block.first.mul_(momentum).add_(gradient)
            gradient = gradient.add_(block.first, alpha=momentum) if self.options["nesterov"] else block.first
        values.add_(gradient, alpha=-rule.lr)


def stack_optimizer(rule: LocalRule) -> StackOptimizer:
    """Return the optimizer of a rule."""
    if rule.optimizer == "adam":
        return StackAdam(rule)
    return StackMomentum(rule) if rule.own or rule.rates or rule.clip_norm is not None else StackSGD(rule)
