"""The server's step from the mean update of the participants to the next global model.

SGD, momentum (Hsu et al. 2019, FedAvgM) and Adagrad, Adam, Yogi as in Reddi et al. 2020 ("Adaptive Federated
Optimization"), Algorithm 2: no bias correction, second moments starting at τ².
"""

from __future__ import annotations

import torch

KINDS = ("sgd", "momentum", "adagrad", "adam", "yogi")


class ServerOptimizer:
    """One step per round on flat float32 vectors, in place; the same bits on every rank that takes it.

    With Δ the update and m the first moment:

    - sgd: w ← w + η Δ
    - momentum: m ← β1 m + Δ, w ← w + η m
    - adagrad, adam, yogi: m ← β1 m + (1 − β1) Δ; v ← v + Δ², β2 v + (1 − β2) Δ², or
      v − (1 − β2) Δ² sign(v − Δ²); w ← w + η m / (√v + τ)

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    lr : float
        η.
    beta1, beta2 : float
        Decay rates of the moments, in [0, 1).
    tau : float
        τ > 0, the degree of adaptivity; v starts at τ².
    trainable : int, optional
        Values at the front of the vectors that the optimizer moves; the rest (running statistics of normalisation
        layers) takes the mean as it is. None means all.

    Raises
    ------
    ValueError
        If the kind is unknown or a number is out of range.
    """

    def __init__(
        self,
        kind: str = "sgd",
        lr: float = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        trainable: int | None = None,
    ):
        if kind not in KINDS:
            raise ValueError(f"unknown server optimizer {kind!r}: one of {', '.join(KINDS)}")
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and tau > 0):
            raise ValueError(f"need 0 <= beta1, beta2 < 1 and tau > 0, not {beta1}, {beta2}, {tau}")
        self.kind, self.lr, self.beta1, self.beta2, self.tau = kind, lr, beta1, beta2, tau
        self.trainable = trainable
        self._moments: dict[str, torch.Tensor] = {}

    def step(self, w: torch.Tensor, update: torch.Tensor) -> None:
        """Move `w` by one step.

        Parameters
        ----------
        w : Tensor float32 (d,)
            The global model, changed in place.
        update : Tensor float32 (d,)
            Δ, the weighted mean of w_k − w; left as it is.
        """
        if self.trainable is not None and self.trainable < w.numel():
            w[self.trainable :].add_(update[self.trainable :])
            w, update = w[: self.trainable], update[: self.trainable]
        if self.kind == "sgd":
            w.add_(update, alpha=self.lr)
        elif self.kind == "momentum":
            w.add_(self._moment("m", w, 0.0).mul_(self.beta1).add_(update), alpha=self.lr)
        else:
            self._adaptive_step(w, update)

    def _adaptive_step(self, w: torch.Tensor, update: torch.Tensor) -> None:
        m = self._moment("m", w, 0.0).mul_(self.beta1).add_(update, alpha=1 - self.beta1)
        v = self._moment("v", w, self.tau**2)
        square = update.square()
        if self.kind == "adagrad":
            v.add_(square)
        elif self.kind == "adam":
            v.mul_(self.beta2).add_(square, alpha=1 - self.beta2)
        else:
            v.addcmul_((v - square).sign_(), square, value=-(1 - self.beta2))
        w.addcdiv_(m, torch.sqrt(v, out=square).add_(self.tau), value=self.lr)

    def _moment(self, name: str, w: torch.Tensor, start: float) -> torch.Tensor:
        if name not in self._moments:
            self._moments[name] = torch.full_like(w, start)
        return self._moments[name]

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the moments, float32 (d,) each, for a checkpoint; empty before the first step and for sgd."""
        return {name: moment.clone() for name, moment in self._moments.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the moments of a checkpoint."""
        self._moments = {name: moment.clone() for name, moment in state.items()}
