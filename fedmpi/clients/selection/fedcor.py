"""FedCor: selection by correlations of the clients' losses (Tang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi import Cohort, client_sampler

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NOISE, RATE = 0.01, 0.01
"""σ_n, and the learning rate of Adam, as in the authors' code."""


def _none() -> Floats:
    return np.zeros(0)


@client_sampler(name="fedcor", measures=("loss",))
@dataclass(kw_only=True, eq=False)
class FedCor:
    """Select the clients whose losses are correlated with the others' most (Tang et al. 2022, CVPR).

    - The changes Δl of all N clients' losses in a round are a Gaussian process with covariance Σ = XᵀX + σ_n² I. The
      homogeneous linear kernel XᵀX has an embedding x_i ∈ R^d of each client, a column of X (§4.2).
    - Warm-up rounds, and every Δt-th round after them, draw uniformly. All clients are measured before and after them.
      X then maximizes Σ_t γ^(now−t) log N(Δl_t | mean, Σ) over the last M rounds, by Adam from the last X (§4.3).
    - In other rounds, clients are selected one by one: that with the largest β^τ_k Σ_i p_i Σ_ik / √Σ_kk, the expected
      decrease of the global loss with p_i = n_i / n. Σ then becomes the posterior given this client:
      Σ − Σ_·k Σ_k· / Σ_kk (§4.1). τ_k counts the selections of client k since X was trained (annealing, §4.3).

    Deviations
    ----------
    The updates of a uniform round count. After the warm-up, the authors' code discards them, and trains a selected
    cohort in the same round. As in the commands of that code, the prior mean is the mean of a client's changes weighted
    by γ^(now−t), the first training takes more steps, and σ_n and the learning rate are fixed. Clients unavailable
    before or after a round are left out of its likelihood. Clients without samples are never selected. The matrix Σ is
    not formed: the identities of Woodbury and Sylvester give the same likelihood and posterior in O(N d²).

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
    steps, first_steps : int
        Steps of Adam per training, and of the first training.
    """

    warmup: Count = 15
    interval: Annotated[int, Field(ge=2)] = 10
    anneal: Share = 0.95
    forget: Share = 0.95
    memory: Count = 100
    dimension: Count = 15
    steps: Count = 100
    first_steps: Count = 1000
    losses: Floats = field(default_factory=_none, init=False)  # (N,): measured in this round
    changes: Floats = field(default_factory=_none, init=False)  # (r, N): Δl of measured rounds; NaN if unknown
    rounds: Floats = field(default_factory=_none, init=False)  # (r,): their numbers
    embedding: Floats = field(default_factory=_none, init=False)  # (d, N): X
    times: Floats = field(default_factory=_none, init=False)  # (N,): τ
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
                self._train(view.generator)
        self.losses = fresh.copy()
        fit = view.available[view.sizes[view.available] > 0]
        count = min(view.count, len(fit))
        if self._uniform(t) or not len(self.embedding):
            return Cohort(np.sort(view.generator.choice(fit, count, replace=False)).astype(np.int64))
        chosen = self._greedy(view.sizes / view.sizes.sum(), fit, count)
        self.times[chosen] += 1
        return Cohort(np.sort(chosen))

    def _train(self, generator: np.random.Generator) -> None:
        """Maximize the weighted log-likelihood over X, whose gradient is M⁻¹A − (A a) aᵀ per round."""
        shape, known = (self.dimension, self.changes.shape[1]), ~np.isnan(self.changes)
        steps = self.steps if len(self.embedding) else self.first_steps
        if not len(self.embedding):
            self.embedding = generator.standard_normal(shape) / np.sqrt(self.dimension)
        self.times = np.zeros(shape[1])
        weights = self.forget ** (self.rounds[-1] - self.rounds)
        filled = np.where(known, self.changes, 0.0)
        filled -= np.where(known, weights @ filled / np.maximum(weights @ known, 1e-6), 0.0)
        masks, group = np.unique(known, axis=0, return_inverse=True)
        first, second = np.zeros(shape), np.zeros(shape)
        for step in range(1, steps + 1):
            gradient = np.zeros(shape)
            for g, mask in enumerate(masks):
                rows = group.reshape(-1) == g
                y, of = filled[rows][:, mask].T, weights[rows]  # (n, r), (r,)
                A = self.embedding[:, mask]
                inverse = np.linalg.inv(A @ A.T + NOISE**2 * np.eye(len(A))) @ A  # M⁻¹A = AΣ⁻¹
                a = (y - A.T @ (inverse @ y)) / NOISE**2  # Σ⁻¹y
                gradient[:, mask] += of.sum() * inverse - (A @ a * of) @ a.T
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            scale = np.sqrt(second / (1 - 0.999**step)) + 1e-8
            self.embedding = self.embedding - RATE * first / (1 - 0.9**step) / scale

    def _greedy(self, share: Floats, fit: Ints, count: int) -> Ints:
        """Select clients one by one; P is the covariance of the kernel's weights given those already selected."""
        X, P, chosen = self.embedding, np.eye(self.dimension), np.zeros(0, np.int64)
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
