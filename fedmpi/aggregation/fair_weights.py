"""Weights that depend on how a client's work went: q-FFL.

A class of weights may have a second method, `after` (work), called by the rank that trained a client once its update is
there. It returns the factor c of the update in the sum and its share h of what the sum is divided by:
Σ c_k Δ_k / Σ h_k. One number alone is both. `work` is a `ClientWork`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from fedmpi.clients.cohort import Cohort
from fedmpi.common.decorators import weights
from fedmpi.common.registry import resolve
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    from fedmpi.config import Config

SMALLEST_LOSS = 1e-10
"""Powers below zero of a loss that is zero would be infinite."""


@dataclass(frozen=True)
class ClientWork:
    """What weights are told of a participant's work in a round."""

    client: int
    round: int
    coefficient: float  # What the weights gave before the round; times the samples used where they count per sample
    loss: float  # Mean loss of the global model, before any work, over all samples of the client
    update_norm: float  # ‖Δ_k‖, Euclidean, of the update as the server receives it
    lr: float  # Local learning rate of the round


@weights(name="q-ffl")
class QFFL:
    """Clients with a higher loss count more: q-FedAvg (Li et al. 2020, "Fair Resource Allocation in FL", Algorithm 2).

    With Δ_k = w_k − w, F_k the client's loss at w and L the Lipschitz constant of the gradients, the step is
    Σ L F_k^q Δ_k / Σ (q F_k^{q−1} L² ‖Δ_k‖² + L F_k^q). q = 0 is the plain mean.

    Parameters
    ----------
    q : float
        How much fairness: 0 counts all alike, larger counts those with a high loss more; at most 100, beyond which
        powers of losses leave the range of floats.
    lipschitz : float, optional
        L; 1 / lr of the round by default, as in the paper, whose clients take steps of SGD: L (w − w_k) then stands for
        a gradient. With another local optimizer it must be given.
    """

    def __init__(
        self,
        *,
        q: Annotated[float, Field(ge=0, le=100)] = 1.0,
        lipschitz: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None,
    ):
        self.q, self.lipschitz = q, lipschitz

    def refuses(self, config: Config) -> str | None:
        """Why it means nothing with the rest of this configuration, and what to do; None where it does."""
        optimizer = resolve("local optimizer", config.local.optimizer).name
        if optimizer == "sgd" or self.lipschitz is not None:
            return None
        return (
            "it takes the Lipschitz constant for 1 / local.lr, as SGD's steps allow, which local.optimizer = "
            f'"{optimizer}" does not: set local.optimizer = "sgd", or aggregation.lipschitz'
        )

    def __call__(self, cohort: Cohort, sizes: Ints) -> Floats:
        """How often each was drawn, (m,)."""
        return cohort.multiplicity.astype(np.float64)

    def after(self, work: ClientWork) -> tuple[float, float]:
        """F_k^q and q F_k^{q−1} L ‖Δ_k‖² + F_k^q, times how often it was drawn: both divided by L."""
        lipschitz = 1 / work.lr if self.lipschitz is None else self.lipschitz
        loss = max(work.loss, SMALLEST_LOSS)
        factor = loss**self.q
        slope = self.q * loss ** (self.q - 1) * lipschitz * work.update_norm**2
        return work.coefficient * factor, work.coefficient * (slope + factor)
