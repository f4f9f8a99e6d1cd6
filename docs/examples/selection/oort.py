"""Oort (Lai et al. 2021): clients.sampler = "oort:guided"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("loss_rms",))
def guided(view, *, explore: float = 0.9, decay: float = 0.98) -> Cohort:
    """Draw seen clients by utility, n_k times the root mean square of the losses, and a share of unseen ones.

    Parameters
    ----------
    explore : float
        Share of unseen clients in the first cohort.
    decay : float
        Factor of that share from round to round.
    """
    here = view.available
    age, loss = view.age("loss_rms")[here], view.last("loss_rms")[here]
    seen, unseen = np.flatnonzero(age > 0), np.flatnonzero(age < 0)
    count = min(view.count, len(here))
    new = min(len(unseen), max(int(explore * decay**view.round * count), count - len(seen)))
    found = view.generator.choice(unseen, new, replace=False)
    if count == new:
        return Cohort(np.sort(here[found]))
    utility = (view.sizes[here] * loss)[seen]
    utility = np.minimum(utility, np.quantile(utility, 0.95)) / utility.max()
    utility += np.sqrt(0.1 * np.log(view.round + 1) / (view.round + 1 - age[seen]))
    best = np.argsort(-utility, kind="stable")[: 2 * (count - new)]
    again = seen[view.generator.choice(best, count - new, replace=False, p=utility[best] / utility[best].sum())]
    return Cohort(np.sort(here[np.concatenate([found, again])]))
