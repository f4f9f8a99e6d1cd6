"""A client sampler: clients.sampler = "sampler:loudest"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("loss",))
def loudest(view, *, keep: float = 0.5) -> Cohort:
    """Select a share of the clients by their last known loss, and the others at random."""
    loss = view.last("loss")[view.available]
    known = view.available[~np.isnan(loss)]
    order = np.argsort(-view.last("loss")[known], kind="stable")
    loud = known[order[: int(keep * view.count)]]
    others = np.setdiff1d(view.available, loud)
    rest = view.generator.choice(others, min(view.count - len(loud), len(others)), replace=False)
    return Cohort(np.sort(np.concatenate([loud, rest])))
