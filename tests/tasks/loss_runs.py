"""A program: runs of each engine with the built-in cross-entropy, and with the same written anew.

[mpiexec -n N] python -m tests.tasks.loss_runs OUT.npz
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

import fedmpi
from tests.quick_end import end_quickly

SMALL = {
    "rounds": 3,
    "data.shards": "digits:clients=9,alpha=0.5",
    "model.hidden": [12],
    "model.activation": "tanh",
    "participation.count": 6,
    "cluster.threads": 1,
}
RUNS: dict[str, dict[str, Any]] = {
    "sequential": {"local.engine": "sequential", "logging.diagnostics": True},
    "batched": {"local.engine": "batched"},
    "merged": {"local.engine": "merged", "local.steps": 1, "local.batch_size": "all"},
    "sampled": {"preset": "fedsampling", "samples.wanted": 300, "samples.threshold": 80, "local.lr": 0.1},
    "strata": {"preset": "fedsts"},
    "mediators": {"topology.kind": "mediators", "participation.clients": "all"},
}
OWN = "tests.tasks.own_losses:cross_entropy"


def outcomes(names: Iterable[str] = RUNS) -> dict[str, np.ndarray]:
    """By run and loss: the final model, then the rounds' training and test losses."""
    found = {}
    for name in names:
        settings = RUNS[name]
        for loss in ("cross-entropy", OWN):
            own = {**SMALL, **settings, "task.loss": loss}
            if own.get("participation.clients") == "all" or name == "sampled":
                own.pop("participation.count")
            run = fedmpi.run(own)
            values = [tensor.numpy().ravel() for tensor in run.model.state_dict().values()]
            losses = [record[key] for record in run.records for key in ("train_loss", "test_loss")]
            found[f"{name}/{loss}"] = np.concatenate([*values, losses]).astype(np.float64)
    return found


def main() -> int:
    found = outcomes()
    if fedmpi.run({**SMALL, "rounds": 1}).records:
        np.savez(sys.argv[1], **{name.replace("/", "|"): values for name, values in found.items()})
    return 0


if __name__ == "__main__":
    end_quickly()
    main()
