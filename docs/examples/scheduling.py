"""Who shares a mediator: topology.scheduling = "scheduling:dealt"."""

import numpy as np


def dealt(class_counts, most, generator, target, *, apart: bool = True) -> np.ndarray:
    """Clients in the order of their largest class are dealt out to as few mediators as there must be.

    Parameters
    ----------
    apart : bool
        Whether neighbours in that order go to different mediators, or to the same one.
    """
    order = np.argsort(class_counts.argmax(axis=1), kind="stable")
    place = np.arange(len(order))
    mediator = np.empty(len(order), np.int64)
    mediator[order] = place % -(-len(order) // most) if apart else place // most
    return mediator
