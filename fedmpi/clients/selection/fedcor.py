"""FedCor: selection by correlations of the clients' losses (Tang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi import Cohort, client_sampler

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NOISE = 0.01
"""σ_n, as in the authors' code."""


@client_sampler(name="fedcor", measures=("loss",))
@dataclass(kw_only=True, eq=False)
class FedCor:
    """Select the clients whose losses are correlated with the others' most (Tang et al. 2022, CVPR).

    - The changes Δl of all N clients' losses in a round are a Gaussian process with covariance Σ = XᵀX + σ_n² I. The
      homogeneous linear kernel XᵀX has an embedding x_i ∈ R^d of each client, a column of X.
    - Warm-up rounds, and every Δt-th round after them, draw uniformly. All clients are measured before and after them.
      X then maximizes Σ_t γ^(now−t) log N(Δl_t | mean, Σ) over the last M rounds. This maximum is known (Tipping and
      Bishop 1999): its rows are √(λ_j − σ_n²) u_j, with the d largest eigenvalues λ_j > σ_n² of the weighted covariance
      of the Δl_t and their eigenvectors u_j.
    - In other rounds, clients are selected one by one: that with the largest β^τ_k Σ_i p_i Σ_ik / √Σ_kk, the expected
      decrease of the global loss with p_i = n_i / n. Σ then becomes the posterior given this client:
      Σ − Σ_·k Σ_k· / Σ_kk. τ_k counts the selections of client k since X was trained (annealing).

    Deviations
    ----------
    X is the maximum itself. The authors' code takes 1,000 steps of Adam towards it, and later 100. These amplify
    rounding errors, so that other numbers of ranks would select other clients. The updates of a uniform round count.
    After the warm-up, the authors' code discards them, and trains a selected cohort in the same round. As in the
    commands of that code, the prior mean is the mean of a client's changes weighted by γ^(now−t). A client unavailable
    before or after a round counts as changed by this mean. Clients without samples are never selected. The matrix Σ is
    not formed: its posterior follows from that of the kernel's weights, in O(N d) per selected client. The defaults are
    those of the authors' commands for FMNIST, with the β of their first version; it is 0.9 in the current one.

    Parameters
    ----------
    warmup : int
        Rounds with uniform draws at the start.
    interval : int
        Δt, rounds from one training of X to the next.
    anneal : float
        β, factor of a client's score for each selection since X was trained.
    forget : float
        γ, factor of a round's log-likelihood per round of its age.
    memory : int
        M, rounds after which measurements are dropped.
    dimension : int
        d, length of the embeddings.
    """

    warmup: Count = 15
    interval: Annotated[int, Field(ge=2)] = 10
    anneal: Share = 0.95
    forget: Share = 0.95
    memory: Count = 100
    dimension: Count = 15
    losses: Floats = field(default_factory=partial(np.zeros, 0), init=False)  # (N,): measured in this round
    changes: Floats = field(default_factory=partial(np.zeros, 0), init=False)  # (r, N): Δl; NaN if unknown
    rounds: Floats = field(default_factory=partial(np.zeros, 0), init=False)  # (r,): their numbers
    embedding: Floats = field(default_factory=partial(np.zeros, 0), init=False)  # (≤ d, N): X
    times: Floats = field(default_factory=partial(np.zeros, 0), init=False)  # (N,): τ
    state: ClassVar[tuple[str, ...]] = ("losses", "changes", "rounds", "embedding", "times")

    def _uniform(self, round: int) -> bool:
        return round >= 0 and (round < self.warmup or round % self.interval == 0)

    def candidates(self, view: Any) -> Ints:
        """Return all clients before and after uniform draws, and none in other rounds."""
        needed = self._uniform(view.round) or self._uniform(view.round - 1)
        return np.asarray(view.available if needed else view.available[:0])

    def draw(self, view: Any) -> Cohort:
        """Learn from the last round if it was uniform, and select."""
        fresh, t = view.fresh("loss"), view.round
        if self._uniform(t - 1) and len(self.losses):
            recent = self.rounds + self.memory >= t - 1
            self.changes = np.vstack([self.changes.reshape(-1, len(fresh))[recent], fresh - self.losses])
            self.rounds = np.append(self.rounds[recent], t - 1.0)
            if t >= self.warmup:
                self._train()
        self.losses = fresh.copy()
        fit, count = view.eligible, min(view.count, len(view.eligible))
        if self._uniform(t) or not len(self.embedding):
            return Cohort(np.sort(view.generator.choice(fit, count, replace=False)).astype(np.int64))
        chosen = self._greedy(view.sizes / view.sizes.sum(), fit, count)
        self.times[chosen] += 1
        return Cohort(np.sort(chosen))

    def _train(self) -> None:
        """Set X to the maximum of the weighted likelihood, and forget how often clients were selected."""
        known, weights = ~np.isnan(self.changes), self.forget ** (self.rounds[-1] - self.rounds)
        filled = np.where(known, self.changes, 0.0)
        filled -= np.where(known, weights @ filled / np.maximum(weights @ known, 1e-300), 0.0)
        _, roots, vectors = np.linalg.svd(np.sqrt(weights / weights.sum())[:, None] * filled, full_matrices=False)
        lengths = np.sqrt(np.maximum(roots**2 - NOISE**2, 0.0))[: self.dimension]
        self.embedding = lengths[:, None] * vectors[: self.dimension]
        self.times = np.zeros(len(self.losses))

    def _greedy(self, share: Floats, fit: Ints, count: int) -> Ints:
        """Select clients one by one; P is the covariance of the kernel's weights given those already selected."""
        X, P, chosen = self.embedding, np.eye(len(self.embedding)), np.zeros(0, np.int64)
        variance, total = (X**2).sum(0) + NOISE**2, X.T @ (X @ share) + NOISE**2 * share
        factor = np.full(len(share), -np.inf)  # of clients that cannot be selected
        factor[fit] = 0.0
        factor, free = self.anneal**self.times, factor == 0
        for _ in range(count):
            score = np.where(free, factor * total / np.sqrt(np.maximum(variance, NOISE**2)), -np.inf)
            k = int(score.argmax())
            toward = P @ X[:, k]
            column = X.T @ toward  # Σ_·k
            column[chosen] = 0.0
            column[k] += NOISE**2
            total, variance = total - column * (column @ share) / column[k], variance - column**2 / column[k]
            P -= np.outer(toward, toward) / column[k]
            chosen, free[k] = np.append(chosen, k), False
        return chosen
