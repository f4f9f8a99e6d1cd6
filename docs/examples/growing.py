"""A client sampler that follows the accuracy: clients.sampler = "growing:growing"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("history",))
def growing(view, *, least: int = 2) -> Cohort:
    """Start with few clients, and select more as the accuracy of the global model grows."""
    scores = [past.metrics["test_accuracy"] for past in view.history if "test_accuracy" in past.metrics]
    share = scores[-1] if scores else 0.0
    count = min(max(least, round(share * view.count)), len(view.available))
    return Cohort(np.sort(view.generator.choice(view.available, count, replace=False)))
