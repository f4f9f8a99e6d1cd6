"""Cohorts that hold the classes as evenly as exchanges make them; a sampler for `clients.sampler`. Start it in
the repository.
"""

from __future__ import annotations

import numpy as np

from fedmpi.clients.cohort import Cohort
from fedmpi.clients.sampler import View
from fedmpi.common.decorators import client_sampler


@client_sampler
def even(view: View, *, exchanges: int = 2000) -> Cohort:
    """Select a uniform cohort, then exchange random clients if this makes the pooled classes more even.

    Parameters
    ----------
    exchanges : int
        Number of exchanges that are tried.
    """
    held = view.class_counts
    cohort = view.generator.choice(view.available, view.count, replace=False)
    pooled = held[cohort].sum(axis=0)
    for _ in range(exchanges):
        place, other = view.generator.integers(view.count), view.generator.choice(view.available)
        found = pooled - held[cohort[place]] + held[other]
        if other not in cohort and found.std() < pooled.std():
            cohort[place], pooled = other, found
    return Cohort(np.sort(cohort))
