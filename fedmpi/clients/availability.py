"""Built-in availability models: always, by chance, by the time of day, or by label group, to study the bias of unequal
availability (FedSSO, §2.1, Example 1, Eq 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedmpi.clients.view import View
from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

AvailabilityLaw = Literal["always", "bernoulli", "time-of-day", "label-group"]
Chance = Annotated[float, Field(ge=0, le=1)]

PHASES = 1000  # sub-stream of Purpose.DEVICE for the clients' time zones


@dataclass(frozen=True)
class Availability:
    """Availability model."""

    # "always"; "bernoulli": every client with `probability` in every round, independently; "time-of-day": the
    # probability swings between `lowest` and `probability` with a period of `period` rounds, every client in its own
    # phase; "label-group": clients whose most frequent class is y are available with `by_label[y]`
    law: AvailabilityLaw = "always"
    probability: float = 1.0  # Probability (bernoulli) or its highest value (time-of-day)
    lowest: float = 0.0  # Lowest probability of "time-of-day"
    period: float = 24.0  # Rounds of one day
    # Probability of each class's group; classes beyond the end repeat the tuple from its start
    by_label: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("probability", self.probability), ("lowest", self.lowest)):
            if not 0 <= value <= 1:
                raise UserError(f"availability: {name} = {value} must lie between 0 and 1")
        if any(not 0 <= value <= 1 for value in self.by_label):
            raise UserError(f"availability: by_label = {list(self.by_label)} must hold probabilities between 0 and 1")
        if self.law == "time-of-day" and (self.period <= 0 or self.lowest > self.probability):
            raise UserError("availability: time-of-day needs period > 0 and lowest <= probability")
        if self.law == "label-group" and not self.by_label:
            raise UserError("availability: label-group needs by_label, one probability for each class")


def dominant_label(class_counts: Ints) -> Ints:
    """Return the most frequent class of each client, (N,), from counts (N, C); the lower class in a tie."""
    return np.asarray(class_counts.argmax(axis=1), np.int64)


def probabilities(law: Availability, streams: Streams, round: int, clients: int, labels: Ints | None = None) -> Floats:
    """Return the probability of each client to be available in a round, float64 (N,).

    Time of day: lowest + (probability − lowest) · (1 + cos 2π(round / period − phase_k)) / 2 with phase_k uniform on
    [0, 1), drawn once per client.

    Parameters
    ----------
    law : Availability
        The availability model.
    streams : Streams
        Purpose.DEVICE draws the phases.
    round : int
        t.
    clients : int
        N.
    labels : ndarray of int64, shape (N,), optional
        Group of each client for "label-group", e.g. `dominant_label`.
    """
    if law.law == "always":
        return np.ones(clients)
    if law.law == "bernoulli":
        return np.full(clients, law.probability)
    if law.law == "time-of-day":
        phases = streams.generator(Purpose.DEVICE, client=PHASES).random(clients)
        swing = 0.5 * (1.0 + np.cos(2.0 * np.pi * (round / law.period - phases)))
        return np.asarray(law.lowest + (law.probability - law.lowest) * swing)
    if labels is None:
        raise ValueError("label-group availability needs the clients' labels")
    return np.asarray(law.by_label, np.float64)[labels % len(law.by_label)]


@register("availability", name="always")
def always(view: View) -> Floats:
    """Make every client available in every round."""
    return np.ones(len(view.sizes))


@register("availability", name="bernoulli")
class Bernoulli:
    """Every client with the same probability in every round.

    Parameters
    ----------
    probability : float
        Probability of being available.
    """

    def __init__(self, *, probability: Chance = 1.0):
        self.law = Availability("bernoulli", probability)

    def __call__(self, view: View) -> Floats:
        """Return the probability of each client, (N,)."""
        return probabilities(self.law, view.streams, view.round, len(view.sizes))


@register("availability", name="time-of-day")
class TimeOfDay:
    """A probability that varies with the time of day, each client in its own time zone.

    Parameters
    ----------
    probability : float
        Highest probability.
    lowest : float
        Lowest probability.
    period : float
        Rounds of one day.
    """

    def __init__(self, *, probability: Chance = 1.0, lowest: Chance = 0.0, period: float = 24.0):
        self.law = Availability("time-of-day", probability, lowest, period)

    def __call__(self, view: View) -> Floats:
        """Return the probability of each client, (N,)."""
        return probabilities(self.law, view.streams, view.round, len(view.sizes))


@register("availability", name="label-group")
class LabelGroup:
    """A probability for the clients of each most frequent class.

    Parameters
    ----------
    by_label : tuple of float
        Probability of each class's clients; classes beyond the end repeat the tuple from its start.
    """

    def __init__(self, *, by_label: tuple[Chance, ...] = ()):
        self.law = Availability("label-group", by_label=by_label)
        self._labels: Ints | None = None

    def __call__(self, view: View) -> Floats:
        """Return the probability of each client, (N,)."""
        if self._labels is None:
            self._labels = dominant_label(view.class_counts)
        return probabilities(self.law, view.streams, view.round, len(view.sizes), self._labels)
