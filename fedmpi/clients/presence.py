"""Who is there in a round, by the law that `system.availability` chooses: built-in ones, or one of the user's own."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.clients.availability import Availability, Floats, Ints, dominant_label, probabilities
from fedmpi.clients.view import View
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.registry import register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import Config
from fedmpi.config.choices import chosen, options

Chance = Annotated[float, Field(ge=0, le=1)]
OWN_DRAWS = 3
"""Sub-stream of Purpose.AVAILABILITY from which a law of the user's own draws."""


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


class Attendance:
    """The clients that are there, round by round.

    Parameters
    ----------
    config : Config
        Chooses the law: a part `(view) -> probabilities (N,)`, called once a round with a view of all clients.
    streams : Streams
        The k-th number of the stream (AVAILABILITY, round) decides for client k.

    Raises
    ------
    UserError
        When options do not fit the law.
    """

    def __init__(self, config: Config, streams: Streams):
        self.part = chosen(config, "availability")
        with calling(self.part):
            self._law = self.part.make(options(config, "availability"))
        self.streams = streams

    @property
    def everybody(self) -> bool:
        """Whether all clients are there in every round."""
        return self.part.name == "always"

    def chance(self, view: View) -> Floats:
        """Probability of each client to be there in the view's round, float64 (N,).

        Raises
        ------
        PartFailure
            When the law raises, or returns anything but one probability a client.
        """
        with calling(self.part, view.round):
            found = np.asarray(self._law(view))
        if found.shape != view.sizes.shape or not np.issubdtype(found.dtype, np.number):
            raise refuse_result(
                self.part,
                f"returned {found.dtype} of shape {found.shape}: return a probability for each of the "
                f"{len(view.sizes)} clients",
                view.round,
            )
        if not ((found >= 0) & (found <= 1)).all():
            raise refuse_result(self.part, "returned what is no probability: all must lie in [0, 1]", view.round)
        return found.astype(np.float64)

    def present(self, view: View) -> Ints | int:
        """The clients that are there, int64 (a,), sorted; N where all are, always."""
        if self.everybody:
            return len(view.sizes)
        drawn = self.streams.generator(Purpose.AVAILABILITY, view.round).random(len(view.sizes))
        return np.asarray(np.flatnonzero(drawn < self.chance(view)), np.int64)
