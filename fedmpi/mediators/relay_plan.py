"""Who trains which clients of which mediator when: the plan of a round's relays, derived identically on every rank.

Duan et al. 2019 (Astraea), Algorithm 1. A mediator's model visits its clients in cyclic order of their ids, E_m times.
The starting points of the mediators are spread evenly over their rings: worker k owns a contiguous range of ids, so the
mediators start on different workers and go round like a wavefront. Nothing of the order depends on the number of
workers, and no client is always the last that a model sees.

A *leg* is a run of consecutive visits at clients of one worker. The legs of a round are ordered by simulating a list
schedule with planned costs. Why following it cannot deadlock: the simulation appends one leg after another to a total
order; a leg is appended after the leg that hands it the model (same mediator) and after all earlier legs of its worker.
Every worker follows that order, and sending never waits. So the first leg of the total order that is not done yet has
all it needs, whatever the true durations are: somebody can always go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedmpi.common.types import Floats, Ints


@dataclass(frozen=True)
class Leg:
    """Consecutive visits of one mediator's model at clients of one worker."""

    mediator: int
    worker: int  # Who trains
    # Visited one after another; a client appears again when its next epoch follows without a change of worker
    clients: tuple[int, ...]
    epochs: tuple[int, ...]  # Mediator epoch, 0 ... E_m - 1, of each visit
    previous: int | None  # The workers that hand over and take over the model; None at the ends of the relay
    following: int | None
    start: float  # Simulated times, in the unit of the costs
    finish: float


@dataclass(frozen=True)
class RelayPlan:
    """The relays of a round."""

    legs: tuple[Leg, ...]  # All legs in the total order that every worker follows
    workers: int

    def of(self, worker: int | None) -> list[Leg]:
        """The legs of one worker, in the order in which it runs them; none for a rank that only serves."""
        return [leg for leg in self.legs if leg.worker == worker]

    @property
    def hops(self) -> int:
        """How often a model goes from one worker to another."""
        return sum(leg.previous is not None for leg in self.legs)

    @property
    def makespan(self) -> float:
        """Planned duration of the round's training."""
        return max((leg.finish for leg in self.legs), default=0.0)

    @property
    def efficiency(self) -> float:
        """Planned busy time as a share of the workers' time; NaN without work."""
        busy = sum(leg.finish - leg.start for leg in self.legs)
        return busy / (self.workers * self.makespan) if self.makespan else float("nan")

    def members(self) -> dict[int, tuple[int, ...]]:
        """The workers of every mediator, sorted."""
        workers: dict[int, set[int]] = {}
        for leg in self.legs:
            workers.setdefault(leg.mediator, set()).add(leg.worker)
        return {mediator: tuple(sorted(workers[mediator])) for mediator in sorted(workers)}


def visiting_order(clients: Ints, mediators: Ints) -> list[Ints]:
    """The ring of every mediator: its clients in cyclic order of their ids, started at evenly spread points.

    Parameters
    ----------
    clients : int64 (c,)
        Participants, sorted.
    mediators : int64 (c,)
        Mediator of each, 0 ... M - 1.

    Returns
    -------
    list of M int64 arrays
        Mediator m starts with the client at ⌊m |m| / M⌋ of its sorted clients.
    """
    count = int(mediators.max(initial=-1)) + 1
    rings = [clients[mediators == mediator] for mediator in range(count)]
    return [np.roll(ring, -(mediator * len(ring) // count)) for mediator, ring in enumerate(rings)]


def place_mediators(costs: Floats, mediators: Ints, workers: int) -> Ints:
    """Give whole mediators to workers, the costliest first, each to the worker with the least to do.

    For `topology.placement = "mediator"`: that worker maps the shards of all of the mediator's clients.
    """
    totals = np.bincount(mediators, weights=costs)
    place, load = np.zeros(len(totals), np.int64), np.zeros(workers)
    for mediator in np.argsort(-totals, kind="stable"):
        place[mediator] = load.argmin()
        load[place[mediator]] += totals[mediator]
    return place[mediators]


def plan_relay(owners: Ints, clients: Ints, mediators: Ints, epochs: int, costs: Floats, workers: int) -> RelayPlan:
    """Plan the relays of a round."""
    chains = [
        _chain(mediator, ring, owners[np.searchsorted(clients, ring)], costs[np.searchsorted(clients, ring)], epochs)
        for mediator, ring in enumerate(visiting_order(clients, mediators))
    ]
    return RelayPlan(tuple(_simulate(chains, workers)), workers)


@dataclass(frozen=True)
class _Visits:
    """A leg before its time is known."""

    mediator: int
    worker: int
    clients: tuple[int, ...]
    epochs: tuple[int, ...]
    cost: float


def _chain(mediator: int, ring: Ints, owners: Ints, costs: Floats, epochs: int) -> list[_Visits]:
    """The legs of one mediator: its ring E_m times, cut where the worker changes."""
    visits, workers = np.tile(ring, epochs), np.tile(owners, epochs)
    cost, epoch = np.tile(costs, epochs), np.repeat(np.arange(epochs), len(ring))
    cuts = np.flatnonzero(np.diff(workers)) + 1
    return [
        _Visits(
            mediator,
            int(workers[run[0]]),
            tuple(visits[run].tolist()),
            tuple(epoch[run].tolist()),
            float(cost[run].sum()),
        )
        for run in np.split(np.arange(len(visits)), cuts)
    ]


def _simulate(chains: list[list[_Visits]], workers: int) -> list[Leg]:
    """List scheduling: always start the leg that can start first; among equals the mediator with most work left."""
    legs: list[Leg] = []
    done = np.zeros(len(chains), np.int64)
    ready, free = np.zeros(len(chains)), np.zeros(workers)
    left = np.array([sum(leg.cost for leg in chain) for chain in chains])
    place = np.array([chain[0].worker for chain in chains], np.int64)
    for _ in range(sum(len(chain) for chain in chains)):
        start = np.maximum(ready, free[place])
        first = np.flatnonzero(start == start.min())
        mediator = int(first[left[first].argmax()])
        chain, position = chains[mediator], int(done[mediator])
        leg = _timed(chain, position, float(start[mediator]))
        legs.append(leg)
        free[leg.worker] = leg.finish
        left[mediator] -= chain[position].cost
        done[mediator] += 1
        ready[mediator] = leg.finish if position + 1 < len(chain) else np.inf
        place[mediator] = chain[min(position + 1, len(chain) - 1)].worker
    return legs


def _timed(chain: list[_Visits], position: int, start: float) -> Leg:
    visits = chain[position]
    return Leg(
        mediator=visits.mediator,
        worker=visits.worker,
        clients=visits.clients,
        epochs=visits.epochs,
        previous=chain[position - 1].worker if position else None,
        following=chain[position + 1].worker if position + 1 < len(chain) else None,
        start=start,
        finish=start + visits.cost,
    )
