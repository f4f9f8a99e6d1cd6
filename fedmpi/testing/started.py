"""Checks that start runs: the same small run on 1, 2 and 3 ranks, and one that was stopped and resumed.

Every job is a fresh process, or several under mpiexec, so that nothing outside a component's declared state survives.
Jobs of several components share a start, which takes longer than the runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fedmpi.api import run
from fedmpi.common.registry import Component
from fedmpi.common.task_kinds import CLASSIFICATION, kinds_of
from fedmpi.common.types import Floats
from fedmpi.process.children import mpiexec
from fedmpi.process.exit_codes import run_guarded as run_guarded
from fedmpi.testing.check import Check, CheckSkipped, Subject, demand

SMALL = {
    "rounds": 4,
    "data.source": "digits:clients=9,alpha=0.5",
    "clients.count": 5,
    "model.hidden": [8],
    "local.epochs": 1,
    "local.engine": "sequential",
    "cluster.threads": 1,
    "checkpoint.every": 2,
    "checkpoint.keep": 2,
    "evaluation.every": 4,
    "logging.tensorboard": False,
}
"""Configuration of the run, unless a component's own settings override it."""
NEEDED: dict[str, dict[str, Any]] = {
    "scheduling": {"topology": "mediators", "topology.clients_per_mediator": 2},
    "metric": {"server.exact": True, "evaluation.every": 1},
    **dict.fromkeys(("model", "loss"), {"server.exact": True}),  # maxima and ReLU jump at equal values
}
"""Configuration for some kinds of components, unless a component's own settings override it."""
SECONDS = 900
"""Seconds after which a job counts as stalled."""
MODEL, NUMBERS = 1e-5, 1e-3
"""Largest relative difference of two models, and of two numbers in the records: float32 sums in another order."""
COMPARED = ("participants", "samples", "steps", "train_loss")
"""Compared keys of a round's record; for a metric also the evaluated numbers if sums are exact."""
LAST_LINES = 6
JOB = "from fedmpi.testing import started; started.run_guarded(started.run_jobs)"
Outcome = tuple[Floats, list[dict[str, Any]]]
"""Model (d,) and the compared keys of every round of a run."""


class Starts:
    """Started runs of some components, each executed once, at its first use."""

    def __init__(self, subjects: Sequence[Subject]):
        self.subjects = [subject for subject in subjects if startable(subject.part) is None]
        self._folder = tempfile.TemporaryDirectory(prefix="fedmpi-check-")
        self._tried: set[str] = set()

    def outcome(self, subject: Subject, ranks: int, resumed: bool = False) -> Outcome:
        """Return the outcome of a component's run."""
        if (reason := startable(subject.part)) is not None:
            raise CheckSkipped(reason)
        if resumed:
            self.outcome(subject, ranks)  # its checkpoints are continued
        job = f"{ranks} rank{'s' * (ranks > 1)}{', resumed' * resumed}"
        if job not in self._tried:
            self._tried.add(job)
            self._start(self.subjects, job, ranks, resumed)
        out, failure = self._out(subject, job), None
        if not out.joinpath("summary.json").exists() and not out.with_suffix(".failed").exists():
            failure = self._start([subject], job, ranks, resumed)  # another component may have ended the job
        if out.with_suffix(".failed").exists():
            failure = out.with_suffix(".failed").read_text()
        demand(failure is None, f"{job}: {failure}")
        held = load_file(out / "model.safetensors")
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        evaluated = "test_" if subject.part.kind == "metric" else COMPARED
        kept = [key for key in records[-1] if key in COMPARED or key.startswith(evaluated)]
        model = np.concatenate([held[name].ravel().astype(np.float64) for name in sorted(held)])
        return model, [{key: record[key] for key in kept if key in record} for record in records]

    def _start(self, subjects: Sequence[Subject], job: str, ranks: int, resumed: bool) -> str | None:
        """Run a job; return None, or the last lines that it printed."""
        runs = []
        for subject in subjects:
            out = self._out(subject, job)
            shutil.rmtree(out, ignore_errors=True)
            if resumed:  # copy the finished run as if it had been killed after its first checkpoint
                straight = self._out(subject, job.removesuffix(", resumed"))
                if not (straight / "summary.json").exists():
                    continue
                shutil.copytree(straight, out)
                newest = sorted((out / "checkpoints").glob("round-*.safetensors"))[-1]
                for path in (newest, out / "summary.json", out / "model.safetensors"):
                    path.unlink()
            runs.append({"settings": _settings(subject), "out": str(out), "resume": resumed})
        listed = Path(self._folder.name) / f"{job}.json"
        listed.write_text(json.dumps(runs))
        return run_module(ranks, ["-c", JOB, str(listed)])

    def _out(self, subject: Subject, job: str) -> Path:
        number = next((i for i, other in enumerate(self.subjects) if other is subject), len(self.subjects))
        return Path(self._folder.name) / f"{job} {number}"


