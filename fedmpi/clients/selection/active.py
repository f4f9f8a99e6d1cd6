"""Active federated learning (Goetz et al. 2019)."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi import Cohort, client_sampler

Share = Annotated[float, Field(ge=0, le=1)]


@client_sampler(name="active", needs=("loss",))
class ActiveFederatedLearning:
    """Draw most clients by their last loss, and some uniformly (Goetz et al. 2019, "Active Federated Learning").

    The valuation of client k is v_k = √n_k · ℓ_k (its summed loss over √n_k), with the mean loss ℓ_k of the model that
    it last received. Algorithm 1 sets the α1 K lowest valuations to −∞, draws (1 − α3) m clients without replacement
    with probabilities p_k ∝ exp(α2 v_k), and α3 m of the others uniformly.

    Parameters
    ----------
    alpha1 : float
        Share of the clients with the lowest valuations that only the uniform draw can select.
    alpha2 : float
        Inverse temperature of the softmax; 0 draws uniformly from the highest valuations.
    alpha3 : float
        Share of the cohort that is drawn uniformly.

    Notes
    -----
    Deviations: none from Algorithm 1. The paper leaves open: the valuation of a client that has not been selected yet,
    here 0, as in SelecEval (Plato has −∞, which excludes it from the first draw); ties, here in random order; the
    rounding of α1 K and (1 − α3) m, here down, as in both. K counts the available clients with samples; the others
    are never selected. If the first draw has fewer clients than (1 − α3) m to draw from, the second fills up.
    """

    def __init__(self, *, alpha1: Share = 0.75, alpha2: Annotated[float, Field(ge=0)] = 0.01, alpha3: Share = 0.1):
        self.alpha1, self.alpha2, self.alpha3 = alpha1, alpha2, alpha3

    def draw(self, view: Any) -> Cohort:
        """Select clients by valuation, then others uniformly."""
        clients = view.generator.permutation(view.eligible)
        count, least = min(view.count, len(clients)), math.floor(self.alpha1 * len(clients) + 1e-9)
        values = np.nan_to_num(np.sqrt(view.sizes[clients]) * view.last("loss")[clients])
        high = np.argsort(values, kind="stable")[least:]
        # the first arrivals of exponential times with rates p_k are a draw in proportion to p_k without replacement
        arrival = np.log(view.generator.standard_exponential(len(high))) - self.alpha2 * values[high]
        first = clients[high[np.argsort(arrival)[: math.floor((1 - self.alpha3) * count + 1e-9)]]]
        others = np.setdiff1d(clients, first)
        second = view.generator.choice(others, count - len(first), replace=False)
        return Cohort(np.sort(np.concatenate([first, second])))
