"""A program: a run of each kind of task with exact sums.

[mpiexec -n N] python -m tests.tasks.kind_runs OUT.npz
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import fedmpi
from tests.quick_end import end_quickly
from tests.tasks.worlds import BASE, WORLDS

EXACT = {"server.exact": True}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("fedavg", {**BASE, **world, **EXACT}) for name, world in WORLDS.items()},
    "strata": ("fedstas", {"rounds": 2, **WORLDS["tokens"], **EXACT, "clients.count": 4}),
    "lora": (
        "fedavg",
        {
            **BASE,
            **WORLDS["tokens"],
            **EXACT,
            "model.lora": {"rank": 2, "alpha": 2.0},
            "local.lr": 0.1,
        },
    ),
}


def outcomes() -> dict[str, np.ndarray]:
    """Return for each run the final model, then the records of every round."""
    found = {}
    for name, (preset, settings) in RUNS.items():
        run = fedmpi.run(preset, {**settings, "cluster.threads": 1})
        values = [tensor.numpy().ravel() for tensor in run.model.state_dict().values()]
        scores = [
            record[key] for record in run.records for key in sorted(record) if key.startswith(("test_", "train_"))
        ]
        found[name] = np.concatenate([*values, scores]).astype(np.float64)
    return found


def main() -> int:
    found = outcomes()
    if fedmpi.run({"rounds": 1, "clients.sampler": "all", "cluster.threads": 1}).records:  # rank 0
        np.savez(sys.argv[1], **found)
    return 0


if __name__ == "__main__":
    end_quickly()
    main()
