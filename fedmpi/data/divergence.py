"""How far the class counts of a client or a mediator are from a target distribution.

Kullback-Leibler divergence: Duan et al. 2019 (Astraea), section III-B and Fig 7, in nats. Sum of the distances of all
shares: Zhao et al. 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.types import AnyArray, Floats, Ints

Counts = NDArray[np.integer]


def target_distribution(classes: int, counts: AnyArray | None = None) -> Floats:
    """The distribution that mediators should come close to.

    Parameters
    ----------
    classes : int
        C.
    counts : array (C,), optional
        Class counts to follow, for example those of the test set; None means uniform (P_u of the paper).

    Returns
    -------
    float64 (C,)
        Probabilities.

    Raises
    ------
    ValueError
        If the counts are not C finite numbers >= 0 with a positive sum.
    """
    if counts is None:
        return np.full(classes, 1 / classes)
    weights = np.asarray(counts, np.float64)
    if weights.shape != (classes,) or not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() == 0:
        raise ValueError(f"a target distribution needs {classes} counts >= 0, one of them positive, not {counts}")
    probabilities: Floats = weights / weights.sum()
    return probabilities


def kl_divergence(counts: AnyArray, target: Floats | None = None) -> Floats:
    """D_KL(P || Q) of every row's class distribution P from the target Q, in nats."""
    from scipy.special import xlogy  # slow to import, and most runs have no mediators

    counts = np.asarray(counts, np.float64)
    target = target_distribution(counts.shape[-1]) if target is None else target
    totals = counts.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = counts / totals[..., None]
        surprise = -xlogy(shares, target).sum(axis=-1)
        divergence: Floats = surprise + xlogy(shares, shares).sum(axis=-1)
    return np.maximum(divergence, 0.0)


def divergences(counts: Counts, reference: Floats) -> Floats:
    """KL(p_k || reference) in nats for clients with class counts (m, C), (m,); infinite where mass is missing."""
    client, label, held, size = _entries(counts)
    with np.errstate(divide="ignore"):
        terms = held * (np.log(held) - np.log(reference)[label])
        divergence: Floats = np.bincount(client, terms, len(counts)) / size - np.log(size)
    return divergence


def label_distances(counts: Counts, reference: Floats) -> Floats:
    """sum_c |p_k(c) - reference(c)| for clients with class counts (m, C), float64 (m,) in [0, 2]."""
    client, label, held, size = _entries(counts)
    expected = reference[label]
    surplus = np.abs(held / size[client] - expected) - expected
    distance: Floats = reference.sum() + np.bincount(client, surplus, len(counts))
    return distance


def _entries(counts: Counts) -> tuple[Ints, Ints, Floats, Floats]:
    """Client, class and value of the counts above zero, and the clients' sizes: of many small clients most are zero."""
    flat = np.flatnonzero(np.ascontiguousarray(counts).reshape(-1) != 0)
    client, label = np.divmod(flat, counts.shape[1])
    held = counts.reshape(-1)[flat].astype(np.float64)
    size = np.bincount(client, held, len(counts)).astype(np.float64)
    return client, label, held, size


@dataclass(frozen=True)
class DivergenceSummary:
    """Mean, standard deviation and largest value of some divergences (Fig 7 of the paper shows their distribution).

    Attributes
    ----------
    mean, std, max : float
        In nats; NaN when there is nothing to summarise.
    quartiles : tuple of 5 float
        Smallest value, lower quartile, median, upper quartile, largest value: a box of Fig 7.
    """

    mean: float
    std: float
    max: float
    quartiles: tuple[float, ...]

    def facts(self, name: str) -> dict[str, float | list[float]]:
        """The entries of a record whose keys begin with `name`."""
        return {
            f"{name}_mean": self.mean,
            f"{name}_std": self.std,
            f"{name}_max": self.max,
            f"{name}_quartiles": list(self.quartiles),
        }


def summarise(divergences: Floats) -> DivergenceSummary:
    """Summary over the rows that have a distribution (NaN entries are left out)."""
    known = divergences[~np.isnan(divergences)]
    if len(known) == 0:
        nothing = float("nan")
        return DivergenceSummary(nothing, nothing, nothing, (nothing,) * 5)
    with np.errstate(invalid="ignore"):  # the spread of an infinite divergence is NaN
        quartiles = tuple(np.quantile(known, [0, 0.25, 0.5, 0.75, 1]).tolist())
        return DivergenceSummary(float(known.mean()), float(known.std()), float(known.max()), quartiles)


def pooled_counts(class_counts: Ints, groups: Ints) -> Ints:
    """Class counts of every group's pooled data."""
    pooled = np.zeros((int(groups.max(initial=-1)) + 1, class_counts.shape[1]), np.int64)
    np.add.at(pooled, groups, class_counts)
    return pooled
