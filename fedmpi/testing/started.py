"""Checks that start runs: the same small run on 1, 2 and 3 ranks, and one that was stopped and resumed.

Every job is a fresh process, or several under mpiexec, so that nothing outside a component's declared state survives.
Jobs of several components share a start, which takes longer than the runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fedmpi.api import run
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component
from fedmpi.common.task_kinds import CLASSIFICATION
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
RANKS = (1, 2, 3)
SECONDS = 900
"""Seconds after which a job counts as hanging."""
MODEL, NUMBERS = 1e-5, 1e-3
"""Largest relative difference of two models, and of two losses in the records: float32 sums in another order."""
COMPARED = ("participants", "samples", "steps", "train_loss")
"""Compared parts of a round's record; for a metric also the evaluated numbers if sums are exact."""
LAST_LINES = 6
JOB = "from fedmpi.testing import started; started.run_guarded(started.run_jobs)"


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run."""

    model: Floats  # (d,)
    records: list[dict[str, Any]]  # `COMPARED` parts of every round


class Starts:
    """Started runs of some components, each executed once, at its first use."""

    def __init__(self, subjects: Sequence[Subject]):
        self.subjects = [subject for subject in subjects if startable(subject.part) is None]
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tried: set[tuple[int, bool]] = set()

    def outcome(self, subject: Subject, ranks: int, resumed: bool = False) -> RunOutcome:
        """Return the outcome of a component's run."""
        if (reason := startable(subject.part)) is not None:
            raise CheckSkipped(reason)
        if resumed:
            self.outcome(subject, ranks)
        if (ranks, resumed) not in self._tried:
            self._tried.add((ranks, resumed))
            self._start(self.subjects, ranks, resumed)
        found = self._run_folder(subject, ranks, resumed)
        evaluated = subject.part.kind == "metric"
        failure: str | None = None
        if not (found / "summary.json").exists() and not _failed(found).exists():
            failure = self._start([subject], ranks, resumed)  # another component of its job may have ended all
        if _failed(found).exists():
            failure = _failed(found).read_text()
        demand(failure is None, f"{_job_name(ranks, resumed)}: {failure}")
        return _outcome_of(found, evaluated)

    def _start(self, subjects: Sequence[Subject], ranks: int, resumed: bool) -> str | None:
        """Run a job; return None, or the last lines that it printed."""
        runs = []
        for subject in subjects:
            out = self._run_folder(subject, ranks, resumed)
            shutil.rmtree(out, ignore_errors=True)
            _failed(out).unlink(missing_ok=True)
            if resumed:
                straight = self._run_folder(subject, ranks, False)
                if not (straight / "summary.json").exists():
                    continue
                _stopped_halfway(straight, out)
            runs.append({**_described(subject), "out": str(out), "resume": resumed})
        listed = self._place / f"{ranks}-{'resumed' if resumed else 'straight'}.json"
        listed.write_text(json.dumps(runs))
        return run_module(ranks, ["-c", JOB, str(listed)])

    @property
    def _place(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fedmpi-check-")
        return Path(self._folder.name)

    def _run_folder(self, subject: Subject, ranks: int, resumed: bool) -> Path:
        number = next((i for i, other in enumerate(self.subjects) if other is subject), len(self.subjects))
        return self._place / f"{ranks}-{'resumed' if resumed else 'straight'}-{number}"


def started_checks(subject: Subject, starts: Starts) -> Iterator[Check]:
    """Yield the checks that start runs, for a component of any kind."""
    for ranks in RANKS[1:]:
        yield subject.check(f"same result at {RANKS[0]} and {ranks} ranks", _same_at(starts, ranks))
    yield subject.check("same result after a resume", lambda s: _same(starts.outcome(s, 1), starts.outcome(s, 1, True)))


def _same_at(starts: Starts, ranks: int) -> Callable[[Subject], str]:
    return lambda subject: _same(starts.outcome(subject, 1), starts.outcome(subject, ranks))


def _same(one: RunOutcome, other: RunOutcome) -> str:
    """Compare two runs round by round, and their models."""
    demand(len(one.records) == len(other.records), f"{len(other.records)} rounds instead of {len(one.records)}")
    for t, (left, right) in enumerate(zip(one.records, other.records, strict=True)):
        for key, value in left.items():
            found = right.get(key)
            near = found == value
            if isinstance(value, float) and isinstance(found, float):
                near = abs(found - value) <= NUMBERS * max(abs(value), abs(found))
            demand(near, f"round {t}: {key} = {found} instead of {value}")
    apart = float(np.linalg.norm(one.model - other.model) / np.linalg.norm(one.model))
    demand(apart <= MODEL, f"the models differ by {apart:.2g} of their length (rounding is below {MODEL:g})")
    return f"{len(one.records)} rounds, models within {apart:.1g}"


def _outcome_of(folder: Path, evaluated: bool) -> RunOutcome:
    held = load_file(folder / "model.safetensors")
    model = np.concatenate([held[name].ravel().astype(np.float64) for name in sorted(held)])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kept = [key for key in records[-1] if key in COMPARED or (evaluated and key.startswith("test_"))]
    return RunOutcome(model, [{key: record[key] for key in kept if key in record} for record in records])


def _failed(out: Path) -> Path:
    """Return the file in which a job reports why one of its runs failed."""
    return out.with_name(f"{out.name}.failed")


def _job_name(ranks: int, resumed: bool) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}{', resumed' if resumed else ''}"


