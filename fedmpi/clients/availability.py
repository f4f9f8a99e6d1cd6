"""The chosen law of availability: asked by the server who is there in a round, its answer checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedmpi.clients.view import View
from fedmpi.common.calling import calling, is_complex, refuse_result, takes
from fedmpi.common.registry import Part
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.config.choices import chosen, options

OWN_DRAWS = 3
"""Sub-stream of Purpose.AVAILABILITY from which a law of the user's own draws."""


class ClientAvailability:
    """The clients that are there, round by round."""

    def __init__(self, config: Config, streams: Streams):
        self.part = chosen(config, "availability")
        with calling(self.part):
            self._law = self.part.make(options(config, "availability"))
        takes(self.part, self._law, "view")
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
        return chances(self.part, self._law, view)

    def present(self, view: View) -> Ints | int:
        """The clients that are there, int64 (a,), sorted; N where all are, always."""
        if self.everybody:
            return len(view.sizes)
        drawn = self.streams.generator(Purpose.AVAILABILITY, view.round).random(len(view.sizes))
        return np.asarray(np.flatnonzero(drawn < self.chance(view)), np.int64)


def chances(part: Part, law: Callable[[View], Any], view: View) -> Floats:
    """What a law says of a round, float64 (N,).

    Parameters
    ----------
    part : Part
        The law, for messages.
    law : callable
        law(view): as it was made with its options.
    view : View
        Of all clients.

    Raises
    ------
    PartFailure
        When it raises, or returns anything but one probability a client.
    """
    with calling(part, view.round):
        found = np.asarray(law(view))
    if found.shape != view.sizes.shape or not np.issubdtype(found.dtype, np.number) or is_complex(found):
        problem = (
            f"returned {found.dtype} of shape {found.shape}: return a probability for each of the {len(view.sizes)} "
            "clients"
        )
        raise refuse_result(part, problem, view.round)
    if not ((found >= 0) & (found <= 1)).all():
        raise refuse_result(part, "returned what is no probability: all must lie in [0, 1]", view.round)
    return found.astype(np.float64)
