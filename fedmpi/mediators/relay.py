"""The relay: the mediators' models go from client to client, and from rank to rank where the data live.

Duan et al. 2019 (Astraea), Algorithm 1, `MediatorUpdate` and line 6. Data stay where they are, models travel. The order
is that of `fedmpi.mediators.relay_plan`, which also argues why it cannot deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.local.failures import check_update, named_client
from fedmpi.local.optimizers import AdamState
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, WorkReport
from fedmpi.mediators.relay_plan import Leg, RelayPlan
from fedmpi.mpi import Cluster, RankGroup


@dataclass
class RelayReport:
    """What one rank did for the mediators in a round."""

    work: WorkReport  # Every participant counts once, with its samples; steps and losses count in every mediator epoch
    visits: int = 0  # Visits at clients of this rank that had rows to train on, all mediator epochs
    hops: int = 0  # Models that this rank handed to another one
    # Time spent on training and handing over, and time spent waiting for sub-communicators and models
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0


def run_relay(
    cluster: Cluster,
    engine: SequentialEngine,
    plan: RelayPlan,
    tasks: Mapping[int, ClientTask],
    start: Tensor,
    rule: LocalRule,
    round: int,
    total: Accumulator,
    keep_optimizer: bool = False,
) -> RelayReport:
    """Run this rank's legs of the round; called by all ranks with the same plan, by one that only serves too.

    Parameters
    ----------
    cluster : Cluster
        Gives this rank's worker index and the mediators' sub-communicators.
    engine : SequentialEngine
        Trains one client on the mediator's model.
    plan : RelayPlan
        The round's relays.
    tasks : mapping of int to ClientTask
        This rank's participants that have rows, by client. The coefficient of a mediator's Δ_m is the sum of its
        clients' coefficients, so n_m/n when theirs are n_k/n.
    start : Tensor (d,)
        The global model w; left as it is.
    rule : LocalRule
        E local epochs (or steps) at every visit.
    round : int
        Keys the random streams, with the mediator epoch as the visit.
    total : Accumulator
        Gains n_m/n · Δ_m, Δ_m = w_m - w, once a mediator, on the worker that its relay ends at.
    keep_optimizer : bool
        Hand Adam's state on with the model; otherwise it starts afresh at every visit.

    Returns
    -------
    RelayReport

    Raises
    ------
    ClientFailure
        Naming the client whose training failed.
    """
    began = time.perf_counter()
    relay = _Relay(cluster, engine, plan, start, keep_optimizer)
    report = RelayReport(WorkReport())
    for leg in plan.of(cluster.worker):
        relay.take_over(leg)
        taken = time.perf_counter()
        relay.visit(leg, tasks, rule, round, report)
        if leg.following is None:
            report.work.weight += relay.close(leg, rule, total)
        else:
            relay.hand_over(leg)
            report.hops += 1
        report.idle_seconds += taken - began
        began = time.perf_counter()
        report.busy_seconds += began - taken
    return report


class _Relay:
    """The model in hand: taken from the previous worker, trained, given to the next."""

    def __init__(
        self, cluster: Cluster, engine: SequentialEngine, plan: RelayPlan, start: Tensor, keep_optimizer: bool
    ):
        self.cluster, self.engine, self.start = cluster, engine, start
        self.groups = _groups(cluster, plan)
        self.model = torch.empty_like(start)
        self.weight = 0.0
        self.state = AdamState.fresh(engine.model) if keep_optimizer else None

    def take_over(self, leg: Leg) -> None:
        """Receive the mediator's model, or begin with the global one."""
        if leg.previous is None:
            self.model.copy_(self.start)
            self.weight = 0.0
            if self.state is not None:
                self.state.reset()
            return
        group = self.groups[leg.mediator]
        source = group.ranks.index(self.cluster.worker_rank(leg.previous))
        header = group.recv(np.empty(2), source, tag=leg.mediator)
        self.weight = float(header[0])
        for tensor in self._travelling():
            _receive(group, tensor, source, leg.mediator)
        if self.state is not None:
            self.state.steps = int(header[1])

    def hand_over(self, leg: Leg) -> None:
        """Send the mediator's model, its weight so far and, if it persists, the optimizer's state; nothing waits."""
        assert leg.following is not None
        group = self.groups[leg.mediator]
        receiver = group.ranks.index(self.cluster.worker_rank(leg.following))
        steps = 0 if self.state is None else self.state.steps
        group.send(np.array([self.weight, steps], np.float64), receiver, tag=leg.mediator)
        for tensor in self._travelling():
            group.send(tensor.detach().cpu().numpy(), receiver, tag=leg.mediator)

    def visit(
        self, leg: Leg, tasks: Mapping[int, ClientTask], rule: LocalRule, round: int, report: RelayReport
    ) -> None:
        """Train the leg's clients one after another on the model."""
        for client, epoch in zip(leg.clients, leg.epochs, strict=True):
            task = tasks.get(client)
            if task is None:
                continue
            done = self.engine.advance(self.model, replace(task, visit=epoch), rule, round, self.state)
            if epoch == 0:
                self.weight += task.coefficient
            else:
                done.clients = done.samples = 0
            report.work += done
            report.visits += 1

    def close(self, leg: Leg, rule: LocalRule, total: Accumulator) -> float:
        """Add n_m/n · Δ_m to the round's sum; returns n_m/n."""
        if self.weight:
            delta = self.model.sub_(self.start)
            with named_client(leg.clients[-1], self.cluster.rank):
                check_update(delta, rule.lr)
            total.add(delta, self.weight)
        return self.weight

    def _travelling(self) -> list[Tensor]:
        return [self.model] if self.state is None else [self.model, self.state.first, self.state.second]


def _groups(cluster: Cluster, plan: RelayPlan) -> dict[int, RankGroup]:
    """The sub-communicators of this worker's mediators; every rank asks for those of all mediators, in their order."""
    members = {mediator: workers for mediator, workers in plan.members().items() if len(workers) > 1}
    groups = cluster.groups([[cluster.worker_rank(worker) for worker in workers] for workers in members.values()])
    return {mediator: group for mediator, group in zip(members, groups, strict=True) if group is not None}


def _receive(group: RankGroup, tensor: Tensor, source: int, tag: int) -> None:
    if tensor.device.type == "cpu":
        group.recv(tensor.numpy(), source, tag)
    else:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        group.recv(host.numpy(), source, tag)
        tensor.copy_(host)
