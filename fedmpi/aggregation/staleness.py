"""Weights of stale updates in asynchronous rounds.

The staleness of an update is the number of server steps between the model that its client received and the step that it
enters: 0 if the client trained the current model. The update is multiplied by the weight s of its staleness.

Xie, Koyejo and Gupta 2019 ("Asynchronous Federated Optimization", FedAsync) write t − τ, count epochs from 1, and
require s(0) = 1. Read literally, t − τ is then 1 for an update of the current model, and no update ever has the weight
s(0). Here such an update has staleness 0, as in Nguyen et al. 2022 ("Federated Learning with Buffered Asynchronous
Aggregation", FedBuff).
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, refuse_result, takes
from fedmpi.common.registry import Component, register
from fedmpi.common.types import Floats, Ints

Slope = Annotated[float, Field(ge=0, le=1e6)]


@register("staleness", name="constant")
def constant(staleness: int) -> float:
    """Weigh all updates equally: s = 1 (FedAsync+Const)."""
    return 1.0


@register("staleness", name="polynomial")
def polynomial(staleness: int, *, a: Slope = 0.5) -> float:
    """Weigh by s = (1 + staleness)^−a (FedAsync+Poly; with a = 0.5 the weights of FedBuff).

    Parameters
    ----------
    a : float
        Exponent of the decay.
    """
    return float((1.0 + staleness) ** -a)


@register("staleness", name="hinge")
def hinge(staleness: int, *, a: Slope = 10.0, b: Annotated[int, Field(ge=0)] = 4) -> float:
    """Weigh by s = 1 up to staleness b, then by 1 / (a (staleness − b) + 1) (FedAsync+Hinge).

    Parameters
    ----------
    a : float
        Slope of the decay.
    b : int
        Largest staleness without a decay.
    """
    return 1.0 if staleness <= b else 1.0 / (a * (staleness - b) + 1.0)


class StalenessWeights:
    """Staleness weights of a run."""

    def __init__(self, part: Component):
        self.part = part
        with calling(part):
            self._made = part.make()
        takes(part, self._made, "staleness")

    def of(self, staleness: Ints, round: int) -> Floats:
        """Return the weight of each update, float64 (m,), from its staleness, int64 (m,)."""
        values, places = np.unique(staleness, return_inverse=True)
        return np.array([self._weight(value, round) for value in values.tolist()], np.float64)[places]

    def _weight(self, staleness: int, round: int) -> float:
        with calling(self.part, round):
            found = self._made(staleness)
        try:
            weight = float(found)
        except (TypeError, ValueError):
            weight = math.nan
        if not 0 <= weight < math.inf:
            problem = f"returned {found!r:.100} for staleness {staleness}. Return a finite number from 0"
            raise refuse_result(self.part, problem, round)
        return weight
