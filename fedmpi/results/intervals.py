"""Differences between methods over few seeds: paired t intervals, corrected for the number of comparisons.

Methods that were run with the same seeds share partition and initial model, so their difference is taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean difference with its t interval."""

    n: int  # Seeds
    mean: float  # Mean difference and its standard error, in the unit of the values
    error: float
    level: float = LEVEL  # Confidence level of the interval

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return float(special.stdtrit(self.n - 1, (1 + self.level) / 2)) * self.error

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference, not corrected."""
        return float(2 * special.stdtr(self.n - 1, -abs(self.mean) / self.error))

    @property
    def significant(self) -> bool:
        """The interval excludes zero."""
        return self.low > 0 or self.high < 0


def corrected(found: Sequence[Difference], rate: float = 1 - LEVEL) -> list[Difference]:
    """Widen the intervals of one table so that its false discovery rate is at most `rate`.

    Benjamini and Hochberg (1995) reject R of the m hypotheses of no difference. Each interval gets the level
    1 - R rate/m of Benjamini and Yekutieli (2005), with R = 1 where none is rejected. So exactly R intervals exclude
    zero. A single difference keeps its interval.
    """
    m = len(found)
    passed = np.flatnonzero(np.sort([one.p for one in found]) <= rate * np.arange(1, m + 1) / max(m, 1))
    rejected = passed[-1] + 1 if len(passed) else 1
    return [replace(one, level=float(1 - rejected * rate / m)) for one in found]


def paired(values: Sequence[float], reference: Sequence[float], level: float = LEVEL) -> Difference:
    """Return the mean of `values - reference` with Student's interval: mean ± t_{n - 1} s/√n.

    Parameters
    ----------
    values, reference : sequence of float (n,)
        Results of two methods, in the same order of seeds; n >= 2.

    Raises
    ------
    ValueError
        Different numbers of seeds, or fewer than two.
    """
    if len(values) != len(reference) or len(values) < 2:
        raise ValueError(f"{len(values)} and {len(reference)} seeds: a paired interval needs the same two or more")
    differences = np.asarray(values, float) - np.asarray(reference, float)
    n = len(differences)
    return Difference(n, float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(n)), level)
