"""Relay of a round: the mediators' models move from client to client, the data do not move.

Duan et al. 2019 (Astraea), Algorithm 1, `MediatorUpdate` and line 6. Every rank derives the same plan. A mediator's
model visits its clients in cyclic order of their ids, E_m times. The starting points of the mediators are spread evenly
over their rings. Worker k owns a contiguous range of ids, so the mediators start on different workers and move like a
wavefront. The order does not depend on the number of workers, and no client is always the last for a model.

A *leg* is a run of consecutive visits at clients of one worker. The legs of a round are ordered by simulating a list
schedule with planned costs. Following it cannot deadlock: the simulation appends one leg after another to a total
order, each after the leg that hands it the model (same mediator) and after all earlier legs of its worker. Every worker
follows that order, and sending never waits. So the first unfinished leg of the total order can always run, for any true
durations: some worker can always continue.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.common.types import Floats, Ints
from fedmpi.data.source import loaded_ahead
from fedmpi.local.optimizers import AdamState
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, WorkReport, check_update, named_client
from fedmpi.mpi import Cluster


@dataclass(frozen=True)
class Leg:
    """Consecutive visits of one mediator's model at clients of one worker."""

    mediator: int
    worker: int  # Worker that trains
    # Visited sequentially; a client appears again if its next epoch follows without a change of worker
    clients: tuple[int, ...]
    epochs: tuple[int, ...]  # Mediator epoch, 0 ... E_m - 1, of each visit
    previous: int | None  # Workers that hand over and take over the model; None at the ends of the relay
    following: int | None
    start: float  # Simulated times, in the unit of the costs
    finish: float


