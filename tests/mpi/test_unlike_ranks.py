"""A job in which one rank differs from the others: all ranks decide alike, or the run ends with one sentence.

`mpiexec -n 3 python -m tests.mpi.test_unlike_ranks OUT.json` runs every scenario, and in the end `another model` again,
its error not caught.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedmpi
from data_prep.__main__ import run as prepare
from fedmpi import UserError, server_optimizer
from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment, facts_of_run
from fedmpi.core.loop import Simulation
from fedmpi.data.opening import open_store
from fedmpi.local.sequential import SequentialEngine
from fedmpi.mpi import Cluster
from fedmpi.process.exit_codes import run_guarded
from tests.mpi.launch import run_mpi
from tests.quick_end import end_quickly

FEDAVG = "preset=fedavg clients.count=7 rounds=2 local.engine=sequential logging.tensorboard=false"
Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.timeout(300)


@server_optimizer
class ByRank:
    """Steps otherwise on rank 2: its ranks' models drift apart."""

    def step(self, w: Tensor, update: Tensor) -> None:
        from mpi4py import MPI

        w.add_(update, alpha=1.0 + (MPI.COMM_WORLD.rank == 2))


def gpu_on_one(rank: int, patch: Patch) -> None:
    if rank == 2:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "set_device", lambda device: None)


def last_client_left_out(rank: int, patch: Patch) -> None:
    own = SequentialEngine.train
    patch.setattr(
        SequentialEngine,
        "train",
        lambda engine, tasks, *others: own(engine, tasks[:-1] if rank == 2 else tasks, *others),
    )


def changed_after_round_0(change: Callable[[Simulation], None]) -> Callable[[int, Patch], None]:
    own = Simulation._apply

    def apply(simulation: Simulation, plan: Plan, totals: Any) -> None:
        own(simulation, plan, totals)
        if simulation.cluster.rank == 2 and plan.round == 0:
            change(simulation)

    return lambda rank, patch: patch.setattr(Simulation, "_apply", apply)


last_bit = changed_after_round_0(lambda simulation: simulation.model.view(torch.int32)[3:4].bitwise_xor_(1))
variate = changed_after_round_0(
    lambda simulation: [v[3:4].add_(1) for v in simulation.trainer.hooks.server.values()][0]
)
OTHER_MODELS = r"the models of ranks \[2\] differ from that of rank 0 after round \d"
SCENARIOS: dict[str, tuple[str, Callable[[int, Patch], None] | None, str, str]] = {
    "GPU": (FEDAVG, gpu_on_one, "UserError", r"the device is cpu on rank 0 \(.*\) and cuda on rank 2 "),
    "left out": (FEDAVG, last_client_left_out, "RanksDisagree", "7 participants have samples .*, but 6 were trained"),
    "another model": (f"{FEDAVG} checkpoint.every=1", last_bit, "RanksDisagree", rf"{OTHER_MODELS}; do the CPUs"),
    "another vector of the server": (
        f"{FEDAVG} checkpoint.every=1 local.algorithm=scaffold server.weights=uniform",
        variate,
        "RanksDisagree",
        OTHER_MODELS,
    ),
    "a custom component": (
        f"{FEDAVG} checkpoint.every=0 server.optimizer=tests.mpi.test_unlike_ranks:ByRank",
        None,
        "RanksDisagree",
        rf"{OTHER_MODELS}.*server optimizer tests.mpi.test_unlike_ranks:ByRank",
    ),
    "a key": (
        FEDAVG + " local.lr=0.{rank}1",
        None,
        "UserError",
        r"local.lr is 0.01 on rank 0 \(.*\) and 0.11 on rank 1 ",
    ),
    "coordinates": (  # some ranks have no coordinate to combine, and raise the error too
        f"{FEDAVG} model.hidden=[1] server.aggregator=krum server.aggregator.byzantine=5",
        None,
        "UserError",
        "krum.* needs more than 12 clients",
    ),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[dict[str, Any]]], CompletedProcess[str]]:
    """Return the output of three ranks for every scenario, and the exit code of the job."""
    out = tmp_path_factory.mktemp("unlike") / "found.json"
    ended = run_mpi(3, ["-m", "tests.mpi.test_unlike_ranks", out])
    assert out.exists(), ended.stderr
    return json.loads(out.read_text()), ended


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_say_the_same(name: str, job) -> None:
    one, *others = job[0][name]
    assert others == [one, one]
    _, _, kind, words = SCENARIOS[name]
    assert kind in one and re.search(words, one[kind]), one


def test_a_run_that_is_ended_says_so_once_and_exits_with_1(job) -> None:
    assert job[1].returncode == 1 and "Traceback" not in job[1].stderr
    assert "error: the models of ranks [2] differ from that of rank 0 after round 0" in job[1].stderr


def test_every_key_version_and_shard_is_among_the_facts(tmp_path: Path):
    assert prepare(f"digits --partition iid --clients 6 --shards 2 --out {tmp_path / 'it'}".split()) == 0
    manifest = open_store(tmp_path / "it").manifest
    facts = facts_of_run(load_config(None, ["preset=fedavg", "local.lr=0.3"]), manifest)
    assert (facts["local.lr"], facts["fedmpi (version)"]) == ("0.3", fedmpi.__version__)
    assert {"torch (version)", "python (version)", "fedmpi's own sources (sha256)"} <= facts.keys()
    for file in manifest.files():
        assert facts[f"manifest.json, {file.name} (sha256)"] == file.sha256
    assert {f"manifest.json, {key}" for key in ("classes", "seed", "description")} <= facts.keys()


def run(name: str, rank: int, patch: Patch) -> None:
    """Run a scenario to its end."""
    settings, change, *_ = SCENARIOS[name]
    if change is not None:
        change(rank, patch)
    parts = Experiment.connect(load_config(None, settings.replace("{rank}", str(rank)).split()))
    simulation = Simulation(parts, None)
    assert simulation.run() == "finished"
    parts.close()


def said(name: str, rank: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        try:
            run(name, rank, patch)
            return {}
        except (UserError, RanksDisagree) as error:
            return {type(error).__name__: str(error)}


def main() -> int:
    cluster, found = Cluster.connect(), {}
    for name in SCENARIOS:
        gathered = cluster.gather(np.frombuffer(json.dumps(said(name, cluster.rank)).encode(), np.uint8))
        if gathered is not None:
            found[name] = [json.loads(array.tobytes()) for array in gathered]
    if cluster.is_server:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2))
    with pytest.MonkeyPatch.context() as patch:
        run("another model", cluster.rank, patch)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
