"""First layers whose weights are stored in two parts, so that no step has to add a constant correction.

With SGD's pull p = ημ and the constant change per step v = p w_start − η c, a weight after t steps is

    w_t = (1 − p)^t ŵ_t + Σ_{j<t} (1 − p)^j v,  ŵ_{t+1} = ŵ_t − η / (1 − p)^{t+1} ∇ℓ(w_t),  ŵ_0 = w_start,

by induction from w_{t+1} = (1 − p) w_t − η ∇ℓ(w_t) + v. The engine stores ŵ_t, which only gradients change; the
multiple of v is known. A first layer reads samples, so x·w_t needs x·v of all samples once: one large product before
the first step. No gradient of x is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fedmpi.local.batched.update import StackSGD
from fedmpi.local.work import LocalRule
from fedmpi.models.stacked.base import Drift, Workspace
from fedmpi.models.stacked.chain import StackedNet
from fedmpi.models.stacked.dense import Linear

MOST_SAMPLES_A_STEP = 12
"""Samples per step above which the two parts are slower than plain corrections.

Measured for five clients with 784 × 200 weights, one epoch and batches of 10: the products take 8 ms, and adding
corrections to all weights in every step takes 13 ms. The former grows with the samples, the latter with the steps."""
LEAST_SCALE = 1e-6
"""(1 − p)^t below which ŵ_t would be too inaccurate."""


class KeptApart:
    """First layer's weights of the batched clients, stored as ŵ_t and v.

    Parameters
    ----------
    layer : Linear
    optimizer : StackSGD
    drift : Drift
        The object that the layer reads.
    samples : list of Tensor (n_j, inputs)
        One tensor per client.
    workspace : Workspace

    Attributes
    ----------
    products : Tensor (Σ n_j, outputs)
        x·v of all samples, concatenated client after client.
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
        """Add the next client: compute its v and the products of its samples with v."""
        number = len(self.weights)
        self.optimizer.prepare(correction, start, moves)
        products = self.products[self.firsts[number] : self.firsts[number + 1]]
        torch.mm(self.samples[number], moves.view(self.shape).t(), out=products)
        self.weights.append((weight, moves))

    def begin_step(self, number: int) -> None:
        """Set the factors of `Drift` for step `number` (from 0); the layer reads them."""
        self._set_factors(number)
        self.drift.rate = self.optimizer.rate / (self.drift.scale * self.optimizer.keep)

    def settle(self, steps: Sequence[int]) -> None:
        """Replace each client's ŵ by its w after the given number of steps per client."""
        for (weight, moves), number in zip(self.weights, steps, strict=True):
            self._set_factors(number)
            if self.drift.scale != 1:
                weight.mul_(self.drift.scale)
            weight.add_(moves, alpha=self.drift.shift)
        self.drift.on, self.samples = False, ()

    def _set_factors(self, steps: int) -> None:
        self.drift.scale, self.drift.shift = self.optimizer.keep**steps, self.optimizer.summed(steps)


def pays_off(net: StackedNet, rule: LocalRule, steps: int) -> bool:
    """Check whether storing the first layer's weights in two parts speeds up SGD with corrections over so many steps.

    All epochs read the same products, which take no more memory than the samples.
    """
    if net.head is None or net.head.outputs > net.head.inputs or rule.optimizer != "sgd":
        return False
    if rule.epochs is None or rule.batch_size is None or rule.batch_size > MOST_SAMPLES_A_STEP * rule.epochs:
        return False
    keep = StackSGD(rule).keep
    return keep > 0.5 and keep**steps >= LEAST_SCALE
