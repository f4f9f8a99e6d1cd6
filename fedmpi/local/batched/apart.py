"""First layers whose weights lie apart from what constant corrections move them by, so that no step passes over them.

With SGD's pull p = ημ and what every step adds, v = p w_start − η c, a weight after t steps is

    w_t = (1 − p)^t ŵ_t + Σ_{j<t} (1 − p)^j v,  ŵ_{t+1} = ŵ_t − η / (1 − p)^{t+1} ∇ℓ(w_t),  ŵ_0 = w_start,

by induction from w_{t+1} = (1 − p) w_t − η ∇ℓ(w_t) + v. A first layer reads samples, so that x·w_t needs x·v of all
samples once, one large product before the first step, and no gradient of x is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fedmpi.local.batched.update import StackSGD
from fedmpi.local.work import LocalRule
from fedmpi.models.stacked.base import Drift, Workspace
from fedmpi.models.stacked.dense import Linear
from fedmpi.models.stacked.sequence import StackedNet

MOST_SAMPLES_A_STEP = 12
"""Samples a step above which nothing is kept apart: for five clients of 784 × 200 weights and one epoch in batches of
10 the products take 8 ms and the passes that they spare 13; the former grow with the samples, the latter with steps."""
LEAST_SCALE = 1e-6
"""(1 − p)^t below which a weight is not kept apart."""


class KeptApart:
    """The first layer's weights of the clients side by side.

    Parameters
    ----------
    layer : Linear
    optimizer : StackSGD
    drift : Drift
        What the layer reads.
    samples : list of Tensor (n_j, inputs)
        Of every client.
    workspace : Workspace

    Attributes
    ----------
    products : Tensor (Σ n_j, outputs)
        x·v of all samples, client after client.
    """

    def __init__(
        self, layer: Linear, optimizer: StackSGD, drift: Drift, samples: Sequence[Tensor], workspace: Workspace
    ):
        self.optimizer, self.drift = optimizer, drift
        self.samples: Sequence[Tensor] = samples
        self.shape = layer.outputs, layer.inputs
        self.firsts = list(accumulate(map(len, samples), initial=0))
        self.products = workspace.take("products", self.firsts[-1], layer.outputs)
        self.weights: list[tuple[Tensor, Tensor]] = []
        drift.on = True

    def add(self, weight: Tensor, correction: Tensor, start: Tensor, moves: Tensor) -> None:
        """The next client.

        Parameters
        ----------
        weight : Tensor (outputs · inputs,)
            Its value in the stack.
        correction, start : Tensor, same shape
            c, and what the server sent.
        moves : Tensor, same shape
            Receives v.
        """
        number = len(self.weights)
        self.optimizer.prepare(correction, start, moves)
        products = self.products[self.firsts[number] : self.firsts[number + 1]]
        torch.mm(self.samples[number], moves.view(self.shape).t(), out=products)
        self.weights.append((weight, moves))

    def begin_step(self, number: int) -> None:
        """Let the layer know of step `number` (from 0)."""
        self._place(number)
        self.drift.rate = self.optimizer.rate / (self.drift.scale * self.optimizer.keep)

    def settle(self, steps: Sequence[int]) -> None:
        """Put the weights together, each client's after so many steps of its own."""
        for (weight, moves), number in zip(self.weights, steps, strict=True):
            self._place(number)
            if self.drift.scale != 1:
                weight.mul_(self.drift.scale)
            weight.add_(moves, alpha=self.drift.shift)
        self.drift.on, self.samples = False, ()

    def _place(self, steps: int) -> None:
        self.drift.scale, self.drift.shift = self.optimizer.keep**steps, self.optimizer.summed(steps)


def spares_passes(net: StackedNet, rule: LocalRule, steps: int) -> bool:
    """Whether to keep the first layer's weights apart in so many steps of corrected SGD.

    Of several epochs each reads the same products. They take no more memory than the samples.
    """
    if net.head is None or net.head.outputs > net.head.inputs or rule.optimizer != "sgd":
        return False
    if rule.epochs is None or rule.batch_size is None or rule.batch_size > MOST_SAMPLES_A_STEP * rule.epochs:
        return False
    keep = StackSGD(rule).keep
    return keep > 0.5 and keep**steps >= LEAST_SCALE
