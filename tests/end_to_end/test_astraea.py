"""Astraea in whole runs: the limit that is FedAvg, groups, what is recorded, and what MPI moves.

`tests/reference` replays runs with mediators, their traffic and their divergences.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpi.config import load_config
from fedmpi.updates.traffic import MEGABYTE, cost_to_target
from tests.end_to_end.in_process import QUIET, SMALL, Run, run
from tests.end_to_end.runs import Record
from tests.reference.compare import _by_round
from tests.reference.plain_data import stream
from tests.reference.program import traced

GAMMA = "topology.clients_per_mediator=3"
LINKS = ("client_up", "client_down", "mediator_up", "mediator_down")
LOCAL = ["local.lr=0.01", "local.epochs=1", "local.batch_size=20", "server.weights=samples"]
LIMIT = ["topology=mediators", "topology.clients_per_mediator=1", "topology.epochs=1"]
SCHEDULE = 12


def small(*settings: str) -> Run:
    return run(*SMALL, *settings, evaluate=True)


def link_bytes(record: Record) -> int:
    return sum(record.get(f"bytes_{link}", 0) for link in LINKS)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_client_per_mediator_one_epoch_and_no_augmentation_is_fedavg_bit_for_bit(optimizer: str) -> None:
    common = ["preset=fedavg", *LOCAL, f"local.optimizer={optimizer}", "server.exact=true", "rounds=2"]
    fedavg, limit = small(*common), small(*common, *LIMIT)
    assert torch.equal(fedavg.model, limit.model)
    for star, mediated in zip(fedavg.records, limit.records, strict=True):
        assert all(star[key] == mediated[key] for key in ("train_loss", "test_accuracy", "samples", "steps"))
    for change in ("topology.clients_per_mediator=2", "topology.epochs=2"):
        near = small(*common, *LIMIT, change)
        assert torch.linalg.vector_norm(fedavg.model - near.model) > 1e-3 * torch.linalg.vector_norm(fedavg.model)


def test_random_groups_are_drawn_for_every_round_and_fixed_ones_once_also_after_a_resume(tmp_path: Path) -> None:
    base = ["data.source=digits:clients=12,alpha=0.5", "model.hidden=[6]", "clients.sampler=all", "rounds=2"]
    base += ["topology=mediators", "topology.clients_per_mediator=5", "topology.scheduling=random"]
    for regroup, rounds in (("once", (0, 0)), ("every-round", (0, 1))):
        config = load_config(None, [*QUIET, *base, f"topology.regroup={regroup}"])
        trace = traced(config, tmp_path / regroup, how="cut")
        assert trace is not None
        for found, t in zip(_by_round(trace["groups"]), rounds, strict=True):
            assert found[stream(0, SCHEDULE, t).permutation(12)].tolist() == (np.arange(12) // 5).tolist()


def test_the_summary_has_rounds_and_megabytes_to_the_target() -> None:
    done = small("preset=astraea", GAMMA, "rounds=6", "evaluation.target_accuracy=0.3")
    accuracies = [record["test_accuracy"] for record in done.records]
    cost = cost_to_target(accuracies, [link_bytes(record) for record in done.records], 0.3)
    assert cost is not None and 1 < cost.rounds < 6, "the target shall lie on the way"
    assert (done.summary["rounds_to_target"], done.summary["megabytes_to_target"]) == cost
    assert done.summary["bytes_total"] == sum(map(link_bytes, done.records)) > cost.megabytes * MEGABYTE
    never = small("preset=astraea", GAMMA, "rounds=2", "evaluation.target_accuracy=1.0")
    assert never.summary["rounds_to_target"] is None and never.summary["megabytes_to_target"] is None
