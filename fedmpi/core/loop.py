"""The round loop: the one file to read first.

Every rank runs the same loop. In round t the server (rank 0) plans, the workers train the planned clients they own,
one fused allreduce sums updates, weights and metrics, and every rank takes the same server step. Rank 0 evaluates the
model of round t while the workers train round t + 1; the result lands in the record of round t.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

from fedmpi.common.calling import during
from fedmpi.common.plan import Plan
from fedmpi.core.evaluation import ClientsView, facts_of
from fedmpi.core.experiment import Experiment
from fedmpi.core.records import Listener, OnRound, round_record, summary_facts
from fedmpi.core.reduce import RankWork, RoundSum, RoundTotals
from fedmpi.core.state import SavedState
from fedmpi.local.work import check_model
from fedmpi.mpi import read_launch
from fedmpi.records.history import History, Record, as_line
from fedmpi.records.progress import RoundDisplay
from fedmpi.records.recorder import Recorder
from fedmpi.records.tables import CLIENTS, EVENTS

VIEWING = ("clients", "fine_tune")
"""Phases of the evaluation on clients."""

Ending = Literal["finished", "ended", "stopped"]
"""Reasons for the end of a run.

"finished": all rounds are done. "ended": `on_round` or `evaluation.patience` ended the run earlier. "stopped": a stop
was requested, and the state needed to resume is saved."""


class Simulation:
    """One run of an experiment on the ranks of a cluster."""

    def __init__(
        self,
        experiment: Experiment,
        recorder: Recorder | None = None,
        *,
        on_round: OnRound | None = None,
        stop: Callable[[], bool] | None = None,
        progress: bool = False,
        rearm: Callable[[], None] | None = None,
    ):
        self.experiment = experiment
        self.cluster = experiment.cluster
        self.config = experiment.config
        self.decisions, self.trainer, self.server = experiment.decisions, experiment.trainer, experiment.server
        self.net = net = experiment.model
        self.recorder = recorder
        self.history = recorder.history if recorder else History(self.config)
        self.model = net.initial.clone()
        self.hooks = hooks = self.trainer.hooks
        self.sums = RoundSum(
            self.cluster,
            self.model,
            self.config.server.exact,
            experiment.single_updates,
            vectors=hooks.sums if hooks else (),
            numbers=hooks.numbers if hooks else (),
        )
        self.saved = SavedState(experiment, recorder)
        self.listener = Listener(self.cluster, on_round, self.config.evaluation.patience is not None)
        self.stop = stop or (lambda: False)
        self.rearm = rearm or (lambda: None)
        self.progress = progress and self.cluster.is_server
        self.display: RoundDisplay | None = None
        self.pending: Record | None = None
        self.phases: dict[str, float] = {}
        self.summary: Record = {}

    def run(self) -> Ending:
        """Run all remaining rounds; return the reason for the end."""
        first, self.pending = self.saved.resume(self.model)
        if self.progress:
            launched = read_launch() is not None
            self.display = RoundDisplay(self.config.rounds, first, self.config.logging.interval, launched=launched)
        exhausted = self.saved.exhausted()
        ending: Ending = "ended" if exhausted else "finished"
        t = first - 1
        for t in range(first, first if exhausted else self.config.rounds):
            with during(t):
                plan, totals = self._round(t)
            enough = self._report_round(plan)
            if t + 1 < self.config.rounds:
                ending = "ended" if enough else "stopped" if totals.stop else "finished"
            if ending == "stopped" or self._checkpoint_due(t + 1, ending):
                self.saved.save(t + 1, self.model, self.history.rounds, self.pending)
            if ending != "finished":
                break
        if ending != "stopped":
            self.saved.check(self.model, t)
            self._write_pending(last=True)
        self._write_results(ending)
        return ending

    def _round(self, t: int) -> tuple[Plan, RoundTotals]:
        """Plan, train, reduce, step, and record one round."""
        started, self.phases = time.perf_counter(), {}
        self.rearm()
        plan = self._plan(t)
        work = self._work(plan)
        if self.decisions.inquires:
            with self._phase("inquire"):
                self.decisions.inquire(plan, self.model)  # measured before the server step
        with self._phase("reduce"):
            totals = self.sums.reduce()
        self.trainer.check(plan, totals.sums)
        self._apply(plan, totals)
        self._note(plan, totals, started, self._view_clients(plan))
        if work.steady and self.cluster.is_server:
            self.decisions.learn(totals)
        return plan, totals

    def _plan(self, t: int) -> Plan:
        """Evaluate and measure for the sampler if it needs that; then plan on the server and broadcast the plan."""
        if self.decisions.sampler.needs_history:
            self._evaluate_pending()
        with self._phase("plan"):
            self.decisions.observe(t, self.model)
            plan = self.decisions.plan(t) if self.cluster.is_server else None
            arrays = self.cluster.broadcast(plan.arrays() if plan else None)
            return plan or Plan.from_arrays(arrays)

    def _work(self, plan: Plan) -> RankWork:
        """Add this rank's weighted client updates to the round's sum; the server evaluates the last round."""
        self.sums.open(plan, self.model)
        self._write_pending()
        started = time.perf_counter()
        work = self.trainer.train(plan, self.model, self.sums.updates, self.sums.further)
        self.decisions.plan_ahead(plan.round + 1)
        busy = time.perf_counter() - started - (work.relayed.idle_seconds if work.relayed else 0.0)
        self.sums.close(work, busy, self.stop(), self.trainer.observer, self.hooks.totals if self.hooks else None)
        return work

    def _apply(self, plan: Plan, totals: RoundTotals) -> None:
        """Take the same server step on every rank (Reddi et al. 2020, Algorithm 2); a diverged model ends the run."""
        with self._phase("apply"):
            self.server.take(plan, totals, self.model)
            check_model(self.model, plan.round, plan.lr)

    def _view_clients(self, plan: Plan) -> Record:
        """Count the use of clients, and evaluate the model on them if due; return the record entries (rank 0)."""
        view = self.experiment.view
        if view is None:
            return {}
        view.count(plan)
        return self._look(view, plan) if view.due(plan.round) else {}

    def _look(self, view: ClientsView, plan: Plan) -> Record:
        """Evaluate the model on each client; return the record entries (rank 0)."""
        with self._phase("clients"):
            table = view.look(plan, self.model)
        if view.tunes:
            with self._phase("fine_tune"):
                tuned = view.tune(plan, self.model)
            table = None if table is None or tuned is None else table | tuned
        if table is None or not len(table["client"]):
            return {}
        table |= self.decisions.planner.accounts.of_clients(table["client"])
        self.history.tables[CLIENTS].append(table)
        return facts_of(table)

    def _note(self, plan: Plan, totals: RoundTotals, started: float, seen: Record) -> None:
        """Keep the round's record on rank 0 until its evaluation is available."""
        if self.cluster.is_server:
            record = round_record(self.experiment, plan, totals) | seen
            record["seconds"] = time.perf_counter() - started
            record["phase_seconds"] = {**self.phases, **totals.phase_seconds()}
            self.pending = record
            if plan.events:
                self.history.tables[EVENTS].append(plan.events)

    def _report_round(self, plan: Plan) -> bool:
        """Call `on_round` with the evaluated round; return whether it, or `evaluation.patience`, ends the run.

        Without `on_round`, the evaluation overlaps with the next round as long as it cannot end the run.
        """
        if not self.listener.listens:
            return False
        best = self.saved.best
        if decides := self.listener.on_round is not None or best.patience_left <= 1:
            self._evaluate_pending()
        ended = self.listener.ends(self.pending, partial(self.net.copy, self.model), best.exhausted)
        if ended and plan.round + 1 < self.config.rounds:
            view = self.experiment.view
            seen = self._look(view, plan) if view is not None and not view.due(plan.round) else {}
            if self.pending is not None:
                self.pending |= seen
                self.pending["phase_seconds"] |= {n: s for n, s in self.phases.items() if n in VIEWING}
        if decides:
            self._write_pending(last=ended)
        return ended

    def _write_pending(self, last: bool = False) -> None:
        """Write the record of the last finished round, evaluated if due. The model has not changed since."""
        self._evaluate_pending(last)
        record, self.pending = self.pending, None
        if record is None:
            return
        if self.recorder is not None:
            self.recorder.write(record)
        else:
            self.history.lines.append(as_line(record))
        if self.display is not None:
            self.display.update(record)

    def _evaluate_pending(self, last: bool = False) -> None:
        """Add the evaluation to the pending record, if it is due."""
        record, every = self.pending, self.config.evaluation.every
        if record is None or "evaluate" in record["phase_seconds"]:
            return
        if last or (record["round"] + 1) % every == 0 or record["round"] + 1 == self.config.rounds:
            started = time.perf_counter()
            scores = self.experiment.data_facts.evaluated.scores(self.net, self.model, record["round"])
            record.update(scores)
            self.saved.note(record, self.model)
            record["phase_seconds"]["evaluate"] = time.perf_counter() - started
        self.decisions.remember(record)

    def _checkpoint_due(self, next_round: int, ending: Ending) -> bool:
        every = self.config.checkpoint.every
        last = next_round == self.config.rounds or ending == "ended"
        return every > 0 and (next_round % every == 0 or last)

    def _write_results(self, ending: Ending) -> None:
        """Write model and summary of a finished run, or only the files to resume a stopped run."""
        if self.recorder is None:
            self._write_pending(last=True)  # a stopped run without a folder cannot store its last record
        else:
            self.recorder.saved()
            self.recorder.write_best(self.saved.best_file())
        self.sums.release()
        moved = self.saved.moved()
        self.net.begin(self.model)
        self.close()
        if not self.cluster.is_server:
            return
        facts = summary_facts(self.experiment) | moved.facts()
        if ending == "ended":
            exhausted = self.saved.best.exhausted
            facts["ended_because"] = self.saved.best.reason if exhausted else "on_round returned a true value"
        if self.recorder is None or ending == "stopped":
            self.summary = self.history.summary(facts)
        else:
            evaluated = self.experiment.data_facts.evaluated
            self.summary = self.recorder.finish(self.net.module, facts, evaluated.confusion, evaluated.class_names)

    def close(self) -> None:
        """Close the progress display, if there is one."""
        if self.display is not None:
            self.display.close()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - started
