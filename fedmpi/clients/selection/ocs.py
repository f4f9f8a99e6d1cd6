"""Optimal client sampling (Chen, Horváth and Richtárik 2022)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi import Cohort, client_sampler, proportional_inclusion

Floats = NDArray[np.float64]


@client_sampler(name="ocs", measures=("update_norm",))
class OptimalClientSampling:
    """Draw clients independently, with probabilities that minimize the variance of the aggregated update.

    Chen, Horváth and Richtárik 2022, "Optimal Client Sampling for Federated Learning" (TMLR), Eq 7 with Algorithm 1,
    or Algorithm 2 (AOCS). All n candidates train and report only the norm u_i = w_i ‖U_i‖ of their weighted update.
    Client i sends its update with probability p_i, independently of the others (Poisson sampling):

        p_i = (m + l − n) u_i / (u_(1) + … + u_(l))  if u_i is among the l smallest norms u_(1) ≤ … ≤ u_(l), else 1,

    with the largest l for which 0 < m + l − n ≤ (u_(1) + … + u_(l)) / u_(l). Then Σ p_i = m, the expected number of
    selected clients. `inclusion` is p_i, and with `server.weights = "unbiased"` the server adds w_i U_i / p_i.

    AOCS needs only sums over the clients: p_i = min(1, m u_i / Σ u), and then, at most j_max times, p_i = min(1, C p_i)
    for the I clients with p_i < 1, whose probabilities sum to P, with C = (m − n + I) / P, until C ≤ 1.

    Parameters
    ----------
    candidates : int, optional
        n, the clients that train in each round, drawn uniformly; by default all available ones.
    j_max : int
        Iterations of AOCS; 0 takes the probabilities of Eq 7. The paper uses 4.
    population : {"samples", "clients"}
        Weights w_i of the objective: n_i / Σ n, or equal ones. Choose the one of `server.weights.population`.

    Notes
    -----
    Deviations: none in the probabilities. Clients whose update is zero, or that have no samples, are never drawn, which
    keeps the sum unbiased. If n is less than the available clients, `inclusion` is p_i times the candidates' share,
    the product over both draws: its reciprocal is an unbiased weight, though p_i varies with the candidates drawn.
    """

    def __init__(
        self,
        *,
        candidates: Annotated[int, Field(ge=1)] | None = None,
        j_max: Annotated[int, Field(ge=0)] = 0,
        population: Literal["samples", "clients"] = "samples",
    ):
        self.size, self.j_max, self.population = candidates, j_max, population

    def candidates(self, view: Any) -> NDArray[np.int64]:
        """Draw the n clients that train, all available ones by default."""
        if self.size is None or self.size >= len(view.available):
            return np.asarray(view.available)
        return np.sort(view.generator.choice(view.available, self.size, replace=False))

    def draw(self, view: Any) -> Cohort:
        """Draw each candidate with its probability."""
        weights = view.sizes if self.population == "samples" else view.sizes > 0
        norms = np.nan_to_num(view.fresh("update_norm")) * weights
        trained = np.flatnonzero(norms)
        chances = self.chances(norms[trained], view.count)
        drawn = view.generator.random(len(trained)) < chances
        share = 1.0 if self.size is None else min(1.0, self.size / max(1, len(view.available)))
        return Cohort(trained[drawn], share * chances[drawn])

    def chances(self, norms: Floats, count: int) -> Floats:
        """Return the probabilities (n,) of clients with positive norms (n,), of which `count` send on average."""
        if not self.j_max or count >= len(norms):
            return proportional_inclusion(norms, count)  # the solution of Eq 7
        chances: Floats = np.minimum(1.0, count * norms / norms.sum())
        for _ in range(self.j_max):
            below = chances < 1
            factor = (count - len(norms) + below.sum()) / chances[below].sum()
            chances[below] = np.minimum(1.0, factor * chances[below])
            if factor <= 1:
                break
        return chances