def visiting_order(clients: Ints, mediators: Ints) -> list[Ints]:
    """Return the ring of every mediator: its clients in cyclic order of their ids, from evenly spread starts.

    Mediator m starts with the client at ⌊m |m| / M⌋ of its sorted clients.
    """
    count = int(mediators.max(initial=-1)) + 1
    rings = [clients[mediators == mediator] for mediator in range(count)]
    return [np.roll(ring, -(mediator * len(ring) // count)) for mediator, ring in enumerate(rings)]


def place_mediators(costs: Floats, mediators: Ints, workers: int) -> Ints:
    """Assign whole mediators to workers, the costliest first, each to the worker with the least work.

    For `cluster.placement = "mediator"`: that worker maps the shards of all of the mediator's clients.
    """
    totals = np.bincount(mediators, weights=costs)
    place, load = np.zeros(len(totals), np.int64), np.zeros(workers)
    for mediator in np.argsort(-totals, kind="stable"):
        place[mediator] = load.argmin()
        load[place[mediator]] += totals[mediator]
    return place[mediators]


def plan_relay(owners: Ints, clients: Ints, mediators: Ints, epochs: int, costs: Floats, workers: int) -> list[Leg]:
    """Plan the relays of a round: all legs in the total order that every worker follows."""
    chains = [
        _chain(mediator, ring, owners[np.searchsorted(clients, ring)], costs[np.searchsorted(clients, ring)], epochs)
        for mediator, ring in enumerate(visiting_order(clients, mediators))
    ]
    return _simulate(chains, workers)


def _chain(mediator: int, ring: Ints, owners: Ints, costs: Floats, epochs: int) -> list[Leg]:
    """Return the legs of one mediator, each from time 0: its ring E_m times, cut at changes of the worker."""
    visits, workers = np.tile(ring, epochs), np.tile(owners, epochs)
    cost, epoch = np.tile(costs, epochs), np.repeat(np.arange(epochs), len(ring))
    runs = np.split(np.arange(len(visits)), np.flatnonzero(np.diff(workers)) + 1)
    along = [None, *(int(workers[run[0]]) for run in runs), None]
    return [
        Leg(
            mediator,
            int(workers[run[0]]),
            tuple(visits[run].tolist()),
            tuple(epoch[run].tolist()),
            along[place],
            along[place + 2],
            0.0,
            float(cost[run].sum()),
        )
        for place, run in enumerate(runs)
    ]


def _simulate(chains: list[list[Leg]], workers: int) -> list[Leg]:
    """Schedule the leg that can start first; in a tie that of the mediator with the most work left."""
    legs: list[Leg] = []
    done = np.zeros(len(chains), np.int64)
    ready, free = np.zeros(len(chains)), np.zeros(workers)
    left = np.array([sum(leg.finish for leg in chain) for chain in chains])
    place = np.array([chain[0].worker for chain in chains], np.int64)
    for _ in range(sum(len(chain) for chain in chains)):
        start = np.maximum(ready, free[place])
        first = np.flatnonzero(start == start.min())
        mediator = int(first[left[first].argmax()])
        leg, began = chains[mediator][done[mediator]], float(start[mediator])
        legs.append(replace(leg, start=began, finish=began + leg.finish))
        left[mediator] -= leg.finish
        done[mediator] += 1
        free[leg.worker] = legs[-1].finish
        ready[mediator] = np.inf if leg.following is None else legs[-1].finish
        place[mediator] = leg.worker if leg.following is None else leg.following
    return legs


@dataclass
class RelayReport:
    """Work of one rank for the mediators in a round."""

    work: WorkReport  # Counts every client once, with its samples; steps and losses count in every mediator epoch
    visits: int = 0  # Visits at clients of this rank that had samples to train on, all mediator epochs
    hops: int = 0  # Models handed over by this rank to another one
    idle_seconds: float = 0.0  # Seconds of waiting for models


def run_relay(
    cluster: Cluster,
    engine: SequentialEngine,
    plan: list[Leg],
    tasks: Mapping[int, ClientTask],
    start: Tensor,
    rule: LocalRule,
    round: int,
    total: Accumulator,
    keep_optimizer: bool = False,
) -> RelayReport:
    """Run this rank's legs of the round; called by all ranks with the same plan, including one that only serves.

    `tasks` are this rank's selected clients that have samples. The coefficient of a mediator's Δ_m = w_m − w is the sum
    of its clients' coefficients, so n_m/n if theirs are n_k/n. It is added once per mediator, on the last worker of its
    relay. `keep_optimizer` hands Adam's state over with the model; otherwise it is reset at every visit.
    """
    relay = _Relay(cluster, engine, plan, start, keep_optimizer)
    report = RelayReport(WorkReport())
    for leg in plan:
        if leg.worker != cluster.worker:
            continue
        began = time.perf_counter()
        relay.take_over(leg)
        report.idle_seconds += time.perf_counter() - began
        relay.visit(leg, tasks, rule, round, report)
        if leg.following is None:
            report.work.weight += relay.close(leg, rule, total)
        else:
            relay.hand_over(leg)
            report.hops += 1
    return report


class _Relay:
    """Model of a mediator: taken from the previous worker, trained, given to the next."""

    def __init__(
        self, cluster: Cluster, engine: SequentialEngine, plan: list[Leg], start: Tensor, keep_optimizer: bool
    ):
        self.cluster, self.engine, self.start = cluster, engine, start
        self.messages = cluster.messages() if cluster.size > 1 else None
        visited: dict[int, set[int]] = {}  # workers that the model of each mediator visits
        for leg in plan:
            visited.setdefault(leg.mediator, set()).add(leg.worker)
        self.groups = {m: tuple(map(cluster.worker_rank, sorted(visited[m]))) for m in sorted(visited)}
        if self.messages is not None:
            self.messages.use_groups(group for group in self.groups.values() if len(group) > 1)
        self.model = torch.empty_like(start)
        self.weight = 0.0
        self.state = AdamState.fresh(engine.model) if keep_optimizer else None

    def take_over(self, leg: Leg) -> None:
        """Receive the mediator's model, or start with the global one."""
        if leg.previous is None:
            self.model.copy_(self.start)
            self.weight = 0.0
            if self.state is not None:
                self.state.reset()
            return
        assert self.messages is not None
        sender = self.cluster.worker_rank(leg.previous), leg.mediator, self.groups[leg.mediator]
        header = self.messages.recv(np.empty(2), *sender)
        self.weight = float(header[0])
        for tensor in self._travelling():
            host = tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=tensor.dtype)
            self.messages.recv(host.numpy(), *sender)
            if host is not tensor:
                tensor.copy_(host)
        if self.state is not None:
            self.state.steps = int(header[1])

    def hand_over(self, leg: Leg) -> None:
        """Send the mediator's model, its weight so far and, if it persists, the optimizer's state, without waiting."""
        assert leg.following is not None and self.messages is not None
        receiver = self.cluster.worker_rank(leg.following), leg.mediator, self.groups[leg.mediator]
        steps = 0 if self.state is None else self.state.steps
        for values in (np.array([self.weight, steps], np.float64), *(t.numpy(force=True) for t in self._travelling())):
            self.messages.send(values, *receiver)

    def visit(
        self, leg: Leg, tasks: Mapping[int, ClientTask], rule: LocalRule, round: int, report: RelayReport
    ) -> None:
        """Train the leg's clients sequentially on the model."""
        visits = zip(leg.clients, leg.epochs, strict=True)
        visited = [replace(tasks[client], visit=epoch) for client, epoch in visits if client in tasks]
        samples = loaded_ahead(self.engine.load, visited, self.model.device)
        for task in visited:
            done = self.engine.advance(self.model, task, rule, round, samples, self.state)
            if task.visit == 0:
                self.weight += task.coefficient
            else:
                done.clients = done.samples = 0
            report.work += done
            report.visits += 1

    def close(self, leg: Leg, rule: LocalRule, total: Accumulator) -> float:
        """Add n_m/n · Δ_m to the round's sum; return n_m/n."""
        if self.weight:
            delta = self.model.sub_(self.start)
            with named_client(leg.clients[-1], self.cluster.rank):
                check_update(delta, rule.lr)
            total.add(delta, self.weight)
        return self.weight

    def _travelling(self) -> list[Tensor]:
        return [self.model] if self.state is None else [self.model, self.state.first, self.state.second]
