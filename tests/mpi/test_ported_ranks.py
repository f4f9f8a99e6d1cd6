"""Steps of PyTorch and client-level privacy under mpiexec: bit-identical on 1, 2 and 3 ranks.

`mpiexec -n 3 python -m tests.mpi.test_ported_ranks FILE` writes what rank 0 found to FILE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from tests.mpi.launch import run_mpi
from tests.quick_end import end_quickly

COMMON = {"rounds": 4, "data.source": "digits:clients=12,alpha=0.5", "server.exact": True, "cluster.threads": 1}
STEPS = {
    "model": "tests.test_training_own_models:Cumulative",
    "clients.count": 7,
    "local.batch_size": 30,
    "local.drop_last": True,
    "local.optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "local.clip_norm": 1.0,
    "local.schedule": "cosine",
    "local.schedule_unit": "step",
    "local.warmup": 5,
    "task.loss": {"name": "cross-entropy", "class_weights": "balanced"},
}
NOISED = {"model.hidden": [6], "server.weights": "uniform", "privacy.clip_norm": 0.5, "privacy.noise_multiplier": 0.5}
RUNS: dict[str, dict[str, Any]] = {
    "steps": STEPS,
    "adaptive": NOISED | {"clients.count": 7, "privacy.adaptive_clip": {"count_noise": 1.0}},
    "trees": NOISED | {"clients.sampler": "shuffled", "clients.count": 4, "privacy.noise": "tree"},
}


def main() -> None:
    from mpi4py import MPI

    found = {}
    for name, settings in RUNS.items():
        run = fedmpi.run("fedavg", COMMON | settings)
        model = {key: value.flatten().tolist() for key, value in run.model.state_dict().items()}
        records = [{key: value for key, value in one.items() if "seconds" not in key} for one in run.records]
        found[name] = [model, records]
    if MPI.COMM_WORLD.Get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


@pytest.mark.slow
def test_any_number_of_ranks_gives_the_same_model_and_records(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    found = []
    for ranks in (1, 2, 3):
        job = run_mpi(ranks, ["-m", "tests.mpi.test_ported_ranks", tmp_path / f"{ranks}.json"])
        assert job.returncode == 0, job.stderr
        found.append(json.loads((tmp_path / f"{ranks}.json").read_text()))
    assert found[0] == found[1] == found[2]
    model, records = found[0]["steps"]
    assert model["2.num_batches_tracked"][0] > 4
    norms = [record["clip_norm"] for record in found[0]["adaptive"][1]]
    assert norms[0] == 0.5 and len({*norms}) == 4
    assert found[0]["trees"][1][-1]["update_epsilon"] > found[0]["trees"][1][0]["update_epsilon"] > 0


if __name__ == "__main__":
    end_quickly()
    main()
