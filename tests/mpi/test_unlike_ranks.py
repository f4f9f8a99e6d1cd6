"""A job in which one rank differs from the others: all ranks decide alike, or the run ends with one sentence.

`mpiexec -n 3 python -m tests.mpi.test_unlike_ranks OUT.json` runs every scenario, and in the end `another_model` again,
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
from zlib import crc32

import numpy as np
import pytest
import torch

import fedmpi
from data_prep.__main__ import run as prepare
from fedmpi import UserError
from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core import experiment
from fedmpi.core.experiment import Experiment, facts_of_run
from fedmpi.core.loop import Simulation
from fedmpi.data.opening import open_store
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import ForwardTraits
from fedmpi.mediators import relay
from fedmpi.mpi import Cluster
from fedmpi.process.exit_codes import run_guarded
from tests.mpi.launch import run_mpi
from tests.quick_end import end_quickly

FEDAVG = "preset=fedavg clients.count=7 rounds=2 local.engine=sequential local.epochs=1 logging.tensorboard=false"
MERGING = "preset=fedavg clients.count=7 rounds=2 local.batch_size=20 logging.tensorboard=false"
ASTRAEA = (
    "preset=astraea clients.count=6 topology.clients_per_mediator=3 rounds=1 logging.tensorboard=false "
    "topology.epochs=2"
)
Patch = pytest.MonkeyPatch
Scenario = Callable[[int, Patch], dict[str, Any]]
pytestmark = pytest.mark.timeout(300)


def run(settings: str) -> dict[str, Any]:
    """Engine and layout of this rank, and the bits of its model."""
    parts = Experiment.connect(load_config(None, settings.split()))
    simulation = Simulation(parts, None)
    assert simulation.run() == "finished"
    engine = parts.trainer.engine.description
    facts = {"said": f"{parts.layout.description}; {engine}", "model": crc32(simulation.model.numpy().tobytes())}
    parts.close()
    return facts


def coupling_found_by_one(rank: int, patch: Patch) -> dict[str, Any]:
    """Only rank 1 finds that samples of a batch influence one another: nothing may be merged then, on any rank."""
    patch.setattr(experiment, "forward_traits", lambda *_: ForwardTraits(couples=rank == 1))
    return run(MERGING)


def a_gpu_on_one(rank: int, patch: Patch) -> dict[str, Any]:
    if rank == 2:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
    return run(FEDAVG)


def another_layout(rank: int, patch: Patch) -> dict[str, Any]:
    """Rank 1 takes rank 0 for a worker, the others do not: some clients are trained twice, others never."""
    patch.setattr(experiment, "shares_data", lambda *_: True)
    patch.setattr(experiment, "server_trains", lambda *_: rank == 1)
    return run(f"{FEDAVG} cluster.server_trains=never")


def left_out(rank: int, patch: Patch) -> dict[str, Any]:
    """The engine of rank 2 loses its last client."""
    own = SequentialEngine.train
    patch.setattr(
        SequentialEngine,
        "train",
        lambda engine, tasks, *others: own(engine, tasks[:-1] if rank == 2 else tasks, *others),
    )
    return run(FEDAVG)


def visited_once_too_often(rank: int, patch: Patch) -> dict[str, Any]:
    own = relay._Relay.visit

    def visit(*about: Any) -> None:
        own(*about)
        about[-1].visits += rank == 2

    patch.setattr(relay._Relay, "visit", visit)
    return run(ASTRAEA)


def changed_after_round_0(rank: int, patch: Patch, change: Callable[[Simulation], None]) -> None:
    own = Simulation._apply

    def apply(simulation: Simulation, plan: Plan, totals: Any) -> None:
        own(simulation, plan, totals)
        if rank == 2 and plan.round == 0:
            change(simulation)

    patch.setattr(Simulation, "_apply", apply)


def another_model(rank: int, patch: Patch) -> dict[str, Any]:
    """The last bit of a parameter of rank 2 is another one."""
    changed_after_round_0(rank, patch, lambda simulation: simulation.model.view(torch.int32)[3:4].bitwise_xor_(1))
    return run(f"{FEDAVG} checkpoint.every=1")


def another_vector_of_the_server(rank: int, patch: Patch) -> dict[str, Any]:
    """The models are alike, but the control variate of SCAFFOLD's server is another one on rank 2."""
    changed_after_round_0(
        rank, patch, lambda simulation: [vector[3:4].add_(1) for vector in simulation.trainer.hooks.server.values()][0]
    )
    return run(f"{FEDAVG} checkpoint.every=1 local.algorithm=scaffold server.weights=uniform")


