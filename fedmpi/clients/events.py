"""Events of asynchronous rounds in simulated time: clients start, and their updates arrive or are lost.

Seconds depend on samples, bytes and devices only, never on the values of a model. So rank 0 knows the order of the
events before any client trains.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedmpi.clients.availability import FOREVER
from fedmpi.clients.cohort import Cohort, cohort_size
from fedmpi.clients.devices import joules, survivors, total
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.calling import refuse_result
from fedmpi.common.streams import Purpose
from fedmpi.common.types import AnyArray, Bools, Floats, Ints

if TYPE_CHECKING:
    from torch import Tensor

STARTS, CLOCK = "flight.starts", "flight.clock"
"""Names in a checkpoint."""


class Start(NamedTuple):
    """A client that has received the model; starts compare by the time of arrival."""

    arrival: float  # Simulated seconds since the start of the run at which its update arrives
    number: int  # Place among all starts of the run; the earlier start is first if both arrive at the same time
    client: int
    version: int  # Round at whose beginning the model that it received was the current one
    repeat: int  # Number of earlier starts of this client from the same version
    times: int  # Number of times that the sampler has drawn it
    lost: int  # 1 if its update is lost after training
    seconds: float  # Simulated seconds from start to arrival


class EventQueue:
    """Clients in flight, and the simulated clock."""

    def __init__(self) -> None:
        self.clock, self.started = 0.0, 0
        self._heap: list[Start] = []
        self._repeats: dict[int, int] = {}  # starts of each client from the current version
        self._log: list[tuple[float, str, int, int]] = []

    @property
    def busy(self) -> Ints:
        """Clients in flight, int64 (b,), sorted."""
        return np.array(sorted(start.client for start in self._heap), np.int64)

    @property
    def places(self) -> int:
        """Number of places in flight that are taken: one for each time that a client has been drawn."""
        return sum(start.times for start in self._heap)

    @property
    def following(self) -> float:
        """Time of the next arrival; infinite if no client is in flight."""
        return self._heap[0].arrival if self._heap else np.inf

    def flying(self) -> list[Start]:
        """Return the starts in flight whose updates are not lost, in the order of arrival."""
        return sorted(start for start in self._heap if not start.lost)

    def start(self, version: int, cohort: Cohort, seconds: Floats, lost: Bools) -> None:
        """Start the clients (k,) of a cohort from the current version, each for so many seconds (k,)."""
        columns = (values.tolist() for values in (cohort.clients, cohort.multiplicity, lost, seconds))
        for client, times, away, duration in zip(*columns, strict=True):
            repeat = self._repeats.get(client, 0)
            self._repeats[client] = repeat + 1
            arrival = self.clock + duration
            start = Start(arrival, self.started, client, version, repeat, times, int(away), duration)
            heapq.heappush(self._heap, start)
            self._log.append((self.clock, "start", client, version))
            self.started += 1

    def pop(self) -> Start:
        """Move the clock to the next arrival, and return it."""
        start = heapq.heappop(self._heap)
        self.clock = start.arrival
        self._log.append((self.clock, "lost" if start.lost else "arrival", start.client, start.version))
        return start

    def close_step(self, round: int) -> dict[str, AnyArray]:
        """End the current version; return the columns of its events."""
        self._repeats.clear()
        log, self._log = self._log, []
        seconds, events, clients, versions = zip(*log, strict=True) if log else ((), (), (), ())
        return {
            "round": np.full(len(log), round, np.int64),
            "seconds": np.array(seconds, np.float64),
            "event": np.array(events, str),
            "client": np.array(clients, np.int64),
            "version": np.array(versions, np.int64),
        }

    def state(self) -> dict[str, Tensor]:
        """Return the clock and the starts in flight between two rounds, for a checkpoint."""
        import torch  # slow to import, and the configuration is checked before

        rows = torch.tensor(sorted(self._heap), dtype=torch.float64).reshape(-1, len(Start._fields))
        return {STARTS: rows, CLOCK: torch.tensor([self.clock, self.started], dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint; raise KeyError if it is missing."""
        self.clock, self.started = state[CLOCK][0].item(), int(state[CLOCK][1])
        self._heap = [Start._make((row[0], *map(int, row[1:-1]), row[-1])) for row in state[STARTS].tolist()]


class PlaceDraw(CohortDraw):
    """Draw of clients for free places in flight."""

    def fill(self, t: int, turn: int, places: int, busy: Ints) -> tuple[Cohort, Floats, Bools, Floats]:
        """Draw up to so many idle clients, for the given time in round t.

        Returns the cohort (k,), the simulated seconds until each update arrives or is lost (k,), a mask of lost updates
        (k,), and the energy of each client (k,), zeros without `devices.power`.
        """
        present = self.availability.present(self._all(t))
        idle = np.ones(len(self.sizes), bool)
        idle[busy] = False
        if len(busy):
            present = np.flatnonzero(idle) if isinstance(present, int) else present[idle[present]]
        view = self._view(t, present, None)
        cohort = self.sampler.draw(replace(view, count=places, busy=busy, stream=(Purpose.COHORT, turn)))
        clients = cohort.clients
        if cohort.draws > places:
            problem = f"returned {cohort.draws} clients for view.count = {places} free places. Return at most these"
            raise refuse_result(self.sampler.part, problem, t)
        rate, key, table = self.config.clients.failure_rate, t + (turn << 32), self.config.devices
        assert table is not None
        failed = ~np.isin(clients, survivors(self.streams, key, cohort, len(self.sizes), rate).clients)
        limit = np.full(len(clients), np.inf if table.deadline is None else table.deadline)
        if self.availability.leaves:
            limit = np.minimum(limit, self.availability.until(self._all(t))[clients])
        times = self._phases(clients, self.sizes, opening=False)
        needed, energy = total(times), np.zeros(len(clients))
        if table.power is not None:
            ends = np.where(failed, times[0] + times[1], needed)
            energy = joules(self._devices, clients, times, np.minimum(ends, limit))
        return cohort, np.minimum(needed, limit), failed | (needed > limit), energy

    def returns(self, t: int) -> float:
        """Return the simulated time at which the next client becomes available; infinite if none does."""
        if not self.availability.leaves:
            return np.inf
        until = self.availability.until(self._all(t))
        seconds = np.delete(until, self.availability.present(self._all(t))).min(initial=FOREVER)
        return self.clock + self._after(seconds) if seconds < FOREVER else np.inf

    def _wanted_of(self, clients: int) -> int:
        topology: Any = self.config.topology
        return cohort_size(len(self.sizes), topology.in_flight, key="topology.in_flight")
