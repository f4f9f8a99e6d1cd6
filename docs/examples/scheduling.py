"""A scheduling of mediators: topology.scheduling = "scheduling:spread"."""

import numpy as np


def spread(class_counts, clients_per_mediator, generator, target, *, alternate: bool = True) -> np.ndarray:
    """Sort clients by their largest class and assign them to as few mediators as possible.

    Parameters
    ----------
    alternate : bool
        Assign neighbors in that order to different mediators.
    """
    order = np.argsort(class_counts.argmax(axis=1), kind="stable")
    place = np.arange(len(order))
    mediators = -(-len(order) // clients_per_mediator)
    mediator = np.empty(len(order), np.int64)
    mediator[order] = place % mediators if alternate else place // clients_per_mediator
    return mediator
