"""Two ways to spare a dense first layer, whose samples are known in advance, work on all its weights in every step.

**Products ahead.** From step s with weights w_s on, plain steps w_{t+1} = w_t + ρ_t G_tᵀ X_t give

    X_t w_tᵀ = X_t w_sᵀ + Σ_{s≤r<t} (X_t X_rᵀ) (ρ_r G_r),

with the batches X_t and the gradients G_t of the layer's outputs. The products with w_s and those between samples are
computed for m steps at once, and one product afterwards adds Σ (ρ_r G_r)ᵀ X_r to the weights. Large products replace
small ones, and weights larger than the second-level cache are read once in m steps instead of twice per step.

**Weights in two parts**, for a constant correction. With SGD's pull p = ημ and the constant change per step
v = p w_start − η c, a weight after t steps is

    w_t = (1 − p)^t ŵ_t + Σ_{j<t} (1 − p)^j v,  ŵ_{t+1} = ŵ_t − η / (1 − p)^{t+1} ∇ℓ(w_t),  ŵ_0 = w_start,

by induction from w_{t+1} = (1 − p) w_t − η ∇ℓ(w_t) + v. The engine stores ŵ_t, which only gradients change; the
multiple of v is known. x·w_t needs x·v of all samples once: one large product before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fedmpi.local.batched.layers import Linear, Step, Workspace
from fedmpi.local.batched.update import StackSGD
from fedmpi.local.work import LocalRule

ROWS_AHEAD = 40
"""Approximate number of a client's samples whose products are computed at once. Products gain from more samples, but
those between samples grow with their square."""
LEAST_STEPS = 3
"""Fewest steps at once; two gain nothing."""
LEAST_VALUES, LEAST_OUTPUTS = 1 << 16, 96
"""Fewest weights and outputs; smaller layers lose."""
MOST_SAMPLES_A_STEP = 12
"""Samples per step above which the two parts are slower than plain corrections. The products grow with the samples,
corrections of all weights with the steps."""
LEAST_SCALE = 1e-6
"""(1 − p)^t below which ŵ_t would be too inaccurate."""


class Drift:
    """Factors of a weight in two parts: scale · value + shift · v, updated by value += rate · gradient.

    The layer's outputs are then scale · (x · value) + shift · (x · v).
    """

    def __init__(self) -> None:
        self.on = False
        self.scale, self.shift, self.rate = 1.0, 0.0, 0.0


class ProductsAhead:
    """First layer's products of the batched clients."""

    def __init__(self, step: Step, drift: Drift, workspace: Workspace):
        self.on = False
        self._step, self._drift, self._workspace = step, drift, workspace
        self._samples: Sequence[Tensor] = ()
        self._order: Sequence[Tensor] = ()
        self._views: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._views_of_client: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def open(self, weights: Tensor, samples: Sequence[Tensor], order: Sequence[Tensor], rows: int, steps: int) -> None:
        """Start the work of some clients."""
        clients, outputs, inputs = weights.shape
        together, take = steps * rows, self._workspace.take
        self.on, self._rows, self._steps = True, rows, steps
        self._weights, self._samples, self._order = list(weights.unbind(0)), samples, order
        self._transposed = [weight.t() for weight in self._weights]
        self._x = take("ahead x", clients, together, inputs)
        products = take("ahead products", clients, together, outputs)
        pairs = take("ahead pairs", clients, together - rows, together - rows)
        gradients = take("ahead gradients", clients, together, outputs)
        self._all = products, pairs, gradients
        self._views.clear()
        self._views_of_client.clear()
        self._filled, self._number = [0] * clients, 0

    def begin_step(self, number: int) -> None:
        """Prepare the forward pass of step `number` (from 0)."""
        self._number = number % self._steps
        if self._number == 0:
            for client, order in enumerate(self._order):
                self._settle(client)
                self._prepare(client, order[number * self._rows : (number + self._steps) * self._rows])

    def settle(self) -> None:
        """Apply the remaining updates to the weights, after the last step."""
        for client in range(len(self._weights)):
            self._settle(client)
        self._samples, self._order = (), ()

    def forward(self, output: Tensor) -> None:
        """Write the step's products (k, b, outputs); with `Drift` on, `output` holds the samples' products with v."""
        products, pairs, earlier, _ = self._of_step(*output.shape[:2])
        drift = self._drift
        if drift.on:
            torch.add(products, output, alpha=drift.shift / drift.scale, out=output)
            if self._number:
                output.baddbmm_(pairs, earlier)
            if drift.scale != 1:
                output.mul_(drift.scale)
        elif self._number:
            torch.baddbmm(products, pairs, earlier, out=output)
        else:
            output.copy_(products)

    def backward(self, gradient: Tensor) -> None:
        """Store the gradient of the step's products for later steps and for the weights."""
        clients, rows, _ = gradient.shape
        own = self._of_step(clients, rows)[3]
        torch.mul(gradient, self._drift.rate if self._drift.on else self._step.rate, out=own[:, :rows])
        if rows < self._rows:
            own[:, rows:].zero_()

    def _of_step(self, clients: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the first clients' products, products between samples, earlier gradients, current gradient."""
        key = clients, rows, self._number
        if key not in self._views:
            products, pairs, gradients = (held[:clients] for held in self._all)
            first = self._number * self._rows
            before = max(0, first - self._rows)
            self._views[key] = (
                products[:, first : first + rows],
                pairs[:, before : before + rows, :first],
                gradients[:, :first],
                gradients[:, first : first + self._rows],
            )
        return self._views[key]

    def _prepare(self, client: int, order: Tensor) -> None:
        """Compute the products of a client's next steps."""
        self._filled[client] = count = len(order)
        if count == 0:
            return
        x, products, _, later, before, pairs = self._of_client(client, count)
        torch.index_select(self._samples[client], 0, order, out=x)
        torch.mm(x, self._transposed[client], out=products)
        if len(later):
            torch.mm(later, before, out=pairs)

    def _settle(self, client: int) -> None:
        """Apply the updates of the client's last steps to its weights."""
        if count := self._filled[client]:
            x, _, gradients, *_ = self._of_client(client, count)
            self._weights[client].addmm_(gradients, x)

    def _of_client(self, client: int, count: int) -> tuple[Tensor, ...]:
        """Return views of a client's first samples: x, products, gradients; later x, earlier x, their products."""
        key = client, count
        if key not in self._views_of_client:
            x, products, pairs, gradients = (held[client] for held in (self._x, *self._all))
            x, later = x[:count], count - self._rows
            self._views_of_client[key] = (
                x,
                products[:count],
                gradients[:count].t(),
                x[self._rows :],
                x[:later].t(),
                pairs[:later, :later],
            )
        return self._views_of_client[key]


class FirstLinear(Linear):
    """Dense layer that reads the samples themselves; `BoundNet` gives it the ways that are `on`."""

    drift: Drift
    ahead: ProductsAhead

    def multiply(self) -> bool:
        if self.ahead.on:
            self.ahead.forward(self.output)
        elif self.drift.on:  # the output contains the samples' products with v
            self.output.baddbmm_(self.x, self.transposed, beta=self.drift.shift, alpha=self.drift.scale)
        else:
            return super().multiply()
        return False

    def learn(self, gradient: Tensor) -> None:
        if self.ahead.on:
            self.ahead.backward(gradient)
        elif self.drift.on:
            self.target.baddbmm_(gradient.transpose(1, 2), self.x, alpha=self.drift.rate)
        else:
            super().learn(gradient)


def steps_at_once(inputs: int, outputs: int, batch: int | None, steps: int) -> int:
    """Return the number of steps to compute a first layer's products for at once; 0 if single steps are faster."""
    if batch is None or outputs < LEAST_OUTPUTS:
        return 0
    together = ROWS_AHEAD // batch
    enough = min(together, steps) >= LEAST_STEPS and outputs * inputs >= LEAST_VALUES
    return together if enough else 0


class KeptApart:
    """First layer's weights of the batched clients, stored as ŵ_t and v, and `products` x·v of all their samples.

    `shape` is (outputs, inputs) of the layer, which reads `drift`; `samples` has one tensor (n_j, inputs) per client.
    """

    def __init__(
        self, shape: tuple[int, int], optimizer: StackSGD, drift: Drift, samples: Sequence[Tensor], workspace: Workspace
    ):
        self.optimizer, self.drift = optimizer, drift
        self.samples: Sequence[Tensor] = samples
        self.shape = shape
        self.firsts = list(accumulate(map(len, samples), initial=0))
        self.products = workspace.take("products", self.firsts[-1], shape[0])
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


def pays_off(inputs: int, outputs: int, rule: LocalRule, steps: int) -> bool:
    """Check whether storing the first layer's weights in two parts speeds up SGD with corrections over so many steps.

    All epochs read the same products, which take no more memory than the samples.
    """
    if outputs > inputs or rule.optimizer != "sgd":
        return False
    if rule.epochs is None or rule.batch_size is None or rule.batch_size > MOST_SAMPLES_A_STEP * rule.epochs:
        return False
    keep = StackSGD(rule).keep
    return keep > 0.5 and keep**steps >= LEAST_SCALE
