"""K-Vib: adaptive unbiased selection by independent draws (Zeng et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi import Cohort, client_sampler, proportional_inclusion

Floats = NDArray[np.float64]


@client_sampler(name="k-vib", needs=("update_norm",))
@dataclass(kw_only=True, eq=False)
class KVib:
    """Draw clients independently, with probabilities that follow the norms of past updates (Zeng et al. 2023).

    "Enhanced Federated Optimization: Adaptive Unbiased Client Sampling with Reduced Variance" (arXiv 2310.02698). In
    each round, with N clients, K of them expected, and T rounds:

    - p̃_i ∝ √(ω_i + γ) with Σ p̃ = K, those above 1 set to 1 and the others scaled again: the probabilities that would
      have minimized the variance of all rounds so far, with the regularizer γ = G² N / (θ K).
    - p_i = (1 − θ) p̃_i + θ K / N, with θ = (N / (T K))^(1/3).
    - Each client is drawn independently with probability p_i, so that their number varies around K.
    - ω_i grows by (λ_i ‖Δ_i‖)² / p_i if client i's update Δ_i has arrived, with λ_i = n_i / n.

    `inclusion` is p_i. Choose `server.weights = "unbiased"` for the paper's estimate Σ λ_i Δ_i / p_i.

    Deviations
    ----------
    The paper knows G, a bound of λ_i ‖Δ_i‖; by default it is the largest one of the first round. Only available
    clients with samples have a p_i, and N counts these in it. θ is at most 1. The authors' code draws in proportion to
    ω_i + γ, the paper and this sampler to its square root.

    Parameters
    ----------
    horizon : int
        T, rounds of the run.
    bound : float, optional
        G, bound of λ_i ‖Δ_i‖.
    """

    horizon: Annotated[int, Field(ge=1)] = 500
    bound: Annotated[float, Field(gt=0)] | None = None
    largest: float = field(default=0.0, init=False)  # G
    feedback: Floats = field(default_factory=lambda: np.zeros(0), init=False)  # (N,): ω
    stated: Floats = field(default_factory=lambda: np.zeros(0), init=False)  # (N,): p in the last round
    state: ClassVar[tuple[str, ...]] = ("largest", "feedback", "stated")

    def draw(self, view: Any) -> Cohort:
        """Add the feedback of the last round, and draw."""
        if not len(self.feedback):
            self.feedback, self.stated = np.zeros((2, len(view.sizes)))
        new = np.flatnonzero((view.age("update_norm") == 1) & (self.stated > 0))
        gained = view.sizes[new] / view.sizes.sum() * view.last("update_norm")[new]
        self.feedback[new] += gained**2 / self.stated[new]
        self.largest = self.bound or self.largest or float(gained.max(initial=0.0))
        fit, count = view.eligible, min(view.count, len(view.eligible))
        theta = min(1.0, (len(view.sizes) / (self.horizon * view.count)) ** (1 / 3))
        scores = np.sqrt(self.feedback[fit] + self.largest**2 * len(view.sizes) / (theta * view.count))
        chance = (1 - theta) * proportional_inclusion(scores, count) + theta * count / max(len(fit), 1)
        self.stated = np.zeros(len(view.sizes))
        self.stated[fit] = chance
        drawn = view.generator.random(len(fit)) < chance
        return Cohort(fit[drawn], chance[drawn])
