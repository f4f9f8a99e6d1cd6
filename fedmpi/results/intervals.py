"""What few seeds say about a difference: spreads, paired t intervals, and the F test of two spreads.

Systems that were run with the same seeds share partition and initial model, so their difference is taken seed by seed;
where only means and spreads are left of runs, Welch's interval takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean of the differences per seed, with a t interval.

    Attributes
    ----------
    n : int
        Seeds.
    mean, low, high : float
        Mean difference and the ends of the interval, in the unit of the values.
    """

    n: int
    mean: float
    low: float
    high: float

    @property
    def supported(self) -> bool:
        """The interval leaves zero out."""
        return self.low > 0 or self.high < 0


def paired(values: Sequence[float], reference: Sequence[float], level: float = LEVEL) -> Difference:
    """Student's interval of `values - reference`, seed by seed: mean ± t_{n - 1} s/√n.

    Parameters
    ----------
    values, reference : sequence of float (n,)
        What two systems reached, in the same order of seeds; n >= 2.

    Raises
    ------
    ValueError
        Unlike numbers of seeds, or fewer than two.
    """
    if len(values) != len(reference) or len(values) < 2:
        raise ValueError(f"{len(values)} and {len(reference)} seeds: a paired interval needs the same two or more")
    differences = np.asarray(values, float) - np.asarray(reference, float)
    n, mean = len(differences), float(differences.mean())
    half = float(special.stdtrit(n - 1, (1 + level) / 2) * differences.std(ddof=1) / np.sqrt(n))
    return Difference(n, mean, mean - half, mean + half)


@dataclass(frozen=True)
class SpreadRatio:
    """Ratio of two variances and the two-sided p of F = 1."""

    ratio: float
    p: float


def spread_ratio(values: Sequence[float], reference: Sequence[float]) -> SpreadRatio:
    """F test of equal variances: var(values)/var(reference) against F with n - 1 and m - 1 degrees of freedom.

    It takes both samples for normal and for independent of each other.

    Raises
    ------
    ValueError
        Fewer than two values on a side, or a reference without spread.
    """
    if min(len(values), len(reference)) < 2:
        raise ValueError("a ratio of spreads needs two seeds or more on either side")
    below = float(np.var(reference, ddof=1))
    if below == 0:
        raise ValueError("the reference has no spread: a ratio to it says nothing")
    ratio = float(np.var(values, ddof=1)) / below
    degrees = len(values) - 1, len(reference) - 1
    return SpreadRatio(ratio, float(2 * min(special.fdtr(*degrees, ratio), special.fdtrc(*degrees, ratio))))


def welch(ours: tuple[float, float, int], theirs: tuple[float, float, int], level: float = LEVEL) -> Difference:
    """Welch's interval of a difference of means known by (mean, standard deviation, n) only: unpaired, unlike spreads.

    Raises
    ------
    ValueError
        Fewer than two values on a side, or no spread on both.
    """
    (mean, deviation, n), (other, spread_of_other, m) = ours, theirs
    if min(n, m) < 2 or deviation == spread_of_other == 0:
        raise ValueError("an interval needs two seeds or more on either side, and a spread")
    first, second = deviation**2 / n, spread_of_other**2 / m
    degrees = (first + second) ** 2 / (first**2 / (n - 1) + second**2 / (m - 1))
    half = float(special.stdtrit(degrees, (1 + level) / 2) * np.sqrt(first + second))
    return Difference(min(n, m), mean - other, mean - other - half, mean - other + half)
