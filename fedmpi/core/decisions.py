"""Measurements and decisions before the work of a round: all ranks measure, rank 0 plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import FloatSum
from fedmpi.clients.sampler import ClientNumbers
from fedmpi.clients.stratifier import Stratifier
from fedmpi.common.decorators import MEASURABLE, UPDATES
from fedmpi.common.plan import Plan
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.config.checks import counts_late
from fedmpi.core.placement import BalanceLearner
from fedmpi.core.plan import Planner
from fedmpi.core.reduce import RoundTotals
from fedmpi.core.worker import Trainer

Measure = Callable[[int, Tensor, Ints, Sequence[str]], Floats]


@dataclass(eq=False)
class Decisions:
    """Measurement and planning before the work of a round."""

    planner: Planner  # Used by rank 0
    stratifier: Stratifier  # Measures and groups the clients, on all ranks together
    trainer: Trainer
    measure: Measure | None  # Measures single clients, if the sampler needs such numbers
    # Learns the best assignment of work (rank 0 only), if `cluster.balance` = "measured" and data is shared
    balance: BalanceLearner

    def __post_init__(self) -> None:
        self.cluster, self.layout, self.cohorts = self.trainer.cluster, self.trainer.layout, self.planner.cohorts
        config = self.trainer.config
        self.times_late = config.devices is not None and counts_late(config)  # once the samples used are known
        self.sampler, self.numbers = self.cohorts.sampler, self.cohorts.numbers

    def observe(self, t: int, model: Tensor) -> None:
        """Measure on all ranks before the server plans round t: strata that are due, a sampler's candidates."""
        self.stratifier.observe(t, model)
        if not self.sampler.measures:
            return
        trial = None
        if self.cluster.is_server:
            trial = self.planner.trial(t, self.cohorts.candidates(t, self.stratifier.strata))
        arrays = self.cluster.broadcast(trial.arrays() if trial else None)
        trial = trial or Plan.from_arrays(arrays)
        fresh = ClientNumbers(self.sampler.measures, self.numbers.clients, self.numbers.widths)
        self._enter(fresh, t, *self._measured(t, model, trial.clients, self.sampler.measures))
        if {*UPDATES} & {*self.sampler.measures}:
            self.trainer.train(trial, model, FloatSum(model.clone()), trial=True)  # and discard the sum
            self._enter(fresh, t, *self._read())
        self.cohorts.add_measured(t, fresh.values)

    @property
    def inquires(self) -> bool:
        """True if the sampler or the simulated clock needs measurements of a round's clients."""
        return bool(self.sampler.numbers) or self.times_late

    def inquire(self, plan: Plan, model: Tensor) -> None:
        """Measure the round's clients for the sampler on the model that they received; collective."""
        if self.times_late and not plan.one_step:
            tables = self.cluster.gather(self.trainer.worker.used(plan))
            if tables is not None:
                self.planner.add_seconds(plan, *np.concatenate(tables, axis=1))
        names = [name for name in self.sampler.numbers if name in MEASURABLE]
        clients, columns = self._measured(plan.round, model, plan.clients, names)
        self._enter(self.numbers, plan.round, clients, columns)
        if {*UPDATES} & {*self.numbers.names}:
            self._enter(self.numbers, plan.round, *self._read())
        if "seconds" in self.numbers.names and self.planner.seconds is not None:
            self._enter(self.numbers, plan.round, plan.clients, {"seconds": self.planner.seconds})

    def _measured(self, t: int, model: Tensor, clients: Ints, names: Sequence[str]) -> tuple[Ints, dict[str, Floats]]:
        """Measure sorted clients on their owners; return the clients (k,) and each number (k,) on rank 0; collective.

        Seconds are not measured: rank 0 computes them itself.
        """
        seen = [name for name in names if name in MEASURABLE]
        if not seen:
            return clients[:0], {}
        assert self.measure is not None
        mine = self.layout.own(clients)
        everybody, tables = (self.cluster.gather(part) for part in (mine, self.measure(t, model, mine, seen).ravel()))
        if everybody is None or tables is None:
            return clients[:0], {}
        table = np.concatenate(tables).reshape(-1, len(seen))
        return np.concatenate(everybody), dict(zip(seen, table.T, strict=True))

    def _read(self) -> tuple[Ints, dict[str, AnyArray]]:
        """Return the clients (k,) whose updates arrived, and their numbers and vectors, on rank 0; collective."""
        assert self.trainer.observer is not None
        clients, columns = self.trainer.observer.read()
        everybody = self.cluster.gather(clients)
        gathered = {name: self.cluster.gather(values) for name, values in columns.items()}
        if everybody is None:
            return clients[:0], {}
        return np.concatenate(everybody), {name: np.concatenate(parts or []) for name, parts in gathered.items()}

    def _enter(self, kept: ClientNumbers, round: int, clients: Ints, columns: Mapping[str, AnyArray]) -> None:
        """Store numbers that are not NaN."""
        for name, values in columns.items():
            known = ~np.isnan(values if values.ndim == 1 else values[:, 0])
            kept.enter(name, round, clients[known], values[known])

    def plan(self, t: int) -> Plan:
        """Return the server's plan of round t (rank 0 only)."""
        plan = self.planner.plan(t, self.stratifier.strata)
        self.stratifier.latest = plan.clients
        noise = self.stratifier.noise
        facts = plan.facts if noise is None else plan.facts | {"noise_clients": noise}
        return replace(plan, facts=facts, speeds=self.balance.speeds())

    def remember(self, record: Mapping[str, Any]) -> None:
        """Add the record of the last round to the history, if the sampler needs it (rank 0 only)."""
        if self.cohorts.past is not None:
            self.cohorts.past.finish(record)

    def plan_ahead(self, t: int) -> None:
        """Draft round t during training, if rank 0 does not train and the training cannot change the plan."""
        idle = self.cluster.is_server and self.layout.worker is None
        if idle and not (self.sampler.depends_on_rounds or self.planner.weighing.remembers or self.times_late):
            self.planner.prepare(t)

    def learn(self, totals: RoundTotals) -> None:
        """Learn the best assignment of work from the seconds of a typical round (rank 0 only)."""
        workers = slice(-self.layout.workers, None)  # the last ranks, with or without rank 0
        self.balance.observe(totals.cost[workers], totals.busy[workers])

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint state; complete on rank 0."""
        accounts, numbers = self.planner.state(), self.numbers.state()
        return self.stratifier.state() | accounts | self.balance.state() | numbers | self.cohorts.state()

    def load(self, tensors: Mapping[str, Tensor] | None, resumed: bool) -> None:
        """Restore the checkpoint state; collective."""
        saved = dict(tensors or {})
        if tensors is not None:
            for part in (self.planner, self.balance, self.numbers, self.cohorts):
                part.load(saved)
        self.stratifier.load(saved, resumed=resumed)
