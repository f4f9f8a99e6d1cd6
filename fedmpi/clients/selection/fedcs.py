"""FedCS: as many clients as a deadline allows (Nishio and Yonetani 2019)."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi import Cohort, client_sampler


@client_sampler(name="fedcs", measures=("seconds", "download_seconds", "upload_seconds"))
class FedCS:
    """Select as many clients as can upload in turn before a deadline, greedily.

    Nishio and Yonetani 2019, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge",
    Algorithm 3. ⌈K C⌉ random clients report their times. The server sends the model to all selected clients S at once,
    in the time T^d_S of the slowest download; each client k then computes for t^UD_k and uploads for t^UL_k, one client
    at a time. Θ is the time from the distribution to the end of the last upload. Of the remaining candidates the one
    that adds least time is tried next,

        x = argmin_k  T^d_{S ∪ k} − T^d_S + t^UL_k + max(0, t^UD_k − Θ),

    and joins S if T^d_{S ∪ x} + Θ' < T_round, with Θ' = Θ + t^UL_x + max(0, t^UD_x − Θ).

    Parameters
    ----------
    deadline : float
        T_round in seconds; the paper uses 180.
    candidates : int, optional
        ⌈K C⌉, the clients asked for their times, drawn uniformly from the available ones; by default m.

    Notes
    -----
    Deviations: the times T_cs of the selection and T_agg of the aggregation are 0, as in the paper's experiments. The
    cohort is recorded with the scheduled seconds of the round, `sampler_scheduled`; the simulated clock itself lets
    clients download and upload at the same time. Equal times are tried in the order of the clients' numbers. Clients
    without samples, which would be the fastest, are never selected.
    """

    def __init__(
        self, *, deadline: Annotated[float, Field(gt=0)] = 180.0, candidates: Annotated[int, Field(ge=1)] | None = None
    ):
        self.deadline, self.size = deadline, candidates

    def candidates(self, view: Any) -> NDArray[np.int64]:
        """Draw the clients that report their times."""
        count = min(self.size or view.count, len(view.eligible))
        return np.sort(view.generator.choice(view.eligible, count, replace=False))

    def draw(self, view: Any) -> Cohort:
        """Add the candidates to the schedule that still fit, the one with the least additional time first."""
        down, up = view.fresh("download_seconds"), view.fresh("upload_seconds")
        compute = view.fresh("seconds") - down - up
        left = np.flatnonzero(~np.isnan(compute))
        selected, distribution, elapsed = [], 0.0, 0.0
        while True:
            end = up[left] + np.maximum(compute[left], elapsed)  # Θ' of each, which never falls as S grows:
            fits = np.maximum(down[left], distribution) + end < self.deadline  # one too late now stays too late
            left, end = left[fits], end[fits]
            if not len(left):
                break
            best = int(np.argmin(np.maximum(down[left], distribution) + end))
            selected.append(left[best])
            distribution, elapsed = max(distribution, down[left[best]]), end[best]
            left = np.delete(left, best)
        chosen = np.sort(np.array(selected, np.int64))
        return Cohort(chosen, numbers={"scheduled": distribution + elapsed})