def started_checks(subject: Subject, starts: Starts) -> Iterator[Check]:
    """Yield the checks that start runs, for a component of any kind."""
    for ranks in (2, 3):
        same = partial(_same, starts, ranks, False)
        yield subject.check(f"same result at 1 and {ranks} ranks", same)
    yield subject.check("same result after a resume", partial(_same, starts, 1, True))


def _same(starts: Starts, ranks: int, resumed: bool, subject: Subject) -> str:
    """Compare a run round by round, and its model, with those of the straight run on one rank."""
    (one, records), (other, others) = starts.outcome(subject, 1), starts.outcome(subject, ranks, resumed)
    demand(len(records) == len(others), f"{len(others)} rounds instead of {len(records)}")
    for t, (left, right) in enumerate(zip(records, others, strict=True)):
        for key, value in left.items():
            found = right.get(key)
            near = found == value
            if isinstance(value, float) and isinstance(found, float):
                near = abs(found - value) <= NUMBERS * max(abs(value), abs(found))
            demand(near, f"round {t}: {key} = {found} instead of {value}")
    apart = float(np.linalg.norm(one - other) / np.linalg.norm(one))
    demand(apart <= MODEL, f"the models differ by {apart:.2g} of their length (rounding is below {MODEL:g})")
    return f"{len(records)} rounds, models within {apart:.1g}"


def startable(part: Component) -> str | None:
    """Return why no run could be started with the component, or None."""
    if not part.foreign:
        tasks = kinds_of(part) or (CLASSIFICATION.name,)
        return None if CLASSIFICATION.name in tasks else f"the runs tried are classifications, and it is for {tasks[0]}"
    if part.source is None or "<" in part.name:
        return "runs in separate processes need the component at the top level of a file"
    return None


def _settings(subject: Subject) -> dict[str, Any]:
    """Return the configuration of a run with the component, by its name."""
    part = subject.part
    settings = {**SMALL, **NEEDED.get(part.kind, {}), **subject.settings}
    if part.kind == "model" and part.name != "mlp" and "model.hidden" not in subject.settings:
        settings.pop("model.hidden")  # the setting of the run's own perceptron
    settings[part.key] = part.name.replace("__main__:", f"{part.source.stem}:") if part.source else part.name
    if settings.get("clients.sampler") == "all" or "clients.fraction" in settings:
        settings.pop("clients.count")
    if "local.steps" in settings:
        settings.pop("local.epochs")
    return settings


def run_module(ranks: int, words: Sequence[str]) -> str | None:
    """Run `python WORDS`, under mpiexec if there are several ranks; return the problem, or None."""
    command = [sys.executable, *words]
    if ranks > 1:
        if (launcher := mpiexec()) is None:
            raise CheckSkipped("no mpiexec: pip install 'fedmpi[mpi]' brings one")
        command = [launcher, "-n", str(ranks), *command]
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_COMM_"))}
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*own, os.getcwd()]),
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the run did not end within {SECONDS} s"
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return None if done.returncode == 0 else " / ".join(lines[-LAST_LINES:]) or f"exit code {done.returncode}"


def run_jobs() -> int:
    """Execute the runs that a file lists on every rank; a failure that all ranks share ends its run alone."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            run(job["settings"], out=job["out"], resume=job["resume"])
        except Exception as error:
            Path(job["out"]).with_suffix(".failed").write_text(f"{type(error).__name__}: {error}")
    return 0
