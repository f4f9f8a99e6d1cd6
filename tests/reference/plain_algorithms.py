"""SCAFFOLD, FedDyn and FedNova in plain float64 arithmetic, for the plain loop: written from the papers.

Karimireddy et al. 2020, Algorithm 1, option II; Acar et al. 2021, Algorithm 1; Wang et al. 2020, the normalized update
with a_k of plain SGD and of SGD with a proximal term.
"""

from __future__ import annotations

import numpy as np

from fedmpi import Config


class PlainAlgorithm:
    """State of an algorithm on clients and server, and its use of a round's changes."""

    def __init__(self, config: Config, clients: int, values: int):
        name = config.local.algorithm.name
        self.kind = name.rpartition(":")[2].lower()
        self.alpha = float(config.local.algorithm.options.get("alpha", 0.1))
        self.mu = config.local.proximal_mu
        self.clients, self.server = clients, np.zeros(values)
        self.kept: dict[int, np.ndarray] = {}
        self.changes: list[tuple[int, np.ndarray, int, float]] = []
        self.increase = np.zeros(values)

    def of(self, k: int) -> np.ndarray:
        """c_k or g_k."""
        return self.kept.get(k, np.zeros_like(self.server))

    def term(self, k: int, moved: np.ndarray) -> np.ndarray | float:
        """Return the addition to a local gradient if the model is `moved` away from the one sent."""
        d = len(moved)
        if self.kind == "scaffold":
            return (self.server - self.of(k))[:d]
        return self.alpha * moved - self.of(k)[:d] if self.kind == "feddyn" else 0.0

    def note(self, k: int, change: np.ndarray, steps: int, rate: float, factor: float) -> None:
        """A client has done `steps` steps of rate η, which made Δ_k."""
        if self.kind == "scaffold":
            new = self.of(k) - self.server - change / (steps * rate)
            self.increase = self.increase + new - self.of(k)
            self.kept[k] = new
        if self.kind == "feddyn":
            self.kept[k] = self.of(k) - self.alpha * change
        length = sum((1 - rate * self.mu) ** j for j in range(steps))
        self.changes.append((k, change, length, factor))

    def update(self, mean: np.ndarray, divisor: float) -> np.ndarray:
        """The update that the server takes; ends the round."""
        changes, self.changes = self.changes, []
        if not changes:
            return mean
        if self.kind == "scaffold":
            self.server = self.server + self.increase / self.clients
            self.increase = np.zeros_like(self.server)
        if self.kind == "feddyn":
            moved = sum(change for _, change, _, _ in changes)
            self.server = self.server - self.alpha * moved / self.clients
            return moved / len(changes) - self.server / self.alpha
        if self.kind == "fednova":
            effective = sum(f * length for _, _, length, f in changes) / sum(f for _, _, _, f in changes)
            return effective * sum(factor / divisor * change / length for _, change, length, factor in changes)
        return mean

    def vectors(self) -> tuple[int, int, int]:
        """Vectors sent to each client beside the model, vectors and numbers that come back beside the update."""
        return {"scaffold": (1, 1, 0), "fednova": (0, 1, 1)}.get(self.kind, (0, 0, 0))
