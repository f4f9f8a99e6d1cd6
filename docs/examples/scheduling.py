"""A scheduling of mediators: topology.scheduling = "scheduling:dealt"."""

import numpy as np


def dealt(class_counts, most, generator, target, *, apart: bool = True) -> np.ndarray:
    """Sort clients by their largest class and assign them to as few mediators as possible.

    Parameters
    ----------
    apart : bool
        Whether neighbors in that order go to different mediators.
    """
    order = np.argsort(class_counts.argmax(axis=1), kind="stable")
    place = np.arange(len(order))
    mediator = np.empty(len(order), np.int64)
    mediator[order] = place % -(-len(order) // most) if apart else place // most
    return mediator
