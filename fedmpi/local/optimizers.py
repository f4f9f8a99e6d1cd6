"""In-place local optimizers on a flat vector, SGD and Adam (Kingma & Ba 2015), and schedules of their learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.imports import Later
from fedmpi.common.options import not_with, positional
from fedmpi.common.registry import Component, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmpi.config.tables import LocalTable
    from fedmpi.local.work import LocalRule, OwnOptimizer
    from fedmpi.models import flat
    from fedmpi.models.flat import FlatModel
else:
    torch, flat = Later("torch"), Later("fedmpi.models.flat")

NAMED = "named_parameters"
"""First parameter of a custom optimizer that is called with pairs of a name and a parameter."""


@dataclass
class AdamState:
    """State of Adam over the t trainable values, and its working memory."""

    first: Tensor  # (t,): running means of the gradient and of its square
    second: Tensor
    gradient: Tensor  # (t,): valid within a step
    scratch: Tensor
    steps: int = 0  # number of steps taken

    @classmethod
    def fresh(cls, model: FlatModel) -> AdamState:
        """Build a state before the first step."""
        zeros = torch.zeros(model.trained, dtype=model.dtype, device=model.device)
        return cls(zeros, zeros.clone(), torch.empty_like(zeros), torch.empty_like(zeros))

    def reset(self) -> None:
        """Reset the state."""
        self.first.zero_()
        self.second.zero_()
        self.steps = 0


@register("local optimizer", name="sgd")
class SGD:
    """SGD: w ← w − η (∇ℓ(w) + μ (w − w_start) + c), with proximal term and correction.

    With `pull`, η μ in a tensor (), gradients and correction are already multiplied by −η.

    Parameters
    ----------
    momentum : float
        Momentum. With this option or one of the following, a step is that of torch.optim.SGD.
    nesterov : bool
        Nesterov's momentum.
    weight_decay : float
        Weight of the L2 penalty.
    """

    def __init__(
        self,
        values: Tensor,
        views: list[Tensor],
        rule: LocalRule,
        start: Tensor | None,
        correction: Tensor | None = None,
        pull: Tensor | None = None,
        *,
        momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        nesterov: Annotated[bool, not_with("local.optimizer.momentum", 0.0)] = False,
        weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0,
    ):
        self.values, self.views, self.mu = values, views, rule.proximal_mu
        self.factor = -rule.lr if pull is None else 1.0
        self.pull = rule.lr * rule.proximal_mu if pull is None else pull
        self.start, self.correction = start, correction

    def set_rate(self, lr: float) -> None:
        """Set η of the next step; a tensor `pull` keeps its memory."""
        if isinstance(self.pull, torch.Tensor):
            self.pull.fill_(lr * self.mu)
        else:
            self.factor, self.pull = -lr, lr * self.mu

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        if self.start is not None:
            self.values.lerp_(self.start, self.pull)
        if self.correction is not None:
            self.values.add_(self.correction, alpha=self.factor)
        flat.add_gradients(self.views, gradients, self.factor)


@register("local optimizer", name="adam")
class Adam:
    """Adam (Kingma and Ba 2015).

    Parameters
    ----------
    beta1 : float
        Decay of the first moment.
    beta2 : float
        Decay of the second moment.
    epsilon : float
        Constant added to the root of the second moment.
    """

    def __init__(
        self,
        values: Tensor,
        rule: LocalRule,
        start: Tensor | None,
        state: AdamState,
        gradient_views: list[Tensor],
        correction: Tensor | None = None,
        *,
        beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9,
        beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999,
        epsilon: Annotated[float, Field(ge=1e-30, le=1e30)] = 1e-8,
    ):
        self.values, self.rule, self.start, self.state = values, rule, start, state
        self.gradient_views, self.correction = gradient_views, correction

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        gradient = self.state.gradient
        found = [(view, one) for view, one in zip(self.gradient_views, gradients, strict=True) if one is not None]
        if len(found) < len(gradients):
            gradient.zero_()
        torch._foreach_copy_([view for view, _ in found], [one for _, one in found])

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        self.rule = replace(self.rule, lr=lr)

    def finish(self) -> None:
        """Complete a step: its numbers differ from step to step, which a CUDA graph does not allow."""
        state = self.state
        state.steps += 1
        moments = state.first, state.second, state.scratch
        adam_step(self.rule, state.steps, self.values, state.gradient, self.start, self.correction, *moments)


def adam_step(
    rule: LocalRule,
    number: int,
    values: Tensor,
    gradient: Tensor,
    start: Tensor | None,
    correction: Tensor | None,
    first: Tensor,
    second: Tensor,
    scratch: Tensor,
) -> None:
    """Take step `number` (from 1) of bias-corrected Adam (Kingma & Ba 2015, Algorithm 1), in place.

    The proximal term, given by `start`, and the correction are part of the gradient.
    """
    if start is not None:
        torch.sub(values, start, out=scratch)
        gradient.add_(scratch, alpha=rule.proximal_mu)
    if correction is not None:
        gradient.add_(correction)
    first.lerp_(gradient, 1 - rule.beta1)
    second.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    torch.sqrt(second, out=scratch)
    scratch.div_((1 - rule.beta2**number) ** 0.5).add_(rule.epsilon)
    values.addcdiv_(first, scratch, value=-rule.lr / (1 - rule.beta1**number))


class Foreign:
    """Custom optimizer on the model's parameters, which are views of the working vector.

    It may give them other tensors, whose values are copied into the vector.
    """

    def __init__(
        self,
        own: OwnOptimizer,
        model: FlatModel,
        values: Tensor,
        rule: LocalRule,
        start: Tensor | None,
        correction: Tensor | None,
    ):
        self.own, self.model, self.parameters, self.values, self.rule = own, model, model.parameters, values, rule
        self.start, self.correction = start, correction
        given: list[Any] = list(self.parameters)
        with calling(own.part):
            if next(iter(positional(own.part.object)), "") == NAMED:
                given = [(name, one) for name, one in model.module.named_parameters() if one.requires_grad]
            self.inner = own.make(given, lr=rule.lr)
        if not callable(getattr(self.inner, "step", None)):
            problem = f"returned {type(self.inner).__name__}, which has no step(): return a torch.optim.Optimizer"
            raise refuse_result(own.part, problem)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next step in all groups of parameters."""
        with calling(self.own.part):
            for group in self.inner.param_groups:
                group["lr"] = lr

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient, more in zip(self.parameters, gradients, self._further(), strict=True):
            parameter.grad = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
            if more is not None and (gradient is not None or self.model.active is None):  # not of an unused copy
                own = more.view_as(parameter)
                parameter.grad = own.clone() if parameter.grad is None else parameter.grad + own
        with calling(self.own.part):
            self.inner.step()
        self.model.collect(f"the optimizer {self.own.part.name}")
        for parameter in self.parameters:
            parameter.grad = None

    def _further(self) -> Sequence[Tensor | None]:
        """Return the sum of the proximal term and the correction for each parameter's gradient."""
        further = self.correction
        if self.start is not None:
            pull = (self.values - self.start).mul_(self.rule.proximal_mu)
            further = pull if further is None else pull.add_(further)
        if further is None:
            return [None] * len(self.parameters)
        return torch.split(further, [parameter.numel() for parameter in self.parameters])


