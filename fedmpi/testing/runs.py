"""Contracts of components in a small run: it is repeated, and continued from its checkpoint on two and three ranks.

The continued run is a job of fresh processes, so that nothing outside a component's declared state survives.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

from fedmpi.api import run
from fedmpi.common.decorators import HELD_OUT, TRANSFERS
from fedmpi.common.task_kinds import CLASSIFICATION, kinds_of
from fedmpi.common.types import AnyArray
from fedmpi.data.arrays import ClientArrays
from fedmpi.local.algorithms import misnamed
from fedmpi.process.children import mpiexec
from fedmpi.testing.check import TOLERANCE, CheckSkipped, Contract, OtherUse, Results, Subject, demand, demand_equal

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
    "evaluation.every": 2,
    "logging.tensorboard": False,
}
"""Configuration of the run, unless a component's own settings override it."""
NEEDED: dict[str, dict[str, Any]] = {
    "scheduling": {"topology": "mediators", "topology.clients_per_mediator": 2},
    "staleness": {"topology": "async", "topology.in_flight": 5, "topology.buffer": 2, "devices.speed": "lognormal"},
    "client sampler": {
        "clients.count": 3,
        "clients.availability": "bernoulli",
        "clients.availability.probability": 0.8,
    },
    "data source": {"clients.sampler": "all"},
    "attack": {"clients.attack_fraction": 0.4},
    "feature": {
        "clients.sampler": "stratified",
        "clients.sampler.strata": 3,
        "clients.sampler.within_stratum": "uniform",
    },
    "device rate": {"clients.over_selection": 1.5},
    # maxima and ReLU jump at equal values
    **dict.fromkeys(("metric", "model", "loss"), {"server.exact": True}),
}
"""Configuration for some kinds of components, unless a component's own settings override it."""
COMPARED = ("participants", "samples", "steps", "train_loss", "virtual_seconds")
"""Compared keys of a round's record; in addition all numbers of the test samples."""
RANKS = (2, 3)
"""Numbers of ranks of the runs that continue."""
SECONDS = 900
"""Seconds after which a job counts as stalled."""
LAST_LINES = 6


def synthetic(
    *,
    targets: Literal["classification", "multilabel", "regression"] = "classification",
    shape: tuple[int, ...] = (20,),
    vocabulary: int | None = None,
    held_out: bool = False,
) -> ClientArrays:
    """Make samples of nine clients, for components that the embedded digits do not suit.

    Parameters
    ----------
    targets : str
        Kind of the targets.
    shape : tuple of int
        Shape of a sample.
    vocabulary : int
        Number of token ids, for texts.
    held_out : bool
        Whether clients have held-out samples.
    """
    draws = np.random.Generator(np.random.Philox(4))
    x: AnyArray = draws.standard_normal((90, *shape)).astype(np.float32)
    if vocabulary is not None:
        x = draws.integers(0, vocabulary, x.shape)
    y: AnyArray = np.arange(90) % 10
    if targets != "classification":
        y = (draws.random((90, 4)) < 0.5) if targets == "multilabel" else draws.standard_normal(90)
    modality: Any = None if vocabulary is None else "text"
    owner, some = np.arange(90) % 9, slice(40)
    val = (x[some], y[some], owner[some]) if held_out else None
    return ClientArrays(
        x, y, owner, test=(x[some], y[some]), val=val, targets=targets, task=modality, vocabulary=vocabulary
    )


def in_a_run(subject: Subject, **changed: Any) -> Results:
    """Return the model (d,) and the numbers of every round of a small run with the component."""
    choice = subject.part.object if subject.part.foreign else subject.part.name
    found = run({**_settings(subject, choice), "rounds": 2, **changed})
    demand(any(record["participants"] for record in found.records), "no round with available clients has participants")
    return _results({name: value.numpy() for name, value in found.model.state_dict().items()}, found.records)


def _results(model: Mapping[str, AnyArray], records: Iterable[Mapping[str, Any]]) -> Results:
    values = np.concatenate([model[name].ravel().astype(np.float64) for name in sorted(model)])
    numbers = {
        f"round {record['round']}: {key}": np.asarray(np.nan if value is None else value)
        for record in records
        for key, value in record.items()
        if key in COMPARED or key.startswith("test_")
    }
    return {**numbers, "the model": values}


