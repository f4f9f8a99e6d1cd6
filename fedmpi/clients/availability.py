"""Availability models and their call. Built in: always, by chance, by the time of day, or by label group, to study the
bias of unequal availability (FedSSO, §2.1, Example 1, Eq 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.clients.sampler import View
from fedmpi.common.calling import calling, refuse_result, result_array, takes
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component, register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    from fedmpi.config import Config

Chance = Annotated[float, Field(ge=0, le=1)]

PHASES = 1000  # sub-stream of Purpose.DEVICE for the clients' time zones
OWN_DRAWS = 3  # sub-stream of Purpose.AVAILABILITY for a custom availability model


def dominant_label(class_counts: Ints) -> Ints:
    """Return the most frequent class of each client, (N,), from counts (N, C); the lower class in a tie."""
    return np.asarray(class_counts.argmax(axis=1), np.int64)


@register("availability", name="always")
def always(view: View) -> Floats:
    """Make every client available in every round."""
    return np.ones(len(view.sizes))


@register("availability", name="bernoulli")
def with_probability(view: View, *, probability: Chance = 1.0) -> Floats:
    """Every client with the same probability in every round.

    Parameters
    ----------
    view : View
    probability : float
        Probability of being available.
    """
    return np.full(len(view.sizes), probability)


@register("availability", name="time-of-day")
class TimeOfDay:
    """A probability that varies with the time of day, each client in its own time zone.

    lowest + (probability − lowest) · (1 + cos 2π(round / period − phase_k)) / 2 with phase_k uniform on [0, 1), drawn
    once per client.

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
        if period <= 0 or lowest > probability:
            raise UserError("availability: time-of-day needs period > 0 and lowest <= probability")
        self.probability, self.lowest, self.period = probability, lowest, period

    def __call__(self, view: View) -> Floats:
        """Return the probability of each client, (N,)."""
        phases = view.streams.generator(Purpose.DEVICE, client=PHASES).random(len(view.sizes))
        swing = 0.5 * (1.0 + np.cos(2.0 * np.pi * (view.round / self.period - phases)))
        return np.asarray(self.lowest + (self.probability - self.lowest) * swing)


@register("availability", name="label-group")
class LabelGroup:
    """A probability for the clients of each most frequent class.

    Parameters
    ----------
    by_label : tuple of float
        Probability of each class's clients; classes beyond the end repeat the tuple from its start.
    """

    def __init__(self, *, by_label: tuple[Chance, ...] = ()):
        if not by_label:
            raise UserError("availability: label-group needs by_label, one probability for each class")
        self.by_label = np.asarray(by_label, np.float64)
        self._labels: Ints | None = None

    def __call__(self, view: View) -> Floats:
        """Return the probability of each client, (N,)."""
        if self._labels is None:
            self._labels = dominant_label(view.class_counts)
        return np.asarray(self.by_label[self._labels % len(self.by_label)])


class ClientAvailability:
    """Available clients, round by round."""

    def __init__(self, config: Config, streams: Streams):
        self.part = config.clients.availability.component
        with calling(self.part):
            self._law = self.part.make(config.clients.availability.options)
        takes(self.part, self._law, "view")
        self.streams = streams

    @property
    def everybody(self) -> bool:
        """True if all clients are available in every round."""
        return self.part.name == "always"

    def chance(self, view: View) -> Floats:
        """Return the probability of each client to be available in the view's round, float64 (N,)."""
        return chances(self.part, self._law, view)

    def present(self, view: View) -> Ints | int:
        """Return the available clients, int64 (a,), sorted; N if all are always available."""
        if self.everybody:
            return len(view.sizes)
        drawn = self.streams.generator(Purpose.AVAILABILITY, view.round).random(len(view.sizes))
        return np.asarray(np.flatnonzero(drawn < self.chance(view)), np.int64)


def chances(part: Component, law: Callable[[View], Any], view: View) -> Floats:
    """Return the probabilities of an availability model for a round, float64 (N,)."""
    with calling(part, view.round):
        found = law(view)
    chance: Floats = result_array(part, found, view.sizes.shape, "probabilities", view.round)
    if not ((chance >= 0) & (chance <= 1)).all():
        raise refuse_result(part, "returned probabilities outside [0, 1]", view.round)
    return chance
