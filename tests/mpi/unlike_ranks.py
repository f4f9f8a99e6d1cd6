"""A program in which one rank of a job is unlike the others: what every rank says of it.

mpiexec -n 3 python -m tests.mpi.unlike_ranks OUT.json SCENARIO

Runs every scenario, one after another, and in the end that one again, its error not caught.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from fedmpi import UserError
from fedmpi.aggregation import exact
from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core import experiment, placement
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.core.placement import agree_on_work
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import ForwardTraits
from fedmpi.mediators import relay
from fedmpi.mpi import Cluster
from fedmpi.process.exit_codes import run_guarded
from tests.quick_end import end_quickly

FEDAVG = "preset=fedavg clients.count=7 rounds=2 local.engine=sequential local.epochs=1 logging.tensorboard=false"
ASTRAEA = (
    "preset=astraea clients.count=6 topology.clients_per_mediator=3 rounds=1 logging.tensorboard=false "
    "topology.epochs=2"
)
Patch = pytest.MonkeyPatch


def run(settings: str) -> dict[str, Any]:
    """Run it here; what engine and layout this rank has, and the bits of its model."""
    parts = Experiment.connect(load_config(None, settings.split()))
    simulation = Simulation(parts, None)
    code = simulation.run()
    assert code == "finished"
    facts = {
        "layout": parts.layout.description,
        "engine": parts.trainer.engine.description.split("; so far")[0],
        "model": crc32(simulation.model.numpy().tobytes()),
    }
    parts.close()
    return facts


def alike(rank: int, patch: Patch) -> dict[str, Any]:
    return run(FEDAVG)


def another_opinion_of_the_server(rank: int, patch: Patch) -> dict[str, Any]:
    """Rank 1 would say of itself that the server trains; the others that it does not."""
    patch.setattr(placement, "server_trains", lambda *_: rank == 1)
    return run(f"{FEDAVG} cluster.placement=shared")


def unlike_numbers_of_gpus(rank: int, patch: Patch) -> dict[str, Any]:
    """Rank 0 sees 8 GPUs, rank 2 only 2: too few for the 3 ranks of its node."""
    patch.setattr(torch.cuda, "device_count", lambda: 8 - 3 * rank)
    cluster, config = Cluster.connect(), load_config(None, ["preset=fedavg", "cluster.placement=shared"])
    decided = agree_on_work(config, cluster, np.ones(4, np.int64), None, torch.device("cuda"))  # type: ignore[arg-type]
    cluster.close()
    return {"decided": list(decided)}


def coupling_found_by_one(rank: int, patch: Patch) -> dict[str, Any]:
    """Only rank 1 finds that samples of a batch influence one another: nothing may be merged then, on any rank."""
    patch.setattr(experiment, "forward_traits", lambda *_: ForwardTraits(couples=rank == 1))
    return run("preset=fedavg clients.count=7 rounds=2 local.batch_size=20 logging.tensorboard=false")


def keeping_found_by_one(rank: int, patch: Patch) -> dict[str, Any]:
    patch.setattr(experiment, "forward_traits", lambda *_: ForwardTraits(couples=False, keeps=rank == 2))
    return run("preset=fedavg clients.count=7 rounds=2 local.batch_size=20 logging.tensorboard=false")


def a_gpu_on_one(rank: int, patch: Patch) -> dict[str, Any]:
    if rank == 2:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
    return run(FEDAVG)


def another_layout(rank: int, patch: Patch) -> dict[str, Any]:
    """Rank 1 takes rank 0 for a worker, the others do not: some clients are trained twice, others never."""
    own = placement.agree_on_work
    patch.setattr("fedmpi.core.experiment.agree_on_work", lambda *about: (True, own(*about)[1] or rank == 1))
    return run(f"{FEDAVG} cluster.server_trains=never")


def left_out(rank: int, patch: Patch) -> dict[str, Any]:
    """The engine of rank 2 loses its last client."""
    own = SequentialEngine.train

    def train(engine: SequentialEngine, tasks: list, *others: Any) -> Any:
        return own(engine, tasks[:-1] if rank == 2 else tasks, *others)

    patch.setattr(SequentialEngine, "train", train)
    return run(FEDAVG)


def visited_once_too_often(rank: int, patch: Patch) -> dict[str, Any]:
    own = relay._Relay.visit

    def visit(*about: Any) -> None:
        own(*about)
        about[-1].visits += rank == 2

    patch.setattr(relay._Relay, "visit", visit)
    return run(ASTRAEA)


def another_model(rank: int, patch: Patch) -> dict[str, Any]:
    """The last bit of a parameter of rank 2 is another one after the first round."""
    own = Simulation._apply

    def apply(simulation: Simulation, plan: Plan, totals: Any) -> None:
        own(simulation, plan, totals)
        if rank == 2 and plan.round == 0:
            bits = simulation.model.view(torch.int32)
            bits[3] ^= 1

    patch.setattr(Simulation, "_apply", apply)
    return run(f"{FEDAVG} checkpoint.every=1")


def another_vector_of_the_server(rank: int, patch: Patch) -> dict[str, Any]:
    """The models are alike; what SCAFFOLD keeps of the server is another one on rank 2 after the first round."""
    own = Simulation._apply

    def apply(simulation: Simulation, plan: Plan, totals: Any) -> None:
        own(simulation, plan, totals)
        if rank == 2 and plan.round == 0:
            hooks = simulation.experiment.local_state.hooks
            assert hooks is not None
            for vector in hooks.server.values():
                vector[3] += 1

    patch.setattr(Simulation, "_apply", apply)
    return run(f"{FEDAVG} checkpoint.every=1 local.algorithm=scaffold server.weights=uniform")


def a_part_of_ones_own_by_rank(rank: int, patch: Patch) -> dict[str, Any]:
    return run(f"{FEDAVG} checkpoint.every=0 server.optimizer=tests.mpi.own_step:ByRank")


def too_many(rank: int, patch: Patch) -> dict[str, Any]:
    patch.setattr(exact, "MOST_RANKS", 2)
    return run(FEDAVG)


SCENARIOS: list[Callable[[int, Patch], dict[str, Any]]] = [
    alike,
    another_opinion_of_the_server,
    unlike_numbers_of_gpus,
    coupling_found_by_one,
    keeping_found_by_one,
    a_gpu_on_one,
    another_layout,
    left_out,
    visited_once_too_often,
    another_model,
    another_vector_of_the_server,
    a_part_of_ones_own_by_rank,
    too_many,
]


def said(scenario: Callable[[int, Patch], dict[str, Any]], rank: int) -> dict[str, Any]:
    """What a scenario came to on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            return scenario(rank, patch)
        except (UserError, RanksDisagree) as error:
            return {"error": type(error).__name__, "words": str(error)}


def main() -> int:
    job = Cluster.connect()
    named = {scenario.__name__: scenario for scenario in SCENARIOS}
    found = {}
    for name, scenario in named.items():
        own = json.dumps(said(scenario, job.rank)).encode()
        gathered = job.gather(np.frombuffer(own, np.uint8))
        if gathered is not None:
            found[name] = [json.loads(array.tobytes()) for array in gathered]
    if job.is_server:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2))
    with pytest.MonkeyPatch.context() as patch:
        named[sys.argv[2]](job.rank, patch)
    job.close()
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