def a_part_of_ones_own_by_rank(rank: int, patch: Patch) -> dict[str, Any]:
    return run(f"{FEDAVG} checkpoint.every=0 server.optimizer=tests.mpi.user_models:ByRank")


def another_key(rank: int, patch: Patch) -> dict[str, Any]:
    return run(f"{FEDAVG} local.lr={0.2 if rank == 2 else 0.1}")


def too_few_for_krum(rank: int, patch: Patch) -> dict[str, Any]:
    """Some ranks have no coordinate to combine, and raise the error too."""
    return run(f"{FEDAVG} model.hidden=[1] server.aggregator=krum server.aggregator.byzantine=5")


OTHER_MODELS = r"the models of ranks \[2\] differ from that of rank 0 after round \d"
SCENARIOS: list[tuple[Scenario, str, str]] = [
    (coupling_found_by_one, "said", "nothing is merged: a sample's outputs depend on the other samples"),
    (a_gpu_on_one, "UserError", r"the device is cpu on rank 0 \(.*\) and cuda on rank 2 "),
    (another_layout, "RanksDisagree", r"round 0: 7 participants are planned, but the ranks took \d+ for theirs"),
    (left_out, "RanksDisagree", "round 0: 7 participants have samples to train on, but 6 were trained"),
    (
        visited_once_too_often,
        "RanksDisagree",
        r"round 0: 12 visits of mediators are planned, but there were 1[3-9]",
    ),
    (another_model, "RanksDisagree", rf"{OTHER_MODELS}; do the CPUs"),
    (another_vector_of_the_server, "RanksDisagree", OTHER_MODELS),
    (a_part_of_ones_own_by_rank, "RanksDisagree", rf"{OTHER_MODELS}.*server optimizer tests.mpi.user_models:ByRank"),
    (another_key, "UserError", r"local.lr is 0.1 on rank 0 \(.*\) and 0.2 on rank 2 "),
    (too_few_for_krum, "UserError", "krum.* needs more than 12 clients"),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[dict[str, Any]]], CompletedProcess[str]]:
    """Return the output of three ranks for every scenario, and the exit code of the job."""
    out = tmp_path_factory.mktemp("unlike") / "found.json"
    ended = run_mpi(3, ["-m", "tests.mpi.test_unlike_ranks", out])
    assert out.exists(), ended.stderr
    return json.loads(out.read_text()), ended


@pytest.mark.parametrize("scenario, kind, words", SCENARIOS, ids=lambda value: getattr(value, "__name__", ""))
def test_all_ranks_say_the_same(scenario: Scenario, kind: str, words: str, job) -> None:
    one, *others = job[0][scenario.__name__]
    assert others == [one, one]
    assert kind in one and re.search(words, one[kind]), one


def test_a_run_that_is_ended_says_so_once_and_exits_with_1(job) -> None:
    assert job[1].returncode == 1 and "Traceback" not in job[1].stderr
    assert "error: the models of ranks [2] differ from that of rank 0 after round 0" in job[1].stderr


def test_every_key_version_and_shard_is_among_the_facts(tmp_path: Path):
    assert (
        prepare(["digits", "--partition", "iid", "--clients", "6", "--shards", "2", "--out", str(tmp_path / "it")]) == 0
    )
    manifest = open_store(tmp_path / "it").manifest
    facts = facts_of_run(load_config(None, ["preset=fedavg", "local.lr=0.3"]), manifest)
    assert facts["local.lr"] == "0.3" and facts["preset"] == "'fedavg'"
    assert facts["fedmpi (version)"] == fedmpi.__version__
    assert facts["numpy (version)"] == np.__version__
    assert {"torch (version)", "python (version)", "fedmpi's own sources (sha256)"} <= facts.keys()
    for file in manifest.files():
        assert facts[f"manifest.json, {file.name} (sha256)"] == file.sha256
    assert {f"manifest.json, {key}" for key in ("classes", "seed", "description")} <= facts.keys()


def said(scenario: Scenario, rank: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        try:
            return scenario(rank, patch)
        except (UserError, RanksDisagree) as error:
            return {type(error).__name__: str(error)}


def main() -> int:
    cluster, found = Cluster.connect(), {}
    for scenario, *_ in SCENARIOS:
        gathered = cluster.gather(np.frombuffer(json.dumps(said(scenario, cluster.rank)).encode(), np.uint8))
        if gathered is not None:
            found[scenario.__name__] = [json.loads(array.tobytes()) for array in gathered]
    if cluster.is_server:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2))
    with pytest.MonkeyPatch.context() as patch:
        another_model(cluster.rank, patch)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
