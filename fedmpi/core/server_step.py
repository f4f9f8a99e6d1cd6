"""The server's step, taken by every rank alike: from the round's sums to the next global model."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.aggregation.weighing import Weighing
from fedmpi.common.plan import Plan
from fedmpi.common.streams import Streams
from fedmpi.config import Config
from fedmpi.core.round_sum import RoundTotals
from fedmpi.local.algorithm import Totals
from fedmpi.local.hooks import Hooks
from fedmpi.privacy.gaussian import add_noise
from fedmpi.privacy.updates import adds_noise, planned_participants

LARGEST_POWER = 1023
"""Of two, among floats."""


class ServerStep:
    """The mean update of a round, noise, what a local algorithm makes of it, and the server optimizer."""

    def __init__(
        self,
        config: Config,
        streams: Streams,
        clients: int,
        weighing: Weighing,
        optimizer: ServerOptimizer,
        hooks: Hooks | None,
    ):
        self.config = config
        self.streams = streams
        self.clients = clients
        self.weighing = weighing
        self.optimizer = optimizer
        self.hooks = hooks

    def take(self, plan: Plan, totals: RoundTotals, model: Tensor) -> None:
        """Change the model (d,) in place (Reddi et al. 2020, Algorithm 2)."""
        surplus, noise, divisor = self._surplus(plan, totals), self._adds_noise, self.divisor(plan, totals)
        if surplus or noise or self.hooks is not None:
            self.optimizer.step(model, self._update(plan, totals, model, surplus, divisor))
        else:
            self.optimizer.step(model, totals.update, divisor)

    def _update(self, plan: Plan, totals: RoundTotals, model: Tensor, surplus: float, divisor: float) -> Tensor:
        """The round's mean update Δ of the model from the sums of all ranks, and what is made of it."""
        privacy = self.config.privacy
        update = totals.update / divisor
        if surplus:
            update.add_(model, alpha=surplus)
        if self._adds_noise and privacy.clip_norm is not None:
            share = 1 / planned_participants(self.config, self.clients)
            add_noise(update, self.streams, plan.round, privacy.noise_multiplier, privacy.clip_norm, share)
        if self.hooks is None:
            return update
        weight = math.ldexp(totals.sums["weight"], -round(totals.sums["power"]))
        true_divisor, participants = weight if self._divides(plan, totals) else 1.0, round(totals.sums["clients"])
        facts = Totals(self.clients, participants, weight, true_divisor, plan.round, plan.lr)
        return self.hooks.server_step(update, totals.further, facts)

    @property
    def _adds_noise(self) -> bool:
        return self.config.privacy.clip_norm is not None and adds_noise(self.config)

    def _surplus(self, plan: Plan, totals: RoundTotals) -> float:
        """Σ c_k − 1 of the clients whose updates came back (`Weighing.surplus`); 0 unless weights average models."""
        returned = plan.coefficients
        if totals.sums["diverged"] and returned.size:  # of some nothing came back
            returned = np.array([totals.sums["weight"]])
        return 0.0 if plan.one_step else self.weighing.surplus(returned)

    @property
    def combines(self) -> bool:
        """Whether a combiner makes the update, and not a sum."""
        return bool(self.config.aggregation.rule != "mean")

    def divisor(self, plan: Plan, totals: RoundTotals) -> float:
        """What the sum of updates, as it is scaled, is divided by: the total weight of those who returned one, or 1."""
        if self._divides(plan, totals):
            return totals.sums["weight"]
        return math.ldexp(1.0, min(round(totals.sums["power"]), LARGEST_POWER))

    def _divides(self, plan: Plan, totals: RoundTotals) -> bool:
        return plan.normalise and totals.sums["weight"] > 0 and not self.combines
