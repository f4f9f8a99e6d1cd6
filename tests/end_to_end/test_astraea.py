"""Astraea in whole runs: the limit that is FedAvg, groups, what is recorded, and what MPI moves.

`tests/reference` replays runs with mediators, their traffic and their divergences.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.updates.traffic import MEGABYTE, cost_to_target
from tests.end_to_end.in_process import QUIET, SMALL, Run, run
from tests.end_to_end.runs import Record, choices, curve, records
from tests.mpi.launch import run_mpi
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


@pytest.mark.slow
def test_what_travels_with_a_model_is_what_mpi_moves(tmp_path: Path) -> None:
    """A model with buffers: d values and Adam's two moments of the trainable ones; in MPI, weight and steps besides.

    The opening round takes a step of SGD, which has no moments.
    """
    settings = (
        "preset=astraea", "data.source=digits:clients=12,alpha=0.4", "rebalance=false", GAMMA,
        "topology.epochs=2", "clients.count=6", "topology.keep_optimizer=true", "rounds=3",
        "model.name=tests.end_to_end.user_models:normed", "clients.sampler=stratified",
        "clients.sampler.initial_step=true", "clients.sampler.features=label-histogram",
        "clients.sampler.clustering=kmeans",
        "clients.sampler.strata=2", "clients.sampler.within_stratum=uniform",
    )  # fmt: skip
    job = run_mpi(3, ["-m", "fedmpi", "train", *choices(*QUIET, *settings), "--out", tmp_path / "run"])
    assert job.returncode == 0, job.stderr
    experiment = Experiment.connect(load_config(None, [*settings]))
    model = experiment.model
    experiment.close()
    rounds, summary = curve(tmp_path / "run"), json.loads((tmp_path / "run" / "summary.json").read_text())
    assert rounds[0]["opening"] and model.size > model.trainable
    relayed = 0
    for record in rounds:
        visit = 4 * (model.size + 2 * model.trainable * (record["round"] > 0))
        assert record["hops"] > 0 and record["bytes_client_down"] == record["visits"] * visit
        relayed += record["hops"] * (visit + 16)
    moved = summary["mpi_bytes"]
    assert moved["relay"] == relayed and moved["total"] == sum(n for kind, n in moved.items() if kind != "total")
    assert summary["bytes_total"] == sum(summary[f"bytes_{link}"] for link in LINKS)
    for record in records(tmp_path / "run"):
        assert len(record["busy_seconds"]) == len(record["idle_seconds"]) == 3
        assert record["idle_seconds"][0] == 0 and all(seconds > 0 for seconds in record["busy_seconds"][1:])
