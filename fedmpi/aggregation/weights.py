"""How much each participant's update counts: one coefficient c_k per participant, and whether the sum is normalised.

The server's update is Σ c_k Δ_k, divided by Σ c_k over those who returned when the kind is normalised. Coefficients are
scaled so that their sum is about 1, which keeps fixed-point sums in range; those of a normalised kind are multiples of
2**-40 or of a power of two, so that Σ c_k has the same bits however the participants are spread over ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpi.participation.clients import Cohort

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

KINDS = ("samples", "uniform", "gradient-sum", "stratified", "normalised", "unbiased", "literal")
POPULATIONS = ("samples", "clients")
GRID_BITS = 40


def is_normalised(kind: str) -> bool:
    """Whether Σ c_k Δ_k is to be divided by Σ c_k over the participants that returned an update."""
    return kind in ("samples", "uniform", "stratified", "normalised")


def coefficients(
    kind: str,
    cohort: Cohort,
    sizes: IntArray,
    used: IntArray | None = None,
    wanted: int | None = None,
    population: str = "samples",
) -> FloatArray:
    """The coefficient of every participant's update.

    =============  ==================================  ==========  =====================================================
    kind           c_k (times the multiplicity)        normalised  source
    =============  ==================================  ==========  =====================================================
    samples        samples used                        yes         McMahan et al. 2017, Algorithm 1
    uniform        1                                   yes         FedSampling §3.3; Li et al. 2020, Scheme I
    gradient-sum   samples used / K                    no          FedSampling, Algorithm 1 (with one full-batch step)
    stratified     N_h / (N m_h)                       yes         FedSTaS, Algorithm 2; FedSTS
    normalised     ρ_k / π_k                           yes         FedSSO, Eq 3 for unequal n_k (Hájek's ratio)
    unbiased       ρ_k / π_k                           no          Horvitz-Thompson (Hansen-Hurwitz with replacement)
    literal        (N / m) ρ_k                         no          FedSSO, Eq 3 as printed
    =============  ==================================  ==========  =====================================================

    A participant of whom no sample is used sends nothing and has coefficient 0.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    cohort : Cohort
        The m participants.
    sizes : int64 (N,)
        Samples of every client of the population.
    used : int64 (m,), optional
        Samples each participant trains on; None means all it has. A worker that knows only its own participants' counts
        may put 0 for the others and read its own part of the result.
    wanted : int, optional
        K, needed by "gradient-sum".
    population : str
        The population weights ρ_k that "normalised", "unbiased" and "literal" estimate: "samples" for n_k / n (the
        usual federated objective) or "clients" for 1 / N (the target of FedSTaS's stratified mean).

    Returns
    -------
    float64 (m,)

    Raises
    ------
    ValueError
        If the kind or population is unknown, or something it needs is missing.
    """
    used = sizes[cohort.clients] if used is None else used
    if kind == "samples":
        share = _power_of_two_share(int(sizes[cohort.clients].sum()))
        return (cohort.multiplicity * used).astype(np.float64) * share
    if kind == "gradient-sum":
        if not wanted:
            raise ValueError("the gradient sum needs the number of samples wanted, K")
        return cohort.multiplicity * used / wanted
    sending = np.where(used > 0, cohort.multiplicity, 0)
    match kind:
        case "uniform":
            return sending * _on_grid(np.full(cohort.clients.size, 1 / max(cohort.draws, 1)))
        case "stratified":
            return sending * _on_grid(_stratum_weights(cohort))
        case "normalised":
            return sending * _on_grid(_population_weights(cohort, sizes, population) / cohort.inclusion)
        case "unbiased":
            return sending * _population_weights(cohort, sizes, population) / cohort.inclusion
        case "literal":
            expansion = sizes.size / max(cohort.draws, 1)
            return sending * expansion * _population_weights(cohort, sizes, population)
    raise ValueError(f"unknown kind of weights {kind!r}: one of {', '.join(KINDS)}")


def _power_of_two_share(total: int) -> float:
    """The power of two just below 1 / total: products with counts, and their sums, are then exact."""
    return 0.5 ** total.bit_length()


def _on_grid(values: FloatArray) -> FloatArray:
    """Multiples of 2**-40, whose float64 sum does not depend on the order in which ranks add them."""
    return np.rint(values * 2.0**GRID_BITS) / 2.0**GRID_BITS


def _population_weights(cohort: Cohort, sizes: IntArray, population: str) -> FloatArray:
    """ρ_k of the participants: their share of all samples, or of all clients."""
    if population == "samples":
        share: FloatArray = sizes[cohort.clients] / int(sizes.sum())
        return share
    if population == "clients":
        return np.full(cohort.clients.size, 1 / sizes.size)
    raise ValueError(f"unknown population weights {population!r}: one of {', '.join(POPULATIONS)}")


def _stratum_weights(cohort: Cohort) -> FloatArray:
    """N_h / (N m_h) of each participant's stratum, m_h counted in the cohort itself."""
    if cohort.stratum is None or cohort.strata is None:
        raise ValueError("stratified weights need a cohort drawn from strata")
    strata = cohort.strata
    drawn = np.bincount(cohort.stratum, cohort.multiplicity, minlength=strata.sizes.size)
    weights: FloatArray = strata.sizes[cohort.stratum] / (strata.sizes.sum() * drawn[cohort.stratum])
    return weights