def _settings(subject: Subject, choice: Any) -> dict[str, Any]:
    """Return the configuration of a run with the component."""
    part = subject.part
    settings = {**SMALL, **NEEDED.get(part.kind, {})}
    task = [*kinds_of(part), subject.settings.get("task.kind", CLASSIFICATION.name)][0]
    if task != CLASSIFICATION.name:
        settings |= {"task.kind": task, "data.source": f"{__name__}:synthetic", "data.source.targets": task}
    asked = {*part.marks.get("needs", ()), *part.marks.get("measures", ())}
    if asked & {"seconds", *TRANSFERS}:
        settings["devices"] = True
    if asked & {*HELD_OUT}:
        settings |= {"data.source": f"{__name__}:synthetic", "data.source.held_out": True}
    settings |= {**subject.settings, part.key: choice}
    if part.kind == "model" and part.name != "mlp" and "model.hidden" not in subject.settings:
        settings.pop("model.hidden")  # the setting of the run's own perceptron
    if settings.get("clients.sampler") == "all" or "clients.fraction" in settings or part.kind == "staleness":
        settings.pop("clients.count")
    if settings.get("attack") == "none":
        settings.pop("clients.attack_fraction")
    if "local.steps" in settings:
        settings.pop("local.epochs")
    return settings


def continued(subject: Subject) -> str:
    """Compare a run on one rank, round by round, with the same one continued from a checkpoint on 2 and 3 ranks."""
    part = subject.part
    if part.foreign and (part.source is None or "<" in part.name):
        raise CheckSkipped("runs in separate processes need the component at the top level of a file")
    if (launcher := mpiexec()) is None:
        raise CheckSkipped("no mpiexec: pip install 'fedmpi[mpi]' brings one")
    name = part.name.replace("__main__:", f"{part.source.stem}:") if part.source else part.name
    with tempfile.TemporaryDirectory(prefix="fedmpi-check-") as folder:
        out = Path(folder) / "run"
        run(_settings(subject, name), out=out)
        whole = _outcome(out)
        newest = sorted((out / "checkpoints").glob("round-*.safetensors"))[-1]
        for path in (newest, out / "summary.json", out / "model.safetensors"):  # as if it had been killed before
            path.unlink()
        apart = max(_continued(out, ranks, launcher, whole) for ranks in RANKS)
    return f"{len(whole)} results, equal within {apart:.1g}"


def _continued(run_folder: Path, ranks: int, launcher: str, whole: Results) -> float:
    """Continue a copy of the run on some ranks; return the largest difference of the results."""
    out = run_folder.with_name(f"on-{ranks}-ranks")
    shutil.copytree(run_folder, out)
    job = [sys.executable, "-m", "fedmpi", "train", str(out / "config.toml"), "--resume", "--out", str(out)]
    failure = _start([launcher, "-n", str(ranks), *job])
    demand(failure is None, f"the run that continues on {ranks} ranks failed: {failure}")
    cause = "its results depend on the number of ranks, or on state that no checkpoint contains"
    return demand_equal(whole, _outcome(out), cause, TOLERANCE)


def _outcome(out: Path) -> Results:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return _results(load_file(out / "model.safetensors"), records)


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


def names_read(subject: Subject) -> str:
    """Require that something reads the attributes of a local algorithm whose names are close to those of a hook."""
    for name, meant in misnamed(subject.made()).items():
        demand(False, f"has {name!r}, which nothing reads. Did you mean {meant!r}? Else begin the name with _")
    return "all"


IN_A_RUN = Contract(in_a_run)
EVALUATED = Contract(
    in_a_run,
    OtherUse(
        "evaluation does not depend on the batches",
        {"evaluation.batch_size": 7},
        "compute the results of a sample from that sample only, and sums that add up over batches",
    ),
)
CONTRACTS = {
    "local algorithm": Contract(in_a_run, more=(("names that are read", names_read),)),
    **dict.fromkeys(("local optimizer", "schedule", "scheduling", "staleness"), IN_A_RUN),
    **dict.fromkeys(("server optimizer", "compressor", "attack", "data source", "loss"), IN_A_RUN),
    **dict.fromkeys(("metric", "model"), EVALUATED),
}
