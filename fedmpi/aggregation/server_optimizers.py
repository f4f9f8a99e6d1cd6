"""Server step from the mean update of the clients to the next global model.

SGD, momentum (Hsu et al. 2019, FedAvgM) and Adagrad, Adam, Yogi as in Reddi et al. 2020 ("Adaptive Federated
Optimization"), Algorithm 2: no bias correction, second moments initialized to τ².

A server optimizer is a class with a method `step` (w, update), or a function of the same form. Every rank takes the
step itself, so nothing in it may depend on the rank. Both are float32 vectors (d,): w is changed in place, or its next
value returned. A class lists its state between rounds in `state`, a tuple of attribute names. These vectors are zero at
first unless its method `start` (w), called before the first round, sets them. They are stored in checkpoints;
numbers and NumPy arrays may be among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, refuse_result, result_tensor, state_names, state_tensor, takes
from fedmpi.common.decorators import server_optimizer
from fedmpi.common.imports import Later
from fedmpi.common.registry import Component

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Later("torch")

BLOCK = 1 << 16
"""Number of parameters processed at once by an elementwise step: their mean stays in the cache."""

Rate = Annotated[float, Field(ge=1e-30, le=1e30)]
Adaptivity = Annotated[float, Field(ge=1e-15, le=1e15)]
Decay = Annotated[float, Field(ge=0, lt=1)]


@server_optimizer(name="sgd")
def sgd(w: Tensor, update: Tensor, *, lr: Rate = 1.0) -> None:
    """Update w ← w + η Δ.

    Parameters
    ----------
    lr : float
        η, the server's learning rate.
    """
    w.add_(update, alpha=lr)


@server_optimizer(name="momentum")
class Momentum:
    """m ← β1 m + Δ, w ← w + η m (Hsu et al. 2019, FedAvgM).

    Parameters
    ----------
    lr : float
        η, the server's learning rate.
    beta1 : float
        Decay of the momentum.
    """

    state = ("m",)
    m: Tensor

    def __init__(self, *, lr: Rate = 1.0, beta1: Decay = 0.9):
        self.lr, self.beta1 = lr, beta1

    def step(self, w: Tensor, update: Tensor) -> None:
        w.add_(self.m.mul_(self.beta1).add_(update), alpha=self.lr)


@server_optimizer(name="adagrad")
class Adagrad:
    """v ← v + Δ² (Reddi et al. 2020, Algorithm 2): m ← β1 m + (1 − β1) Δ, w ← w + η m / (√v + τ).

    Parameters
    ----------
    lr : float
        η, the server's learning rate.
    beta1 : float
        Decay of the first moment.
    tau : float
        τ, the degree of adaptivity; v starts at τ².
    """

    state = ("m", "v")
    m: Tensor
    v: Tensor

    def __init__(self, *, lr: Rate = 1.0, beta1: Decay = 0.9, tau: Adaptivity = 1e-3):
        self.lr, self.beta1, self.tau = lr, beta1, tau

    def start(self, w: Tensor) -> None:
        self.m, self.v = torch.zeros_like(w), torch.full_like(w, self.tau**2)

    def step(self, w: Tensor, update: Tensor) -> None:
        m = self.m.mul_(self.beta1).add_(update, alpha=1 - self.beta1)
        square = update.square()
        self.remember(square)
        w.addcdiv_(m, torch.sqrt(self.v, out=square).add_(self.tau), value=self.lr)

    def remember(self, square: Tensor) -> None:
        """Update v from Δ²."""
        self.v.add_(square)


@server_optimizer(name="adam")
class Adam(Adagrad):
    """v ← β2 v + (1 − β2) Δ² (Reddi et al. 2020, Algorithm 2), else as Adagrad."""

    def __init__(self, *, lr: Rate = 1.0, beta1: Decay = 0.9, beta2: Decay = 0.99, tau: Adaptivity = 1e-3):
        """Set the options.

        Parameters
        ----------
        lr : float
            η, the server's learning rate.
        beta1 : float
            Decay of the first moment.
        beta2 : float
            Decay of the second moment.
        tau : float
            τ, the degree of adaptivity; v starts at τ².
        """
        super().__init__(lr=lr, beta1=beta1, tau=tau)
        self.beta2 = beta2

    def remember(self, square: Tensor) -> None:
        self.v.mul_(self.beta2).add_(square, alpha=1 - self.beta2)


@server_optimizer(name="yogi")
class Yogi(Adam):
    """v ← v − (1 − β2) Δ² sign(v − Δ²) (Reddi et al. 2020, Algorithm 2), else as Adagrad."""

    def remember(self, square: Tensor) -> None:
        self.v.addcmul_((self.v - square).sign_(), square, value=-(1 - self.beta2))


class ServerOptimizer:
    """Server optimizer of a run: one step per round on flat float32 vectors, bit-identical on every rank."""

    def __init__(self, part: Component, options: Mapping[str, Any], w: Tensor, trainable: int | None = None):
        self.part, self.trainable, self._rounds = part, trainable, 0
        with calling(part):
            self._chosen = part.make(options)
        self._step = getattr(self._chosen, "step", self._chosen)
        self._by_blocks = part.object is sgd
        plain = self._step is self._chosen and callable(self._chosen)
        takes(part, self._step, "w", "update", method="" if plain else "step")
        self.names, own = state_names(self._chosen), w[:trainable].clone()
        with calling(part):
            if hasattr(self._chosen, "start"):
                self._chosen.start(own)
        for name in self.names:
            if not hasattr(self._chosen, name):
                setattr(self._chosen, name, torch.zeros_like(own))

    def step(self, w: Tensor, update: Tensor, divisor: float = 1.0) -> None:
        """Update `w` by one step."""
        if self.trainable is not None and self.trainable < w.numel():
            w[self.trainable :].add_(update[self.trainable :] / divisor)
            w, update = w[: self.trainable], update[: self.trainable]
        if self._by_blocks and w.device.type == "cpu":
            for own, part in zip(torch.split(w, BLOCK), torch.split(update, BLOCK), strict=True):
                self._step(own, part / divisor)
            return
        if divisor != 1:
            update = update / divisor
        with calling(self.part, self._rounds):
            before = w.clone() if self.part.foreign else None
            moved = self._step(w, update.clone() if self.part.foreign else update)
        if moved is None and before is not None and torch.equal(w, before) and bool(update.any()):
            problem = "returned nothing and left w as it was: change w in place (w.add_(…)), or return its next value"
            raise refuse_result(self.part, problem, self._rounds)
        if moved is not None and moved is not w:
            w.copy_(result_tensor(self.part, moved, w.shape, self._rounds).detach())
        if self.part.foreign and not bool(w.isfinite().all()):
            raise refuse_result(self.part, "made values of the model that are not finite", self._rounds)
        self._rounds += 1

    def state(self) -> dict[str, Tensor]:
        """Return copies of the state, for a checkpoint."""
        return {name: state_tensor(self.part, self._chosen, name) for name in self.names}

    def load(self, state: Mapping[str, Tensor], rounds: int = 0) -> None:
        """Restore the state of a checkpoint, and the number of rounds until then."""
        self._rounds = rounds
        for name, value in state.items():
            setattr(self._chosen, name, _in_the_form_of(getattr(self._chosen, name), value.clone()))


def _in_the_form_of(before: Any, value: Tensor) -> Any:
    """Convert a checkpoint's value to the optimizer's own type: an array, a tensor, or a number."""
    if isinstance(before, np.ndarray):
        return value.numpy(force=True).copy()
    return value if isinstance(before, torch.Tensor) else value.item()
