"""Diagnostics of a run: how far clients drift apart and how heterogeneous they are. All follow from sums over selected
clients, so no list of client models is ever kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.types import Floats


@dataclass(frozen=True)
class UpdateMoments:
    """Sums over the selected clients' local changes Δ_k with coefficients c_k; the sums of several ranks add up.

    Attributes
    ----------
    weight : float
        Σ c_k.
    weighted_squares : float
        Σ c_k ‖Δ_k‖².
    term_squares : float
        Σ ‖c_k Δ_k‖².
    weighted_gain : float
        Σ c_k (F_k(w) − F_k(w_k)): decrease of each client's loss on its own data with its own model.
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
    """Compute the sums of `UpdateMoments` from ‖Δ_k‖, c_k and F_k(w) − F_k(w_k), all (m,)."""
    squares = norms**2
    return UpdateMoments(
        float(coefficients.sum()),
        float((coefficients * squares).sum()),
        float((coefficients**2 * squares).sum()),
        0.0 if gains is None else float((coefficients * gains).sum()),
    )


def gradient_diversity(moments: UpdateMoments, update_norm: float) -> float:
    """Return Σ‖c_k Δ_k‖² / ‖Σ c_k Δ_k‖² (Yin et al. 2018, Def. 1): 1/m for m equal changes, 1 for orthogonal ones.

    `update_norm` is ‖Σ c_k Δ_k‖. The result is infinite if the changes cancel out.
    """
    if moments.term_squares == 0:
        return 0.0
    return moments.term_squares / update_norm**2 if update_norm > 0 else float("inf")


def client_drift(moments: UpdateMoments, update_norm: float) -> float:
    """Return Σ p_k ‖w_k − w̄‖² with p_k = c_k / Σ c and w̄ = Σ p_k w_k: the mean squared distance of the local models
    from their mean (FedSSO, Lemma 3, Eq 24), as Σ p_k ‖Δ_k‖² − ‖Σ p_k Δ_k‖². `update_norm` is ‖Σ c_k Δ_k‖."""
    if moments.weight <= 0:
        return 0.0
    return max(0.0, moments.weighted_squares / moments.weight - (update_norm / moments.weight) ** 2)


def local_gain(moments: UpdateMoments) -> float:
    """Return Σ p_k (F_k(w) − F_k(w_k)) with p_k = c_k / Σ c, which replaces Γ = F* − Σ p_k F_k* of FedSSO, Lemma 4.

    It equals Γ if w is the best global model and local training ends at each client's own.
    """
    return moments.weighted_gain / moments.weight if moments.weight > 0 else 0.0


def weight_divergence(model: NDArray[np.floating], reference: NDArray[np.floating]) -> float:
    """Return ‖w − w_ref‖ / ‖w_ref‖ (Zhao et al. 2018, Eq 3), e.g. against centralized training. Shapes (d,)."""
    difference = np.asarray(model, np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(reference, np.float64)))
