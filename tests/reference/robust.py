"""Attacks on updates, robust aggregators and q-FedAvg's step, in plain loops and float64.

Yin et al. 2018 (median, trimmed mean), Blanchard et al. 2017 (Krum), Sun et al. 2019 (clipped norms), Li et al. 2020
("Fair Resource Allocation in Federated Learning").
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedmpi import Config
from tests.reference.plain_data import ATTACK, stream


def lie(config: Config, t: int, k: int, change: np.ndarray) -> np.ndarray:
    """Return the update that an attacker sends instead of its Δ."""
    if config.attack.name == "sign-flip":
        return -config.attack.options["scale"] * change
    if config.attack.name == "noise":
        return config.attack.options["scale"] * stream(config.seed, ATTACK, 1 + t, k).standard_normal(len(change))
    return change


def combine(config: Config, changes: list[np.ndarray], shares: list[float]) -> np.ndarray:
    """The update that the rule makes of all updates, coordinate after coordinate."""
    rule, options, m = config.server.aggregator.name, config.server.aggregator.options, len(changes)
    columns = [sorted(column) for column in np.transpose(changes).tolist()]
    if rule == "median":
        return np.array([(c[(m - 1) // 2] + c[m // 2]) / 2 for c in columns])
    if rule == "trimmed-mean":
        cut = min(math.ceil(options.get("trim", 0.1) * m - 1e-9), (m - 1) // 2)
        return np.array([math.fsum(c[cut : m - cut]) / (m - 2 * cut) for c in columns])
    if rule == "krum":
        return np.mean([changes[i] for i in _krum(changes, options["byzantine"])[: options.get("keep", 1)]], axis=0)
    if rule == "norm-clip":
        factors = [min(1.0, options["bound"] / float(np.linalg.norm(change))) for change in changes]
        return np.sum([s * f * c for s, f, c in zip(shares, factors, changes, strict=True)], axis=0)
    raise ValueError(rule)


def _krum(changes: list[np.ndarray], byzantine: int) -> list[int]:
    """Participants by the sum of squared distances to their m − f − 2 nearest others."""
    m, scores = len(changes), []
    for i in range(m):
        others = sorted(float(((changes[i] - changes[j]) ** 2).sum()) for j in range(m) if j != i)
        scores.append(math.fsum(others[: m - byzantine - 2]))
    return sorted(range(m), key=lambda i: (scores[i], i))


def fair_mean(config: Config, lr: float, changes: list[np.ndarray], losses: list[float], times: list[Any]) -> Any:
    """Σ L F^q Δ / Σ (q F^{q−1} L² ‖Δ‖² + L F^q), every client as often as it was drawn."""
    options = config.server.weights.options
    q, bound = options.get("q", 1.0), options.get("lipschitz") or 1 / lr
    step, total = np.zeros_like(changes[0]), 0.0
    for change, loss, often in zip(changes, losses, times, strict=True):
        step = step + often * bound * loss**q * change
        total += often * (q * loss ** (q - 1) * bound**2 * float(change @ change) + bound * loss**q)
    return step / total
