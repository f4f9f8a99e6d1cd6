"""Asynchronous rounds: clients train all the time, and the server steps when enough updates have arrived.

A round is one server step. FedAsync (Xie et al. 2019, Algorithm 1) steps with every update, FedBuff (Nguyen et al.
2022, Algorithm 1) with every K, and a semi-synchronous server every so many simulated seconds. The step is

    w ← S(w, Σ c_k s_k D_k / Σ c_k)

with the aggregation weights c_k, the staleness weights s_k and the server optimizer S. D_k is the update w_k − w_v of a
client that received version v of the model. For float buffers, and with `average = "models"`, it is the difference
w_k − w to the current model: sums of changes could make the variances of batch norm negative. With models, a buffer of
1 and S(w, Δ) = w + α Δ, the step is FedAsync's w ← (1 − α s) w + α s w_k.

Rank 0 plans: it simulates the events up to the next step and sends the starts in flight with the plan. All ranks train
together. If an update of the step is not trained yet, several ranks train it with the next updates to arrive in one
pass, and keep those until their step. Every rank stores the versions in flight, (versions, d), of which there are at
most `in_flight`. The kept updates of all ranks together take at most (in_flight, d), usually (4, d) per rank.

Deviation from the papers: their servers and clients run on real clocks, where simultaneous events have no fixed order.
Here, updates that arrive at the same simulated time enter in the order in which their clients started. Free places are
filled after them, or as soon as a client becomes available.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator, Adder
from fedmpi.aggregation.staleness import StalenessWeights
from fedmpi.clients.cohort import Cohort
from fedmpi.clients.events import EventQueue, PlaceDraw, Start
from fedmpi.clients.strata import Strata
from fedmpi.clients.turnout import Turnout
from fedmpi.common.errors import UserError
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.config.tables import Async
from fedmpi.core.plan import Planner, rate_of
from fedmpi.core.reduce import RankWork
from fedmpi.core.worker import Trainer
from fedmpi.local.work import ClientTask, RoundJob, WorkReport

log = logging.getLogger("fedmpi")

VERSIONS, MODELS = "flight.versions", "flight.models"
"""Checkpoint names of the versions (round, then integer buffers) and of their models."""
AHEAD = 4
"""Updates per worker that are trained in one pass: enough to balance their durations, few enough to keep."""
MOST_LOST = 10_000
"""Updates lost in a row that end the run."""


class AsyncPlanner(Planner):
    """Planner of the server steps of a run."""

    cohorts: PlaceDraw

    def __init__(self, *given: Any):
        super().__init__(*given)
        assert isinstance(self.config.topology, Async)
        self.topology, self.queue = self.config.topology, EventQueue()
        self.staleness = StalenessWeights(self.topology.staleness)
        self._numbers: dict[str, float] = {}  # of the latest draw for the step
        self._asked: list[tuple[Ints, Floats]] = []  # clients (k,) of each draw for the step, and their energy

    def prepare(self, t: int, strata: Strata | None = None) -> None:
        """Do nothing: the events of a round start from those of the round before."""

    def plan(self, t: int, strata: Strata | None = None) -> Plan:
        """Simulate the events up to the server step of round t, and return its plan."""
        began, self._numbers, self._asked = self.queue.clock, {}, [(np.empty(0, np.int64), np.empty(0))]
        due = sorted(self._arrivals(t), key=lambda start: start.client)
        flying = self.queue.flying()
        rows = [(start.number, start.client, start.version, start.repeat) for start in (*due, *flying)]
        flight = np.array(rows, np.int64).reshape(-1, 4).T.copy()
        clients, staleness = flight[1, : len(due)], t - flight[2, : len(due)]
        cohort = Cohort(clients, multiplicity=np.array([start.times for start in due], np.int64))
        self.seconds = np.array([start.seconds for start in due])
        asked, energy = map(np.concatenate, zip(*self._asked, strict=True))
        powered = self.config.devices is not None and self.config.devices.power is not None
        turnout = Turnout(cohort, asked, len(self.sizes), joules=energy if powered else None)
        if self.cohorts.past is not None:
            self.cohorts.past.enter(t, np.unique(asked), np.unique(clients))
        facts = {
            "participants": len(due),
            "asked": len(asked),
            "virtual_seconds": self.queue.clock - began,
            "in_flight": len(self.queue.busy),
            "versions": len(np.unique(flight[2, len(due) :])),
            **self._numbers,
            **({"joules": float(energy.sum())} if powered else {}),
            **self.accounts.enter(turnout),
            **({"staleness_mean": float(staleness.mean()), "staleness_max": int(staleness.max())} if due else {}),
        }
        return Plan(
            round=t,
            lr=rate_of(self.config, t),
            clients=clients,
            coefficients=self._coefficients(self.weighing, t, cohort),
            per_sample=self.weighing.per_sample,
            normalize=self.weighing.normalizes,
            flight=flight,
            discounts=self.staleness.of(staleness, t),
            facts=facts,
            events=self.queue.close_step(t),
        )

    def _arrivals(self, t: int) -> list[Start]:
        """Let time pass until the server steps; return the starts whose updates enter the step.

        All arrivals of the same time, and the step that they complete, come before free places are filled.
        """
        queue, due, turn, lost = self.queue, list[Start](), 0, 0
        period = self.topology.period
        end = np.inf if period is None else (t + 1) * period
        while sum(start.times for start in due) < self.topology.size:
            if queue.clock < min(queue.following, end):
                turn += self._fill(t, turn)
                returns = self.cohorts.returns(t) if queue.places < self.topology.in_flight else np.inf
                if returns < min(queue.following, end):
                    queue.clock = returns  # to fill the free places
                    continue
            if queue.following > end or queue.following == np.inf:
                break
            start = queue.pop()
            due += [] if start.lost else [start]
            lost = lost + 1 if start.lost else 0
            if lost == MOST_LOST:
                raise UserError(
                    f"round {t}: the last {lost:,} updates were lost, as their clients failed, left or missed the "
                    "deadline. Check the units of clients.availability and devices"
                )
        if period is not None:
            queue.clock = end
        return due

    def _fill(self, t: int, turn: int) -> bool:
        """Start clients in the free places, if there are any."""
        busy, self.cohorts.clock = self.queue.busy, self.queue.clock
        if places := self.topology.in_flight - self.queue.places:
            cohort, seconds, lost, energy = self.cohorts.fill(t, turn, places, busy)
            self._check_draw(t, cohort, opening=False)
            self._numbers = {f"sampler_{name}": float(value) for name, value in cohort.numbers.items()}
            self.queue.start(t, cohort, seconds, lost)
            self._asked.append((cohort.clients, energy))
        return places > 0

    def state(self) -> dict[str, Tensor]:
        return super().state() | self.queue.state()

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.queue.load(state)


class Stale:
    """Accumulator that adds (update + shift) · weight to another one."""

    def __init__(self, total: Adder, weight: float, shift: Tensor | None):
        self.total, self.weight, self.shift = total, weight, shift

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        moved = vector if self.shift is None else vector + self.shift
        self.total.add(moved * self.weight, coefficient, client)


class Keeper:
    """Accumulator that keeps the last update."""

    def __init__(self) -> None:
        self.update = torch.empty(0)

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        self.update = vector.clone()


class AsyncTrainer(Trainer):
    """Training of the clients in flight that this rank owns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.config.topology, Async)
        self.topology = self.config.topology
        self.models: dict[int, Tensor] = {}  # (d,) each: versions in flight
        self.integers: dict[int, Mapping[str, Tensor]] = {}  # their integer buffers
        self._given: set[int] = set()  # numbers of the starts that are trained, on any rank
        # updates of this rank that wait for their step, and integer buffers after training
        self._kept: dict[int, tuple[Tensor, WorkReport, list[Tensor]]] = {}

    def train(self, plan: Plan, model: Tensor, total: Accumulator, *others: Any, **more: Any) -> RankWork:
        """Add the weighted updates that enter the step to `total`; train further ones if a worker would idle."""
        numbers, _, versions, repeats = plan.flight
        members, report, places, due = len(plan.clients), WorkReport(), 0, 0
        if not self._began:
            self._began, most, megabytes = True, self.topology.in_flight, model.nbytes / 1e6
            what = "memory: at most %d models (%.1f MB each) on every rank, and as many updates over all ranks together"
            log.info(what, most, megabytes)
        mine, keys, net = self._mine(plan), versions + (repeats << 32), self.sequential.model
        self.models[plan.round], self.integers[plan.round] = model, net.state()
        with self.loss.kept_generators():
            for place in mine[mine >= members].tolist():
                keeper = Keeper()
                net.reset_integers()
                _, done = self._train(plan, np.array([place]), keeper)
                self._kept[int(numbers[place])] = keeper.update, done, [one.clone() for one in net.noted]
            net.reset_integers()
            mine = mine[mine < members]
            for key in np.unique(keys[mine]).tolist():
                group = mine[keys[mine] == key]
                into = self._into(plan, int(group[0]), model, total)
                tasks, done = self._train(plan, group, into, merges=into is total)
                report += done
                places, due = places + len(group), due + len(tasks)
            for place in np.flatnonzero(np.isin(numbers[:members], [*self._kept])).tolist():
                update, done, counts = self._kept.pop(int(numbers[place]))
                net.note_integers(counts)
                tasks = self._tasks(self._part(plan, np.array([place])))
                for task in tasks:
                    self._into(plan, place, model, total).add(update, task.coefficient, task.client)
                    done.weight, done.load_seconds = task.coefficient, 0.0
                report += done
                places, due = places + 1, due + len(tasks)
        self._keep_versions(plan, model)
        return RankWork(report, places, due)

    def _mine(self, plan: Plan) -> Ints:
        """Return the places in `plan.flight` of the starts that this rank trains now, sorted by client.

        Every rank derives the same assignment. If an update of the step is not trained yet, a few that arrive later
        are trained with it.
        """
        numbers, clients = plan.flight[:2]
        waiting = np.flatnonzero(~np.isin(numbers, [*self._given]))
        due, workers = np.count_nonzero(waiting < len(plan.clients)), self.layout.workers
        waiting = waiting[: max(due, AHEAD * workers if workers > 1 else 0) if due else 0]
        self._given |= set(numbers[waiting].tolist())
        waiting = waiting[np.argsort(clients[waiting], kind="stable")]
        part = replace(plan, clients=clients[waiting])
        owners = self.worker.trainers(part) if self.layout.shared else self.layout.owners(part.clients)
        mine: Ints = waiting[owners == (-1 if self.layout.worker is None else self.layout.worker)]
        return mine

    def _part(self, plan: Plan, places: Ints) -> Plan:
        """Return the plan of starts from one version, as of the round of this version."""
        clients, versions = plan.flight[1:3, places]
        enters = bool(places[0] < len(plan.clients))
        return Plan(
            round=int(versions[0]),
            lr=rate_of(self.config, int(versions[0])),
            clients=clients,
            coefficients=plan.coefficients[places] if enters else np.ones(len(places)),
            per_sample=plan.per_sample,
            normalize=plan.normalize,
        )

    def _tasks(self, part: Plan) -> list[ClientTask]:
        return self.worker.tasks(part, np.arange(len(part.clients)))

    def _into(self, plan: Plan, place: int, model: Tensor, total: Accumulator) -> Adder:
        """Return the accumulator of updates from the version of a start; float buffers are averaged as models are."""
        weight, start = float(plan.discounts[place]), self.models[int(plan.flight[2, place])]
        added, shift = 0 if self.topology.average == "models" else self.sequential.model.trainable, None
        if start is not model and added < len(model):
            shift = start - model
            shift[:added] = 0
        return total if weight == 1 and shift is None else Stale(total, weight, shift)

    def _train(
        self, plan: Plan, places: Ints, into: Adder, merges: bool = False
    ) -> tuple[list[ClientTask], WorkReport]:
        """Train the same start from one version of some clients; return their tasks and the report.

        The version keys random streams; repeated starts have others.
        """
        part, report, net = self._part(plan, places), WorkReport(), self.sequential.model
        tasks, key = self._tasks(part), part.round + (int(plan.flight[3, places[0]]) << 32)
        start = self.models[part.round]
        net.load(self.integers[part.round])
        if self.hooks is not None:
            self.hooks.begin(key, start, {})
        if self.observer is not None:
            self.observer.begin(tasks, key, start)
        engine = self.engine if merges else self.engine.rest
        for rule, group in self.worker.groups(part, tasks, self.worker.rule(part)) if tasks else ():
            report += engine.train(group, RoundJob(start, rule, key, into))
        net.load(self.integers[plan.round])
        return tasks, report

    def _keep_versions(self, plan: Plan, model: Tensor) -> None:
        """Keep the versions of the starts that stay in flight."""
        numbers, _, versions, _ = plan.flight[:, len(plan.clients) :]
        self._given &= set(numbers.tolist())
        needed = np.unique(versions).tolist()
        self.models = {v: model.clone() if v == plan.round else self.models[v] for v in needed}
        self.integers = {v: self.integers[v] for v in needed}

    def state(self) -> dict[str, Tensor]:
        """Return the versions in flight, for a checkpoint; the same on all ranks."""
        if not self.models:
            return {VERSIONS: torch.empty(0), MODELS: torch.empty(0)}
        rows = [torch.cat([torch.tensor([version]), *one.values()]) for version, one in self.integers.items()]
        return {VERSIONS: torch.stack(rows), MODELS: torch.stack([model.cpu() for model in self.models.values()])}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the versions of a checkpoint."""
        if VERSIONS in state:
            rows = state[VERSIONS].cpu()
            self.models = dict(zip(rows[:, 0].tolist(), state[MODELS].unbind(), strict=True))
            self.integers = {int(row[0]): {"integers": row[1:]} for row in rows}