def _stopped_halfway(straight: Path, out: Path) -> None:
    """Copy a finished run's folder as if it had been killed after its first checkpoint."""
    shutil.copytree(straight, out)
    newest = sorted((out / "checkpoints").glob("round-*.safetensors"))[-1]
    for path in (newest, out / "summary.json", out / "model.safetensors"):
        path.unlink()


def startable(part: Component) -> str | None:
    """Return why no run could be started with the component, or None."""
    if not part.foreign:
        tasks = part.marks.get("tasks", (CLASSIFICATION.name,))
        return None if CLASSIFICATION.name in tasks else f"the runs tried are classifications, and it is for {tasks[0]}"
    if part.source is None or "<" in part.name:
        return "runs in processes of their own need the part at the top level of a file"
    return None


def _described(subject: Subject) -> dict[str, Any]:
    """Return a run as the job reads it."""
    part = subject.part
    settings = {**SMALL, **NEEDED.get(part.kind, {}), **subject.settings}
    if part.kind == "model" and part.name != "mlp" and "model.hidden" not in subject.settings:
        settings.pop("model.hidden")  # the setting of the run's own perceptron
    takes_all = "all" in (settings.get("clients.sampler"), part.kind == "client sampler" and part.name)
    if takes_all or "clients.fraction" in settings:
        settings.pop("clients.count")
    if "local.steps" in settings:
        settings.pop("local.epochs")
    chosen: Any = part.name
    if part.foreign:
        module, _, name = part.name.partition(":")
        chosen = {"module": module, "name": name, "file": str(part.source)}
    return {"settings": settings, "key": part.key, "chosen": chosen}


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
        settings = {**job["settings"], job["key"]: _loaded(job["chosen"])}
        try:
            run(settings, out=job["out"], resume=job["resume"])
        except Exception as error:
            Path(f"{job['out']}.failed").write_text(f"{type(error).__name__}: {error}")
    return 0


def _loaded(chosen: Any) -> Any:
    """Return the component of a run that was read: a name, or an object of a file."""
    if isinstance(chosen, str):
        return chosen
    module, path = chosen["module"], chosen["file"]
    try:
        found = importlib.import_module(module if module != "__main__" else "no module of that name")
    except ImportError:
        found = None
    if found is None or not found.__file__ or Path(found.__file__).resolve() != Path(path):
        module = "part_under_test" if module == "__main__" else module
        spec = importlib.util.spec_from_file_location(module, path)
        if spec is None or spec.loader is None:
            raise UserError(f"{path} cannot be imported")
        found = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for name in chosen["name"].split("."):
        found = getattr(found, name)
    return found
