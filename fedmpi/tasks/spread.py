"""How a number spreads over clients: mean, deviation, the worst and the best tenth, Jain's index."""

from __future__ import annotations

import math

import numpy as np

from fedmpi.common.types import Floats

SPREADS = ("mean", "weighted", "std", "worst10", "best10", "jain")


def spread_over_clients(values: Floats, weights: Floats, best: str = "largest") -> dict[str, float]:
    """How a number spreads over K clients, each counted once but in "weighted".

    Parameters
    ----------
    values : float64 (K,)
        One a client, K ≥ 1.
    weights : float64 (K,)
        Samples of each.
    best : {"largest", "smallest"}
        Whether large numbers are good (accuracies) or small ones (losses).

    Returns
    -------
    dict
        "mean"; "weighted": Σ n v / Σ n; "std": √(Σ (v − mean)² / K); "worst10", "best10": means of the ⌈K/10⌉ worst and
        of the ⌈K/10⌉ best (the tenths of Li et al. 2020, q-FFL, Table 1); "jain": (Σ v)² / (K Σ v²) of Jain et al.
        1984, 1 where all are the same and 1/K where one has all there is. NaN where a client's is; "std" and "jain"
        also where one is infinite.
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
