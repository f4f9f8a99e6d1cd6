"""Measurements and decisions before the work of a round: all ranks measure, rank 0 plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedmpi.clients.sampler import ClientNumbers, ClientSampler
from fedmpi.clients.stratifier import Stratifier
from fedmpi.common.decorators import MEASURABLE
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.core.placement import BalanceLearner, Layout
from fedmpi.core.plan import Planner
from fedmpi.core.reduce import RoundTotals
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.mpi import Cluster

Measure = Callable[[int, Tensor, Ints, Sequence[str]], Floats]


@dataclass(eq=False)
class Inquiry:
    """Measurements of single clients on the ranks that own them, gathered on rank 0."""

    cluster: Cluster
    sampler: ClientSampler
    numbers: ClientNumbers
    owned: tuple[int, int]  # First client of this rank and one past its last
    measure: Measure | None
    observer: UpdateObserver | None

    @staticmethod
    def measures(sampler: ClientSampler) -> bool:
        """Check whether the sampler needs measurements that training and the clock do not provide."""
        return bool({*sampler.measures, *sampler.numbers} & set(MEASURABLE))

    def candidates(self, t: int, model: Tensor, wanted: Ints | None) -> dict[str, Floats]:
        """Measure the sampler's candidates (c,) on the current model, float64 (N,) each, NaN for all others.

        The seconds are not included; rank 0 computes them itself. Collective; only rank 0 gives `wanted` and receives
        the result (other ranks receive {}).
        """
        (everybody,) = self.cluster.broadcast([wanted] if wanted is not None else None)
        names = tuple(name for name in self.sampler.measures if name != "seconds")
        if not names:
            return {}
        gathered = self._gathered(t, model, everybody, names)
        if gathered is None:
            return {}
        clients, table = gathered
        fresh = {name: np.full(self.numbers.clients, np.nan) for name in names}
        for place, name in enumerate(names):
            fresh[name][clients] = table[:, place]
        return fresh

    def participants(self, plan: Plan, model: Tensor, seconds: Floats | None) -> None:
        """Record measurements of a round's clients on the model that they received; collective."""
        if measured := [name for name in self.sampler.numbers if name in MEASURABLE]:
            gathered = self._gathered(plan.round, model, plan.clients, measured)
            if gathered is not None:
                for place, name in enumerate(measured):
                    self._enter(name, plan.round, gathered[0], gathered[1][:, place])
        if "update_norm" in self.numbers.names:
            norms = self.observer.norms if self.observer is not None else {}
            clients = self.cluster.gather(np.fromiter(norms.keys(), np.int64, len(norms)))
            values = self.cluster.gather(np.fromiter(norms.values(), np.float64, len(norms)))
            if clients is not None and values is not None:
                self._enter("update_norm", plan.round, np.concatenate(clients), np.concatenate(values))
        if "seconds" in self.numbers.names and seconds is not None:
            self._enter("seconds", plan.round, plan.clients, seconds)

    def _gathered(self, t: int, model: Tensor, clients: Ints, names: Sequence[str]) -> tuple[Ints, Floats] | None:
        """Measure sorted clients on their owners; return the clients (k,) and numbers (k, names) on rank 0."""
        first, last = np.searchsorted(clients, self.owned)
        mine = clients[first:last]
        assert self.measure is not None
        table = self.measure(t, model, mine, names)
        everybody, tables = self.cluster.gather(mine), self.cluster.gather(table.ravel())
        if everybody is None or tables is None:
            return None
        return np.concatenate(everybody), np.concatenate(tables).reshape(-1, len(names))

    def _enter(self, name: str, round: int, clients: Ints, values: Floats) -> None:
        known = ~np.isnan(values)
        self.numbers.enter(name, round, clients[known], values[known])


@dataclass
class Decisions:
    """Measurement and planning before the work of a round."""

    cluster: Cluster
    layout: Layout
    planner: Planner  # Used by rank 0
    stratifier: Stratifier  # Measures and groups the clients, on all ranks together
    sampler: ClientSampler
    inquiry: Inquiry  # Measurements of single clients for the sampler, on all ranks
    # Learns the best assignment of work (rank 0 only), if `cluster.balance` = "measured" and data is shared
    balance: BalanceLearner

    def observe(self, t: int, model: Tensor) -> None:
        """Measure on all ranks before the server plans round t: strata that are due, a sampler's candidates."""
        self.stratifier.observe(t, model)
        if self.sampler.measures:
            cohorts = self.planner.cohorts
            wanted = cohorts.candidates(t, self.stratifier.strata) if self.cluster.is_server else None
            measured = self.inquiry.candidates(t, model, wanted)
            if wanted is not None:
                cohorts.add_measured(t, wanted, measured)

    @property
    def inquires(self) -> bool:
        """True if the sampler needs measurements of a round's clients."""
        return bool(self.sampler.numbers)

    def inquire(self, plan: Plan, model: Tensor) -> None:
        """Measure the round's clients for the sampler; collective, before the server step."""
        self.inquiry.participants(plan, model, self.planner.seconds)

    def plan(self, t: int) -> Plan:
        """Return the server's plan of round t (rank 0 only)."""
        plan = self.planner.plan(t, self.stratifier.strata)
        self.stratifier.latest = plan.clients
        noise = self.stratifier.noise
        facts = plan.facts if noise is None else plan.facts | {"noise_clients": noise}
        return replace(plan, facts=facts, speeds=self.balance.speeds())

    def plan_ahead(self, t: int) -> None:
        """Draft round t during training, if rank 0 does not train and the training cannot change the plan."""
        idle = self.cluster.is_server and self.layout.worker is None
        if idle and not self.sampler.depends_on_rounds:
            self.planner.prepare(t)

    def learn(self, totals: RoundTotals) -> None:
        """Learn the best assignment of work from the seconds of a typical round (rank 0 only)."""
        workers = slice(-self.layout.workers, None)  # the last ranks, with or without rank 0
        self.balance.observe(totals.cost[workers], totals.busy[workers])

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint state; complete on rank 0."""
        accounts, numbers = self.planner.accounts.state(), self.inquiry.numbers.state()
        parts = self.stratifier.state() | accounts | self.balance.state() | numbers
        return parts | (self.sampler.state() if self.cluster.is_server else {})

    def load(self, tensors: Mapping[str, Tensor] | None, resumed: bool) -> None:
        """Restore the checkpoint state; collective."""
        saved = dict(tensors or {})
        if tensors is not None:
            for part in (self.planner.accounts, self.balance, self.inquiry.numbers, self.sampler):
                part.load(saved)
        self.stratifier.load(saved, resumed=resumed)