LocalOptimizer = SGD | Adam | Foreign


def clipped(gradients: Sequence[Tensor | None], norm: float, factor: Tensor | None = None) -> Sequence[Tensor | None]:
    """Return the gradients scaled as by torch.nn.utils.clip_grad_norm_, times the factor; the host does not wait."""
    found = [one for one in gradients if one is not None]
    scale = (norm / (torch.nn.utils.get_total_norm(found) + 1e-6)).clamp_(max=1.0)
    scaled = iter(torch._foreach_mul(found, scale if factor is None else scale * factor))
    return [None if one is None else next(scaled) for one in gradients]


def rule_of(part: LocalTable, lr: float) -> LocalRule:
    """Build the local rule of a configuration; SGD with options is torch's, as a custom optimizer."""
    from fedmpi.local.work import LocalRule, OwnOptimizer

    chosen, own = part.optimizer, None
    if chosen.foreign or (chosen.name == "sgd" and not is_plain_sgd(chosen)):
        made = chosen.object if chosen.foreign else torch.optim.SGD
        own = OwnOptimizer(chosen, partial(made, **chosen.options))
    return LocalRule(
        optimizer="own" if own else "adam" if chosen.name == "adam" else "sgd",
        own=own,
        clip_norm=part.clip_norm,
        lr=lr,
        epochs=part.epochs if part.epochs is not None or part.steps is not None else 1,
        steps=part.steps,
        batch_size=None if part.batch_size == "all" else part.batch_size,
        drop_last=part.drop_last,
        **(chosen.options if chosen.name == "adam" else {}),
    )


def is_plain_sgd(optimizer: Component) -> bool:
    """Check whether the local optimizer is SGD without momentum and weight decay."""
    return optimizer == Component("local optimizer", "sgd")


def rate_at(part: LocalTable, lr: float, place: int, places: int) -> float:
    """Return the learning rate of a round, or of a step, from its place: the schedule's rate times the warm-up's."""
    found = rate(part.schedule, part.schedule.make(), lr, place, places)
    return found * (part.warmup_from + (1 - part.warmup_from) * min(1.0, place / part.warmup)) if part.warmup else found


def rate(part: Component, schedule: Callable[..., Any], lr: float, round: int, rounds: int) -> float:
    """Return the learning rate of a round by a schedule (lr, round, rounds) → rate; reject a result that is no rate."""
    with calling(part, round):
        found = schedule(lr, round, rounds)
    if not isinstance(found, int | float | np.number) or not 0 <= found < np.inf:
        raise refuse_result(part, f"returned {found!r}. Return a learning rate of at least 0", round)
    return float(found)


@register("schedule", name="constant")
def constant(lr: float, round: int, rounds: int) -> float:
    """η in every round."""
    return lr


@register("schedule", name="inverse")
def inverse(lr: float, round: int, rounds: int) -> float:
    """η/(1 + t) in round t (FedSSO, section 4)."""
    return lr / (1 + round)


@register("schedule", name="cosine")
def cosine(lr: float, round: int, rounds: int) -> float:
    """η/2 (1 + cos(π t/T)): from η to zero over all T rounds."""
    return lr * 0.5 * (1 + float(np.cos(np.pi * round / rounds)))


@register("schedule", name="step")
def step(
    lr: float,
    round: int,
    rounds: int,
    *,
    every: Annotated[int, Field(ge=1, le=2**53)] = 30,
    factor: Annotated[float, Field(ge=1e-30, le=1e30)] = 0.1,
) -> float:
    """η · factor^⌊t/every⌋.

    Parameters
    ----------
    every : int
        Rounds between two changes of the rate.
    factor : float
        Factor of every change.
    """
    return lr * factor ** (round // every)
