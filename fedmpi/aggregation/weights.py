"""How much each participant's update counts: one coefficient c_k per participant, and whether the sum is normalised.

The server's update is Σ c_k Δ_k, divided by Σ c_k over those who returned when the sum is to be normalised. The sum of
coefficients is about 1, which keeps fixed-point sums in range. All but those of the gradient sum and the unbiased kind
are multiples of 2**-40 or of a power of two, so that Σ c_k has the same bits however it is added up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpi.clients.cohort import Cohort

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

KINDS = ("samples", "uniform", "gradient-sum", "stratified", "normalised", "unbiased", "literal")
POPULATIONS = ("samples", "clients")
GRID_BITS = 40


def is_normalised(kind: str, cohort: Cohort) -> bool:
    """Whether Σ c_k Δ_k is to be divided by Σ c_k over the participants that returned an update.

    Stratified means are, unless a stratum of which somebody was there could have been left without a participant: the
    means of the others then count as often as it takes, and dividing them would undo that.
    """
    if kind == "stratified":
        summary = cohort.strata
        return summary is None or summary.represented is None or bool(np.isin(summary.represented, (0.0, 1.0)).all())
    return kind in ("samples", "uniform", "normalised")


def surplus(kind: str, plan_coefficients: FloatArray) -> float:
    """Σ c_k − 1 where the next model is Σ c_k w_k and not w + Σ c_k Δ_k (FedSSO, Eq 3); 0 of every other kind.

    Σ c_k w_k = w + Σ c_k Δ_k + (Σ c_k − 1) w. A round without participants leaves the model as it is.
    """
    return float(plan_coefficients.sum()) - 1.0 if kind == "literal" and plan_coefficients.size else 0.0


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
    stratified     N_h / (N m_h P_h)                   if P_h = 1  FedSTaS, Algorithm 2; FedSTS
    normalised     ρ_k / (π_k r_h)                     yes         FedSSO, Eq 3 for unequal n_k (Hájek's ratio)
    unbiased       ρ_k / (π_k a_k)                     no          Horvitz-Thompson (Hansen-Hurwitz with replacement)
    literal        (N / m) ρ_k                         no          FedSSO, Eq 3 as printed (with `surplus`)
    =============  ==================================  ==========  =====================================================

    π_k is the probability to be drawn given who is there. What was not there is made up for by r_h, the share of its
    stratum's weight Σ ρ_k that was there (every stratum then has its own share of the mean, whoever of it is there), or
    by a_k, the known probability of being there. P_h is the probability that stratum h has a participant at all, and N
    there counts the clients of the strata of which somebody was there. Where strata leave clients out, ρ_k and N are
    those of the others.

    A participant of whom no sample is used sends nothing and has coefficient 0; as "literal" averages models, it then
    counts as one that sends back the model it was sent, whether or not it holds samples at all.

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
            rho = _population_weights(cohort, sizes, population)
            return sending * _on_grid(rho[cohort.clients] / (cohort.inclusion * _share_there(cohort, rho)))
        case "unbiased":
            chance = None if cohort.presence is None else cohort.presence.chance
            there = cohort.inclusion if chance is None else cohort.inclusion * chance[cohort.clients]
            return sending * _population_weights(cohort, sizes, population)[cohort.clients] / there
        case "literal":
            rho = _population_weights(cohort, sizes, population)
            expansion = _population(cohort, sizes) / max(cohort.draws, 1)
            return cohort.multiplicity * _on_grid(expansion * rho[cohort.clients])
    raise ValueError(f"unknown kind of weights {kind!r}: one of {', '.join(KINDS)}")


def _power_of_two_share(total: int) -> float:
    """The power of two just below 1 / total: products with counts, and their sums, are then exact."""
    return 0.5 ** total.bit_length()


def _on_grid(values: FloatArray) -> FloatArray:
    """Multiples of 2**-40, whose float64 sum does not depend on the order in which ranks add them."""
    return np.rint(values * 2.0**GRID_BITS) / 2.0**GRID_BITS


def _kept(cohort: Cohort) -> NDArray[np.bool_] | None:
    """Which clients can take part at all, (N,), where the strata of the cohort leave some out; else None."""
    groups = None if cohort.presence is None else cohort.presence.groups
    if cohort.stratum is None or groups is None or groups.min() >= 0:
        return None
    return groups >= 0


def _population(cohort: Cohort, sizes: IntArray) -> int:
    """N, the clients that can take part at all."""
    kept = _kept(cohort)
    return sizes.size if kept is None else int(kept.sum())


def _population_weights(cohort: Cohort, sizes: IntArray, population: str) -> FloatArray:
    """ρ_k of all clients, (N,): their share of all samples, or of all clients; 0 for those left out."""
    if population not in POPULATIONS:
        raise ValueError(f"unknown population weights {population!r}: one of {', '.join(POPULATIONS)}")
    counted = sizes if population == "samples" else np.ones_like(sizes)
    kept = _kept(cohort)
    counted = counted if kept is None else np.where(kept, counted, 0)
    share: FloatArray = counted / int(counted.sum())
    return share


def _share_there(cohort: Cohort, rho: FloatArray) -> FloatArray | float:
    """Σ ρ_k over those of the participant's group who were there, over Σ ρ_k of the whole group; (m,), or 1."""
    presence = cohort.presence
    if presence is None or presence.groups is None or isinstance(presence.present, int):
        return 1.0
    group, present = presence.groups + 1, presence.present
    whole = np.bincount(group, rho)
    there = np.bincount(group[present], rho[present], minlength=whole.size)
    share = np.divide(there, whole, out=np.ones_like(whole), where=there > 0)  # without any ρ_k nothing is weighed
    return np.asarray(share[group[cohort.clients]])


def _stratum_weights(cohort: Cohort) -> FloatArray:
    """N_h / (N m_h P_h) of each participant's stratum, m_h counted in the cohort itself."""
    if cohort.stratum is None or cohort.strata is None:
        raise ValueError("stratified weights need a cohort drawn from strata")
    sizes, represented = cohort.strata.sizes, cohort.strata.represented
    represented = np.ones(sizes.size) if represented is None else represented
    drawn = np.bincount(cohort.stratum, cohort.multiplicity, minlength=sizes.size)
    of_stratum = sizes / max(1, int(sizes[represented > 0].sum()))
    h = cohort.stratum
    weights: FloatArray = of_stratum[h] / (drawn[h] * represented[h])
    return weights
