"""Availability models and their call. Built in: always, by chance, or by label group, to study the bias of unequal
availability (FedSSO, §2.1, Example 1, Eq 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.clients.sampler import View
from fedmpi.common.calling import calling, refuse_result, result_array, takes
from fedmpi.common.registry import Component, register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    from fedmpi.config import Config

Chance = Annotated[float, Field(ge=0, le=1)]

OWN_DRAWS = 3  # sub-stream of Purpose.AVAILABILITY for a custom availability model


@register("availability", name="always")
def always(view: View) -> Floats:
    """Make every client available in every round."""
    return np.ones(len(view.sizes))


@register("availability", name="bernoulli")
def with_probability(view: View, *, probability: Chance = 1.0) -> Floats:
    """Make each client available with the same probability in every round.

    Parameters
    ----------
    probability : float
        Probability of being available.
    """
    return np.full(len(view.sizes), probability)


@register("availability", name="label-group")
def by_label_group(view: View, *, by_label: Annotated[tuple[Chance, ...], Field(min_length=1)]) -> Floats:
    """Make each client available with a probability that depends on its most frequent class (in a tie, the lowest).

    Parameters
    ----------
    by_label : tuple of float
        Probability of each class's clients; classes beyond the end repeat the tuple from its start.
    """
    return np.asarray(np.take(by_label, view.class_counts.argmax(axis=1), mode="wrap"), np.float64)


class ClientAvailability:
    """Available clients, round by round."""

    def __init__(self, config: Config, streams: Streams):
        self.part, self.streams = config.clients.availability, streams
        with calling(self.part):
            self._law = self.part.make()
        takes(self.part, self._law, "view")

    def chance(self, view: View) -> Floats:
        """Return the probability of each client to be available in the view's round, float64 (N,)."""
        return chances(self.part, self._law, view)

    def present(self, view: View) -> Ints | int:
        """Return the available clients, int64 (a,), sorted; N if all are always available."""
        if self.part.name == "always":
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
