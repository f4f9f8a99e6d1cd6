"""Check that starts runs: a small run that continues from its checkpoint on two or three ranks gives the same result.

The continued run is a job of fresh processes, so that nothing outside a component's declared state survives.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fedmpi.api import run
from fedmpi.common.registry import Component
from fedmpi.common.task_kinds import CLASSIFICATION, kinds_of
from fedmpi.common.types import Floats
from fedmpi.process.children import mpiexec
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
RANKS = (2, 3)
"""Numbers of ranks of the runs that continue."""
SECONDS = 900
"""Seconds after which a job counts as stalled."""
MODEL, NUMBERS = 1e-5, 1e-3
"""Largest relative difference of two models, and of two numbers in the records: float32 sums in another order."""
COMPARED = ("participants", "samples", "steps", "train_loss")
"""Compared keys of a round's record; for a metric also the evaluated numbers."""
LAST_LINES = 6


def started_check(subject: Subject) -> Check:
    """Return the check that starts runs, for a component of any kind."""
    return subject.check("same result if continued on 2 and 3 ranks", _same_if_continued)


def _same_if_continued(subject: Subject) -> str:
    """Compare a run on one rank, round by round, with the same one continued from a checkpoint on 2 and 3 ranks."""
    if (reason := not_startable(subject.part)) is not None:
        raise CheckSkipped(reason)
    if (launcher := mpiexec()) is None:
        raise CheckSkipped("no mpiexec: pip install 'fedmpi[mpi]' brings one")
    settings = _settings(subject)
    with tempfile.TemporaryDirectory(prefix="fedmpi-check-") as folder:
        out = Path(folder) / "run"
        run(settings, out=out)
        whole, records = _outcome(subject, out)
        newest = sorted((out / "checkpoints").glob("round-*.safetensors"))[-1]
        for path in (newest, out / "summary.json", out / "model.safetensors"):  # as if it had been killed before
            path.unlink()
        apart = max(_continued(subject, out, ranks, launcher, whole, records) for ranks in RANKS)
    return f"{len(records)} rounds, models within {apart:.1g}"


def _continued(
    subject: Subject, run_folder: Path, ranks: int, launcher: str, whole: Floats, records: list[dict[str, Any]]
) -> float:
    """Continue a copy of the run on some ranks; return the relative difference of the models."""
    out = run_folder.with_name(f"on-{ranks}-ranks")
    shutil.copytree(run_folder, out)
    job = [sys.executable, "-m", "fedmpi", "train", str(out / "config.toml"), "--resume", "--out", str(out)]
    failure = _start([launcher, "-n", str(ranks), *job])
    demand(failure is None, f"the run that continues on {ranks} ranks failed: {failure}")
    continued, others = _outcome(subject, out)
    cause = "Its results depend on the number of ranks, or on state that no checkpoint contains"
    demand(len(records) == len(others), f"{len(others)} rounds instead of {len(records)}. {cause}")
    for t, (left, right) in enumerate(zip(records, others, strict=True)):
        for key, value in left.items():
            found = right.get(key, math.nan)
            near = math.isclose(found, value, rel_tol=NUMBERS) if isinstance(value, float) else found == value
            demand(near, f"round {t}: {key} = {found} instead of {value}. {cause}")
    apart = float(np.linalg.norm(whole - continued) / np.linalg.norm(whole))
    demand(apart <= MODEL, f"the models differ by {apart:.2g} of their length (rounding is below {MODEL:g}). {cause}")
    return apart


def _outcome(subject: Subject, out: Path) -> tuple[Floats, list[dict[str, Any]]]:
    """Return the model (d,) and the compared keys of every round of a run."""
    values = load_file(out / "model.safetensors")
    model = np.concatenate([values[name].ravel().astype(np.float64) for name in sorted(values)])
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluated = "test_" if subject.part.kind == "metric" else COMPARED
    return model, [{k: v for k, v in one.items() if k in COMPARED or k.startswith(evaluated)} for one in records]


def not_startable(part: Component) -> str | None:
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


def _start(command: list[str]) -> str | None:
    """Run a command; return its last lines if it fails, or None."""
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
        return f"it did not end within {SECONDS} s"
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return None if done.returncode == 0 else " / ".join(lines[-LAST_LINES:]) or f"exit code {done.returncode}"
