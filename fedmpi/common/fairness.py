"""Fairness of participation and of scores: Gini coefficient, effective share (Kish 1965), usage counts, worst and best
10 % of clients, Jain's index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedmpi.common.types import Floats, Ints

SPREADS = ("mean", "weighted", "std", "worst10", "best10", "jain")


@dataclass(frozen=True)
class Evenness:
    """Fairness of the counts u of uses of n units; all are 0 before anything was used."""

    used: float  # Share of the units used at least once
    effective: float  # (Σ u)² / (n · Σ u²), the effective sample size (Kish 1965) as a share: 1 if all are used equally
    gini: float  # Gini coefficient: 0 if all are used equally often
    largest: int  # Most frequent use of a unit


def evenness(usage: Ints) -> Evenness:
    """Return the fairness of usage counts."""
    total = float(usage.sum())
    if total == 0:
        return Evenness(0.0, 0.0, 0.0, 0)
    effective = total**2 / (len(usage) * float((usage.astype(np.float64) ** 2).sum()))
    return Evenness(float((usage > 0).mean()), effective, gini(usage), int(usage.max()))


def gini(values: Ints) -> float:
    """Return the Gini coefficient of non-negative values (g,): one minus twice the area under the Lorenz curve; 0 if
    all are 0."""
    lorenz = np.cumsum(np.sort(values), dtype=np.float64)
    if not len(lorenz) or lorenz[-1] == 0:
        return 0.0
    lorenz /= lorenz[-1]
    return float(max(0.0, 1.0 - (lorenz + np.concatenate([[0.0], lorenz[:-1]])).mean()))


class Usage:
    """Counts of the rounds in which each client was selected."""

    def __init__(self, clients: int):
        self.clients = np.zeros(clients, np.int64)

    def record(self, clients: Ints, multiplicity: Ints) -> None:
        """Count a round's selected clients (sorted and unique), each `multiplicity` times."""
        self.clients[clients] += multiplicity

    def state(self) -> dict[str, Ints]:
        """Return the counts, for a checkpoint."""
        return {"clients": self.clients}

    def load(self, state: dict[str, Ints]) -> None:
        """Restore the counts of a checkpoint."""
        self.clients[:] = state["clients"]


def spread_over_clients(values: Floats, weights: Floats, best: str = "largest") -> dict[str, float]:
    """Return the distribution of values v (K,) over clients with n (K,) samples; `best` is "largest" or "smallest".

    "mean"; "weighted": Σ n v / Σ n; "std": √(Σ (v − mean)² / K); "worst10", "best10": means of the ⌈K/10⌉ worst and of
    the ⌈K/10⌉ best (Li et al. 2020, q-FFL, Table 1); "jain": (Σ v)² / (K Σ v²) of Jain et al. 1984, 1 if all are equal
    and 1/K if one has everything. NaN if the value of a client is NaN; "std" and "jain" also if one is infinite.
    """
    if np.isnan(values).any():
        return dict.fromkeys(SPREADS, math.nan)
    tenth = math.ceil(len(values) / 10)
    low, high = np.sort(values)[:tenth].mean(), np.sort(-values)[:tenth].mean() * -1
    worst, good = (low, high) if best == "largest" else (high, low)
    with np.errstate(over="ignore", invalid="ignore"):  # losses of a model that has diverged
        squares = (values**2).sum()
        return {
            "mean": float(values.mean()),
            "weighted": float(values @ weights / weights.sum()),
            "std": float(values.std()),
            "worst10": float(worst),
            "best10": float(good),
            "jain": float(values.sum() ** 2 / (len(values) * squares)) if squares else 1.0,
        }
