"""Availability models and their call. Built in: always; by chance; by label group, to study the bias of unequal
availability (FedSSO, §2.1, Example 1, Eq 6); and intervals of simulated time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.clients.sampler import View
from fedmpi.clients.tables import client_numbers, read_columns
from fedmpi.common.apportionment import offsets_of
from fedmpi.common.calling import calling, refuse_result, result_array, takes
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component, register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Bools, Floats, Ints

if TYPE_CHECKING:
    from fedmpi.config import Config

Chance = Annotated[float, Field(ge=0, le=1)]

FOREVER = 1e300
"""Simulated seconds until an availability changes that never does."""
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


@register("availability", name="intervals")
class Intervals:
    """Make each client available in its intervals of simulated time, such as those of a trace.

    A client that leaves before its update arrives is lost for the round. If no client is available, the round lasts
    until the next one returns.

    Parameters
    ----------
    file : str
        Parquet, NPZ or CSV file, relative to the working directory, with the columns client, start and end (simulated
        seconds, start ≤ time < end). An optional column period repeats the intervals of a client.
    period : float, optional
        Seconds after which the intervals of all clients repeat, if there is no such column.
    """

    def __init__(self, *, file: str, period: Annotated[float, Field(gt=0, le=1e30)] | None = None):
        self.file, self.period = file, period
        self._table: tuple[Ints, Floats, Floats, Floats] | None = None

    def __call__(self, view: View) -> Floats:
        return self._at(view)[0].astype(np.float64)

    def until(self, view: View) -> Floats:
        """Return the simulated seconds until each client leaves or, if it is away, returns, float64 (N,)."""
        return self._at(view)[1]

    def _at(self, view: View) -> tuple[Bools, Floats]:
        clients, clock = len(view.sizes), view.clock
        client, start, end, period = self._table = self._table or self._read(clients)
        base = np.where(period < FOREVER, clock - np.mod(clock, period), 0.0)
        counts = np.bincount(client, minlength=clients)
        begun = np.bincount(client, base[client] + start <= clock, clients).astype(np.int64)
        first = np.minimum(offsets_of(counts)[:-1], len(client) - 1)
        last = np.maximum(first + begun - 1, 0)
        ends, again = base + end[last], np.where(counts > 0, base + period + start[first], FOREVER)
        here = (begun > 0) & (clock < ends)
        follows = (end[last] == period) & (start[first] == 0)  # the next period continues the interval
        ends = np.where(follows, np.where(first == last, FOREVER, base + period + end[first]), ends)
        following = np.minimum(first + begun, len(client) - 1)
        return here, np.where(here, ends, np.where(begun < counts, base + start[following], again)) - clock

    def _read(self, clients: int) -> tuple[Ints, Floats, Floats, Floats]:
        """Return client, start and end of all intervals, sorted (r,), and the clients' periods (N,)."""
        found = read_columns(self.file, ("client", "start", "end"), ("period",))
        if "period" in found and self.period is not None:
            raise UserError(f"{self.file} has a column period. Remove clients.availability.period")
        client = client_numbers(self.file, found["client"], clients)
        start, end = found["start"], np.minimum(found["end"], FOREVER)
        of_row = found.get("period", np.full(len(client), FOREVER if self.period is None else self.period))
        period = np.full(clients, FOREVER)
        period[client] = of_row
        wrong = ~((start >= 0) & (start < end) & (end <= of_row) & (of_row == period[client]))
        if wrong.any() or not len(client):
            row = f"Row {wrong.argmax()} differs" if len(client) else "It has no rows"
            raise UserError(f"{self.file} needs 0 ≤ start < end ≤ period, with one period per client. {row}")
        order = np.lexsort((start, client))
        client, start, end = client[order], start[order], end[order]
        same, gap = client[1:] == client[:-1], start[1:] - end[:-1]
        if (overlap := same & (gap < 0)).any():
            raise UserError(f"{self.file} has intervals of client {client[1:][overlap][0]} that overlap. Merge them")
        joined = np.concatenate(([False], same & (gap == 0), [False]))  # with the interval before
        return client[~joined[:-1]], start[~joined[:-1]], end[~joined[1:]], period


class ClientAvailability:
    """Available clients, round by round."""

    def __init__(self, config: Config, streams: Streams):
        self.part, self.streams = config.clients.availability, streams
        with calling(self.part):
            self._law = self.part.make()
        takes(self.part, self._law, "view")
        self.leaves = hasattr(self._law, "until")
        if self.leaves:
            takes(self.part, self._law.until, "view", method="until")

    def until(self, view: View) -> Floats:
        """Return the simulated seconds until the availability of each client changes, float64 (N,), or FOREVER."""
        with calling(self.part, view.round):
            found = np.minimum(self._law.until(view), FOREVER)
        seconds: Floats = result_array(self.part, found, view.sizes.shape, "seconds", view.round)
        if (seconds < 0).any():
            raise refuse_result(self.part, "returned seconds below 0", view.round)
        return seconds

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
