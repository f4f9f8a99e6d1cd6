"""Who is there in a round, by the law that `system.availability` chooses: built-in ones, or one of the user's own."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.clients.availability import Availability, dominant_label, probabilities
from fedmpi.clients.view import View
from fedmpi.common.registry import register
from fedmpi.common.types import Floats, Ints

Chance = Annotated[float, Field(ge=0, le=1)]


@register("availability", name="always")
def always(view: View) -> Floats:
    """Every client in every round."""
    return np.ones(len(view.sizes))


@register("availability", name="bernoulli")
class Bernoulli:
    """Every client with the same probability in every round.

    Parameters
    ----------
    probability : float
        Of being there.
    """

    def __init__(self, *, probability: Chance = 1.0):
        self.law = Availability("bernoulli", probability)

    def __call__(self, view: View) -> Floats:
        """Probability of each client, (N,)."""
        return probabilities(self.law, view.streams, view.round, len(view.sizes))


@register("availability", name="time-of-day")
class TimeOfDay:
    """A probability that swings with the time of day, each client in its own time zone.

    Parameters
    ----------
    probability, lowest : float
        Highest and lowest probability.
    period : float
        Rounds of one day.
    """

    def __init__(self, *, probability: Chance = 1.0, lowest: Chance = 0.0, period: float = 24.0):
        self.law = Availability("time-of-day", probability, lowest, period)

    def __call__(self, view: View) -> Floats:
        """Probability of each client, (N,)."""
        return probabilities(self.law, view.streams, view.round, len(view.sizes))


@register("availability", name="label-group")
class LabelGroup:
    """A probability for the clients of each most frequent class.

    Parameters
    ----------
    by_label : tuple of float
        Probability of each class's clients; classes beyond the end begin again.
    """

    def __init__(self, *, by_label: tuple[Chance, ...] = ()):
        self.law = Availability("label-group", by_label=by_label)
        self._labels: Ints | None = None

    def __call__(self, view: View) -> Floats:
        """Probability of each client, (N,)."""
        if self._labels is None:
            self._labels = dominant_label(view.class_counts)
        return probabilities(self.law, view.streams, view.round, len(view.sizes), self._labels)
