"""The round loop: the one file to read first.

Every rank runs the same loop. In round t the server (rank 0) plans, the workers train the planned clients they own,
one fused allreduce sums updates, weights and metrics, and every rank takes the same server step. Rank 0 evaluates the
model of round t while the workers train round t + 1; the result lands in the record of round t.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from fedmpi.cluster.refusal import on_server
from fedmpi.common.files import writing
from fedmpi.common.plan import Plan
from fedmpi.process.signals import STOPPED_AFTER_SAVING, Interrupt
from fedmpi.records.checkpoint import clients_file
from fedmpi.records.progress import open_display, show_summary
from fedmpi.records.recorder import Recorder
from fedmpi.rounds.agreement import check_models
from fedmpi.rounds.assemble import Experiment
from fedmpi.rounds.sum import RoundSum, RoundTotals
from fedmpi.tasks.metrics import evaluate


class Simulation:
    """One run of an experiment on the ranks of a cluster.

    Parameters
    ----------
    experiment : Experiment
        The parts, assembled on this rank.
    recorder : Recorder or None
        The run's folder, on rank 0 only; None on all ranks runs without records.
    """

    def __init__(self, experiment: Experiment, recorder: Recorder | None):
        self.experiment = experiment
        self.cluster = experiment.cluster
        self.config = experiment.config
        self.recorder = recorder
        self.model = experiment.model.initial.clone()
        hooks = experiment.trainer.hooks
        self.sums = RoundSum(
            self.cluster,
            self.model,
            self.config.aggregation.exact,
            experiment.around,
            vectors=hooks.sums if hooks else (),
            numbers=hooks.numbers if hooks else (),
        )
        self.interrupt = Interrupt()
        self.unsettled: dict[str, Any] | None = None
        self.settled = 0
        self.phases: dict[str, float] = {}

    def run(self) -> int:
        """Run all rounds; returns the exit code: 0 done, 75 stopped by a signal after saving."""
        first = self._resume()
        self.experiment.trainer.trial.recall(self.recorder.folder if self.recorder else None)
        if self.recorder is not None:
            self.display = open_display(self.config.rounds, first, self.config.logging.interval)
        stopped = False
        for t in range(first, self.config.rounds):
            started = time.perf_counter()
            self.phases = {}
            plan = self._plan(t)
            self._work(plan)
            totals = self._reduce()
            self.experiment.trainer.check(plan, totals.sums)
            self._apply(plan, totals)
            self._note(plan, totals, started)
            stopped = totals.stop and t + 1 < self.config.rounds
            if stopped or self._checkpoint_due(t + 1):
                self._checkpoint(t + 1)
            if stopped:
                break
        if not stopped:
            check_models(self.cluster, self.model, self.config.rounds - 1)
            self._settle()
        self._finish(stopped)
        return STOPPED_AFTER_SAVING if stopped else 0

    def _plan(self, t: int) -> Plan:
        """The server decides, everybody learns; strata are observed by all ranks first when the plan needs them."""
        with self._phase("plan"):
            self.experiment.observe(t, self.model)
            plan = self.experiment.plan(t) if self.cluster.is_server else None
            arrays = self.cluster.broadcast(plan.arrays() if plan else None)
            return plan or Plan.from_arrays(arrays)

    def _work(self, plan: Plan) -> None:
        """Workers add their clients' weighted updates to the round's sum; the server evaluates the last round."""
        self.sums.open(plan, self.model)
        self._settle()
        started = time.perf_counter()
        trainer = self.experiment.trainer
        report = trainer.train(plan, self.model, self.sums.updates, self.sums.further)
        self.phases["load"] = report.load_seconds
        self.phases["train"] = time.perf_counter() - started - report.load_seconds
        self.experiment.plan_ahead(plan.round + 1)
        busy = trainer.relayed.busy_seconds if trainer.relayed else time.perf_counter() - started
        self.sums.close(
            report,
            busy,
            self.interrupt.requested,
            trainer.observer,
            trainer.relayed,
            trainer.work,
            trainer.attendance,
            trainer.hooks.totals if trainer.hooks else None,
        )

    def _reduce(self) -> RoundTotals:
        with self._phase("reduce"):
            return self.sums.reduce()

    def _apply(self, plan: Plan, totals: RoundTotals) -> None:
        """Every rank takes the same server step (Reddi et al. 2020, Algorithm 2)."""
        with self._phase("apply"):
            update = self.experiment.aggregate(plan, totals, self.model)
            self.experiment.server_optimizer.step(self.model, update)

    def _note(self, plan: Plan, totals: RoundTotals, started: float) -> None:
        """Rank 0 keeps the round's record until its evaluation is there."""
        if self.cluster.is_server:
            record = self.experiment.record(plan, totals) | self.experiment.distance(self.model)
            record["seconds"] = time.perf_counter() - started
            record["phase_seconds"] = {**self.phases, **totals.phase_seconds()}
            self.unsettled = record
            self.experiment.learn(totals)

    def _settle(self) -> None:
        """Evaluate the model of the last finished round and write its record; the model has not changed since."""
        record, self.unsettled = self.unsettled, None
        if record is None or self.recorder is None:
            return
        t, evaluation = record["round"], self.config.evaluation
        if (t + 1) % evaluation.every == 0 or t + 1 == self.config.rounds:
            started = time.perf_counter()
            record.update(self._evaluate())
            record["phase_seconds"]["evaluate"] = time.perf_counter() - started
        self.recorder.write(record)
        self.settled += 1
        self.display.update(record)

    def _evaluate(self) -> dict[str, float]:
        flat, data = self.experiment.model, self.experiment.data
        flat.bind(self.model)
        facts: dict[str, float] = {}
        for part in self.experiment.evaluated.names:
            x, y = self.experiment.evaluated.samples(part)
            rows = self.config.evaluation.batch_size
            with flat.loss.kept_generators():
                found = evaluate(flat.module, x, y, data.description.classes, rows, flat.loss)
            facts |= found.facts(part)
        return facts

    def _checkpoint_due(self, next_round: int) -> bool:
        every = self.config.checkpoint.every
        return every > 0 and (next_round % every == 0 or next_round == self.config.rounds)

    def _checkpoint(self, next_round: int) -> None:
        """Save what the run needs to go on; all ranks must hold the same model."""
        check_models(self.cluster, self.model, next_round - 1, self.experiment.server_vectors)
        tensors, header = self.experiment.state()
        path = None if self.recorder is None else clients_file(self.recorder.checkpoints, next_round)
        with writing(self.recorder.folder) if self.recorder else nullcontext():
            header |= self.experiment.save_client_state(path)
        if self.recorder is None:
            return
        header.update(settled=self.settled, unsettled=self.unsettled)
        self.recorder.checkpoint(next_round, {"model": self.model, **tensors}, header)

    def _resume(self) -> int:
        """The first round to run; on a resumed run every rank receives the saved state from rank 0."""
        data = self.experiment.data_digest
        checkpoint = on_server(self.cluster, lambda: self.recorder.resume(data) if self.recorder else None)
        if checkpoint is not None:
            self.settled, self.unsettled = checkpoint.header["settled"], checkpoint.header["unsettled"]
        first, model = self.experiment.share_checkpoint(checkpoint)
        kept = None
        if checkpoint is not None and self.recorder is not None and checkpoint.header.get("clients"):
            kept = clients_file(self.recorder.checkpoints, first)
        self.experiment.load_client_state(kept, self.recorder.folder if self.recorder else None)
        if model is not None:
            self.model.copy_(model)
        return first

    def _finish(self, stopped: bool) -> None:
        if stopped:
            self.interrupt.ignore()
        else:
            self.interrupt.restore()
        self.sums.release()
        moved = self.cluster.share_bytes()
        if self.recorder is None:
            return
        self.display.close()
        if stopped:
            print(f"stopped after saving: continue with --resume --out {self.recorder.folder}", flush=True)
        else:
            self.experiment.model.bind(self.model)
            summary = self.recorder.finish(self.experiment.model.module, self.experiment.facts() | moved.facts())
            show_summary(summary, str(self.recorder.folder))
        self.recorder.close()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - started
