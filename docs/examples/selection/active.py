"""Active federated learning: clients.sampler = "active:active"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("loss",))
def active(view, *, ignored: float = 0.75, inverse_temperature: float = 0.01, uniform: float = 0.1) -> Cohort:
    """Draw most clients by the softmax of their valuation √n_k · loss_k, and some uniformly (Goetz et al. 2019).

    Parameters
    ----------
    ignored : float
        Share of the clients with the lowest valuations that only the uniform draw can select.
    inverse_temperature : float
        Factor of the valuations in the softmax.
    uniform : float
        Share of the cohort that is drawn uniformly.
    """
    clients = view.generator.permutation(view.available)  # so that ties are in random order
    count = min(view.count, len(clients))
    values = np.nan_to_num(np.sqrt(view.sizes[clients]) * view.last("loss")[clients])
    best = np.argsort(values, kind="stable")[int(ignored * len(clients)) :]
    noise = view.generator.gumbel(size=len(best))  # the largest sums are a draw from the softmax
    ranked = best[np.argsort(-(inverse_temperature * values[best] + noise))]
    first = clients[ranked[: int((1 - uniform) * count)]]
    second = view.generator.choice(np.setdiff1d(clients, first), count - len(first), replace=False)
    return Cohort(np.sort(np.concatenate([first, second])))
