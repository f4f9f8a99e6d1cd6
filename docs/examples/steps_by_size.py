"""A client sampler that sets steps: clients.sampler = "steps_by_size:more_for_large"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler
def more_for_large(view, *, most: int = 20) -> Cohort:
    """Select clients uniformly; large ones take more steps.

    Parameters
    ----------
    most : int
        Largest number of steps.
    """
    count = min(view.count, len(view.available))
    clients = np.sort(view.generator.choice(view.available, count, replace=False))
    steps = np.clip(view.sizes[clients] // 10, 1, most)
    return Cohort(clients, np.full(count, count / len(view.available)), steps=steps)
