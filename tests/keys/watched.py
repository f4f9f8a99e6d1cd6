"""A run watched from within: what was decided, trained, recorded, written and shown, link by link."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from data_prep.augment import augment
from fedmpi import ClientFailure, UserError
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.records.recorder import open_recorder
from tests.data_prep.command import main as prepare

QUIET = (
    "logging.tensorboard=false cluster.threads=1 checkpoint.every=0 rounds=2 data.source=digits:clients=12,alpha=0.5 "
    "local.engine=sequential local.batch_size=40"
)
TIMED = ("seconds", "phase_seconds", "busy_seconds", "idle_seconds")
LINKS = (
    *("refusal", "threads", "strata", "cohort", "mediators", "rows", "factors", "state", "model", "record", "batches"),
    *("summary", "files", "log", "shown"),
)
"""Links of a run, causes before effects."""


@dataclass(repr=False)
class Seen:
    """One run."""

    settings: str
    folder: Path
    refusal: str = ""  # The error; "" where it ran
    threads: int = 0
    start: np.ndarray = field(default_factory=lambda: np.empty(0))
    plans: list[Plan] = field(default_factory=list)  # One a round
    strata: list[Any] = field(default_factory=list)  # One entry a round, of everything that a link holds
    cohort: list[Any] = field(default_factory=list)
    mediators: list[Any] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    factors: list[Any] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    model: list[Any] = field(default_factory=list)  # (d,): After every round; `start` before them
    record: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl without what is timed
    # Numbers of samples that went through the network in evaluation mode at once
    batches: list[int] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)  # Contents of the folder
    log: list[str] = field(default_factory=list)  # Lines of run.log without their times, and what was printed
    shown: list[str] = field(default_factory=list)
    sizes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    class_counts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def recorded(self, key: str) -> list[Any]:
        """A field of the record, round by round; None where there is none."""
        return [record.get(key) for record in self.record]

    def moved(self, t: int) -> np.ndarray:
        """Return how round t changed the model, float64 (d,)."""
        before = self.start if t == 0 else self.model[t - 1]
        return np.subtract(self.model[t], before, dtype=np.float64)


def first_difference(one: Seen, other: Seen) -> str:
    """The first of the `LINKS` in which two runs differ; "" where they are the same."""
    for link in LINKS:
        if not _same(getattr(one, link), getattr(other, link)):
            return link
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=True))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


class Watcher:
    """Run configurations, each of them once and in a separate folder.

    Settings may name {val}, {damaged}, {augmented}: prepared digits with a part held out, with a changed pixel, with
    stored copies; and {reference}: the final model of a run.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.see: Callable[[str], Seen] = cache(self._see)

    def _see(self, settings: str) -> Seen:
        words = [word.format_map(_Prepared(self)) for word in f"{QUIET} {settings}".split()]
        run = self.folder / f"run{len(list(self.folder.glob('run*')))}"
        run.mkdir()
        seen = Seen(settings, run)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                self._run(words, run, seen)
            except (UserError, ClientFailure) as error:
                seen.refusal = str(error)
        seen.shown = [line for line in printed.getvalue().splitlines() if line.startswith("round")]
        return seen

    def _run(self, words: list[str], run: Path, seen: Seen) -> None:
        config = load_config(None, words)
        experiment = Experiment.connect(config)
        recorder = open_recorder(experiment.cluster, run, config, False, experiment.model.module)
        simulation = Simulation(experiment, recorder, progress=True)
        seen.start = simulation.model.cpu().numpy().copy()
        seen.sizes = experiment.data.sizes
        if experiment.data.description.labeled:
            seen.class_counts = experiment.decisions.planner.cohorts.counts()
        seen.threads = torch.get_num_threads()
        trainer, strata = experiment.trainer, experiment.decisions.stratifier
        train, apply = trainer.train, simulation._apply

        def watched(plan: Plan, *others: Any) -> Any:
            seen.plans.append(plan)
            group = strata.strata
            seen.strata.append(None if group is None else (group.labels, group.spreads, group.norms))
            seen.cohort.append((plan.clients, plan.one_step))
            seen.mediators.append(plan.mediators)
            tasks = trainer.worker.tasks(plan, trainer.worker.members(plan))
            seen.rows.append([np.arange(seen.sizes[t.client]) if t.rows is None else t.rows for t in tasks])
            seen.factors.append(([(t.client, t.coefficient) for t in tasks], plan.normalize))
            return train(plan, *others)

        def applied(*round: Any) -> None:
            apply(*round)
            seen.model.append(simulation.model.cpu().numpy().copy())
            kept = None if trainer.state.hooks is None else trainer.state.hooks.state
            seen.state.append(None if kept is None else len(kept._places))

        def counted(module: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            if not module.training and not torch.is_grad_enabled():
                seen.batches.append(len(inputs[0]))

        trainer.train, simulation._apply = watched, applied  # type: ignore[method-assign]
        experiment.model.module.register_forward_hook(counted)
        threads = torch.get_num_threads()
        try:
            assert simulation.run() == "finished"
        finally:
            torch.set_num_threads(threads)
            if recorder is not None:
                recorder.close()
            experiment.close()
        self._read(run, seen)

    def _read(self, run: Path, seen: Seen) -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        seen.record = [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines]
        summary = json.loads((run / "summary.json").read_text())
        seen.summary = {key: value for key, value in summary.items() if key not in ("wall_seconds", "git_commit")}
        names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
        seen.files = [re.sub(r"(tfevents)\..*", r"\1", name) for name in names]
        seen.log = [line.split(" ", 2)[2] for line in (run / "run.log").read_text().splitlines()]

    @cache  # noqa: B019 - one watcher a module
    def prepared(self, name: str) -> Path:
        """A folder or file that settings name in braces."""
        if name in ("reference", "other"):
            rounds = {"reference": 2, "other": 1}[name]
            return self.see(f"clients.sampler=all model.hidden=[6] rounds={rounds}").folder / "model.safetensors"
        if name == "val":
            words = f"digits --partition dirichlet --alpha 1 --clients 8 --val 0.2 --out {self.folder / name}"
            assert prepare(words.split()) == 0
        elif name == "plain":
            assert (
                prepare(f"digits --partition dirichlet --alpha 1 --clients 8 --out {self.folder / name}".split()) == 0
            )
        elif name == "damaged":
            shutil.copytree(self.prepared("val"), self.folder / name)
            with h5py.File(next((self.folder / name).glob("**/train*.h5")), "r+") as file:
                file["x"][0] = 255 - file["x"][0]
        else:
            augment(self.prepared("plain"), self.folder / name, alpha=0.67)
        return self.folder / name


class _Prepared(dict[str, Path]):
    def __init__(self, watcher: Watcher):
        super().__init__()
        self.watcher = watcher

    def __missing__(self, name: str) -> Path:
        return self.watcher.prepared(name)
