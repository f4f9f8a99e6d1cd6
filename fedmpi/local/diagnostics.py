"""Numbers that say how a run is going: how evenly clients and samples are used, how far clients drift apart, how
heterogeneous they are. All follow from sums over participants, so that no list of client models is ever kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Evenness:
    """How evenly something was used.

    Attributes
    ----------
    used : float
        Share of the units used at least once, in [0, 1].
    effective : float
        (Σ u)² / (units · Σ u²) in [0, 1]: the effective sample size (Kish 1965) as a share of all units; 1 = all used
        equally often, 1/units = a single one used. 0 before anything was used.
    gini : float
        Gini coefficient of the usage in [0, 1): 0 = all used equally often. 0 before anything was used.
    largest : int
        Most frequent use of a unit.
    """

    used: float
    effective: float
    gini: float
    largest: int


def evenness(usage: Ints, units: Ints | None = None) -> Evenness:
    """Evenness of usage counts.

    Parameters
    ----------
    usage : ndarray of int64, shape (g,)
        How often each group's units were used.
    units : ndarray of int64, shape (g,), optional
        Units in each group (default 1): with clients as groups and their sizes as units, the evenness of sample use
        when a participant uses all its samples.
    """
    weight = np.ones(len(usage)) if units is None else units.astype(np.float64)
    total_units, total = weight.sum(), float((weight * usage).sum())
    if total == 0:
        return Evenness(0.0, 0.0, 0.0, 0)
    used = float(weight[usage > 0].sum() / total_units)
    effective = float(total**2 / (total_units * (weight * usage.astype(np.float64) ** 2).sum()))
    return Evenness(used, effective, _gini(usage, weight), int(usage[weight > 0].max()))


def _gini(usage: Ints, weight: Floats) -> float:
    """One minus twice the area under the Lorenz curve."""
    order = np.argsort(usage, kind="stable")
    population = weight[order] / weight.sum()
    lorenz = np.cumsum(weight[order] * usage[order])
    lorenz /= lorenz[-1]
    return float(max(0.0, 1.0 - (population * (lorenz + np.concatenate([[0.0], lorenz[:-1]]))).sum()))


class Usage:
    """Counts how often each client took part and, if wanted, how often each sample was used.

    Parameters
    ----------
    clients : int
        N.
    samples : int
        n, or 0 when samples are not counted (8 bytes each).
    """

    def __init__(self, clients: int, samples: int = 0):
        self.clients = np.zeros(clients, np.int64)
        self.samples = np.zeros(samples, np.int64)

    def record(self, clients: Ints, multiplicity: Ints | None = None) -> None:
        """Count a round's participants (sorted and unique), each `multiplicity` times."""
        self.clients[clients] += 1 if multiplicity is None else multiplicity

    def record_samples(self, positions: Ints) -> None:
        """Count the samples at these global positions, once for every occurrence."""
        np.add.at(self.samples, positions, 1)


@dataclass(frozen=True)
class UpdateMoments:
    """Sums over the participants' local changes Δ_k with coefficients c_k; the sums of several ranks add up.

    Attributes
    ----------
    weight : float
        Σ c_k.
    weighted_squares : float
        Σ c_k ‖Δ_k‖².
    term_squares : float
        Σ ‖c_k Δ_k‖².
    weighted_gain : float
        Σ c_k (F_k(w) − F_k(w_k)): how much less each client loses on its own data with its own model.
    """

    weight: float = 0.0
    weighted_squares: float = 0.0
    term_squares: float = 0.0
    weighted_gain: float = 0.0

    def __add__(self, other: UpdateMoments) -> UpdateMoments:
        return UpdateMoments(
            self.weight + other.weight,
            self.weighted_squares + other.weighted_squares,
            self.term_squares + other.term_squares,
            self.weighted_gain + other.weighted_gain,
        )


def update_moments(norms: Floats, coefficients: Floats, gains: Floats | None = None) -> UpdateMoments:
    """The sums of `UpdateMoments` from ‖Δ_k‖, c_k and F_k(w) − F_k(w_k), all (m,)."""
    squares = norms**2
    return UpdateMoments(
        float(coefficients.sum()),
        float((coefficients * squares).sum()),
        float((coefficients**2 * squares).sum()),
        0.0 if gains is None else float((coefficients * gains).sum()),
    )


def gradient_diversity(moments: UpdateMoments, update_norm: float) -> float:
    """Σ‖c_k Δ_k‖² / ‖Σ c_k Δ_k‖² (Yin et al. 2018, Definition 1): 1/m for m equal changes, 1 for orthogonal ones.

    `update_norm` is ‖Σ c_k Δ_k‖. Infinite when the changes cancel out.
    """
    if moments.term_squares == 0:
        return 0.0
    return moments.term_squares / update_norm**2 if update_norm > 0 else float("inf")


def client_drift(moments: UpdateMoments, update_norm: float) -> float:
    """Σ p_k ‖w_k − w̄‖² with p_k = c_k / Σ c and w̄ = Σ p_k w_k: the mean squared distance of the local models from their
    mean (FedSSO, Lemma 3, Eq 24), as Σ p_k ‖Δ_k‖² − ‖Σ p_k Δ_k‖². `update_norm` is ‖Σ c_k Δ_k‖."""
    if moments.weight <= 0:
        return 0.0
    return max(0.0, moments.weighted_squares / moments.weight - (update_norm / moments.weight) ** 2)


def local_gain(moments: UpdateMoments) -> float:
    """Σ p_k (F_k(w) − F_k(w_k)) with p_k = c_k / Σ c, what stands in for Γ during a run (see `heterogeneity`): equal to
    it when w is the best global model and local training ends at each client's own."""
    return moments.weighted_gain / moments.weight if moments.weight > 0 else 0.0


def heterogeneity(global_minimum: float, local_minima: Floats, weights: Floats) -> float:
    """Γ = F* − Σ ρ_k F_k* (FedSSO, Lemma 4; Li et al. 2020): 0 when one model is best for every client.

    During a run F(w) and the participants' losses after local training stand in for the minima (`local_gain`).

    Parameters
    ----------
    global_minimum : float
        F*.
    local_minima : ndarray of float64, shape (m,)
        F_k*.
    weights : ndarray of float64, shape (m,)
        ρ_k; divided by their sum.
    """
    return float(global_minimum - np.average(local_minima, weights=weights))


def weight_divergence(model: NDArray[np.floating], reference: NDArray[np.floating]) -> float:
    """‖w − w_ref‖ / ‖w_ref‖ (Zhao et al. 2018, Eq 3), e.g. against centralized training. Shapes (d,)."""
    difference = np.asarray(model, np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(reference, np.float64)))
