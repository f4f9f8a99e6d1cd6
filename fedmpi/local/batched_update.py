"""Optimizers over a stack of clients, in place: SGD fused into the layers' matrix products, Adam, the proximal term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedmpi.local.work import LocalRule
from fedmpi.models.stacked.base import Step


@dataclass(frozen=True)
class Block:
    """Values of several clients that are updated together.

    Parameters
    ----------
    values, gradient : Tensor, same shape
        `gradient` is unused by SGD.
    start : Tensor
        What the server sent; broadcasts over `values`.
    first, second, scratch : Tensor, same shape
        Adam's moments and working memory; unused by SGD.
    """

    values: Tensor
    gradient: Tensor
    start: Tensor
    first: Tensor
    second: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, values: Tensor, gradient: Tensor, start: Tensor, memory: int) -> Block:
        """With fresh moments where `memory` asks for them."""
        moments = [torch.zeros_like(values) if memory else values for _ in range(3)]
        return cls(values, gradient, start, *moments)

    def prefix(self, count: int) -> Block:
        """The part of the first `count` rows."""
        start = self.start if self.start.shape[0] == 1 else self.start[:count]
        parts = (self.values, self.gradient, self.first, self.second, self.scratch)
        values, gradient, first, second, scratch = (part[:count] for part in parts)
        return Block(values, gradient, start, first, second, scratch)

    def reset(self) -> None:
        """Forget the moments."""
        self.first.zero_()
        self.second.zero_()


class StackOptimizer(Protocol):
    """What happens to the stack in a step, beside the layers' own part."""

    fused: bool
    """Whether the layers change the values themselves; else they fill the blocks' gradients."""

    @property
    def step(self) -> Step:
        """What the layers do with a gradient."""

    def finish(self, block: Block, number: int) -> None:
        """After the layers' part of step `number` (from 1)."""


class StackSGD:
    """w ← (1 − ημ) w − η ∇ℓ(w) + ημ w_start: the layers do the first two terms."""

    fused = True

    def __init__(self, rule: LocalRule):
        self._pull = rule.lr * rule.proximal_mu
        self.step = Step(keep=1 - self._pull, rate=-rule.lr)

    def finish(self, block: Block, number: int) -> None:
        if self._pull:
            block.values.add_(block.start, alpha=self._pull)


class StackAdam:
    """Bias-corrected Adam (Kingma & Ba 2015, Algorithm 1); the proximal term is part of the gradient."""

    fused = False

    def __init__(self, rule: LocalRule):
        self.rule = rule
        self.step = Step(keep=0, rate=1)

    def finish(self, block: Block, number: int) -> None:
        rule, gradient, scratch = self.rule, block.gradient, block.scratch
        if rule.proximal_mu:
            torch.sub(block.values, block.start, out=scratch)
            gradient.add_(scratch, alpha=rule.proximal_mu)
        block.first.lerp_(gradient, 1 - rule.beta1)
        block.second.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
        torch.sqrt(block.second, out=scratch)
        scratch.div_((1 - rule.beta2**number) ** 0.5).add_(rule.epsilon)
        block.values.addcdiv_(block.first, scratch, value=-rule.lr / (1 - rule.beta1**number))


def stack_optimizer(rule: LocalRule) -> StackOptimizer:
    """The optimizer that a rule asks for."""
    return StackSGD(rule) if rule.optimizer == "sgd" else StackAdam(rule)
