"""Runs whose ranks die by signal 9 at chosen moments, one after the other on the ranks that are left.

    mpiexec --with-ft ulfm -n 8 python -m tests.mpi.deaths FOLDER '[["NAME", "SYSTEM", [[RANK, "PHASE", NUMBER]]]]'

Each is a run of one of `SYSTEMS`, in FOLDER/NAME. RANK, of those that were launched, dies when it enters the phase of
the round NUMBER; the phase "client" is the training of a client in that round, "wait" the NUMBER-th time in the run
that it waits for others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import fedmpi
from fedmpi.cluster import read_launch
from fedmpi.common.activity import Activity, activity
from tests.quick_end import end_quickly

Death = tuple[int, str, int]
COMMON: dict[str, Any] = {
    "data.shards": "digits:clients=12,alpha=0.5",
    "participation.count": 8,
    "rounds": 6,
    "local.batch_size": 40,
    "model.name": "tests.end_to_end.user_models:unhurried_mlp",
    "logging.tensorboard": False,
    "aggregation.exact": True,
}
STALE_STRATA = {
    "participation.clients": "stratified",
    "participation.features": "full-gradient",
    "participation.strata": 3,
    "participation.refresh": 2,
    "participation.refresh_who": "participants",
    "aggregation.weights": "stratified",
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strata": STALE_STRATA | {"aggregation.optimizer": "adam", "aggregation.lr": 0.01},
    "scaffold": {"local.algorithm": "scaffold", "checkpoint.every": 2},
    "feedback": {
        "transport.kind": "topk",
        "transport.fraction": 0.1,
        "transport.error_feedback": True,
        "checkpoint.every": 2,
    },
    "mediators": {
        "topology.kind": "mediators",
        "topology.clients_per_mediator": 3,
        "topology.mediator_epochs": 2,
        "aggregation.weights": "samples",
    },
    "combined": {"aggregation.rule": "median"},
    "window": {"cluster.reduction": "window", "server.trains": "always", "checkpoint.every": 1},
}


class Fate:
    """When this process is to die."""

    def __init__(self) -> None:
        launch = read_launch()
        self.rank = launch.rank if launch is not None else 0
        self.deaths: list[Death] = []
        self.waits = 0

    def come(self, phase: str, number: int) -> None:
        """End this process if that was chosen for it."""
        if (self.rank, phase, number) in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)


fate = Fate()


class Fated(Activity):
    """As `Activity`, for a process that may die."""

    __slots__ = ()

    def enter(self, phase: str, round: int | None = None) -> int:
        before = Activity.enter(self, phase, round)
        fate.come(phase, self.round)
        return before

    def work_on(self, client: int, beside: int = 0) -> None:
        Activity.work_on(self, client, beside)
        fate.come("client", self.round)

    def wait(self, waiting: bool) -> None:
        Activity.wait(self, waiting)
        fate.waits += waiting
        fate.come("wait", fate.waits)


def settings(system: str) -> dict[str, Any]:
    """A whole configuration."""
    return COMMON | SYSTEMS[system]


def main() -> None:
    """Run them all."""
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    activity.__class__ = Fated
    for name, system, deaths in runs:
        fate.deaths, fate.waits = [(rank, phase, number) for rank, phase, number in deaths], 0
        out = None if name.startswith("memory") else folder / name
        run = fedmpi.run({**settings(system), "cluster.on_rank_failure": "shrink"}, out=out, progress=True)
        if out is None and run.records:
            (folder / f"{name}.json").write_text(json.dumps([run.summary, run.records]))


if __name__ == "__main__":
    end_quickly()
    main()
