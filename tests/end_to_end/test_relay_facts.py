"""What a record says of mediators, composed: availability, drop-outs, empty rounds, buffers, resuming, ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.updates.traffic import astraea_formula, fedavg_formula
from tests.end_to_end.in_process import QUIET, run, run_into
from tests.end_to_end.runs import Record, choices, curve
from tests.mpi.launch import run_mpi

SMALL = (
    "data.source=digits:clients=12,alpha=0.4", "model.name=mlp", "model.hidden=[6]", "logging.tensorboard=false",
    "evaluation.every=100",
)  # fmt: skip
MEDIATORS = ("topology.clients_per_mediator=3", "topology.epochs=2", "rebalance=false")
COMES_AND_GOES = ("clients.sampler=all", "clients.availability=bernoulli")
STATIC = (
    *SMALL,
    *MEDIATORS,
    *COMES_AND_GOES,
    "clients.availability.probability=0.5",
    "topology.regroup=once",
    "seed=11",
)
LINKS = ("client_up", "client_down", "mediator_up", "mediator_down")


def counted(record: Record) -> int:
    return sum(record.get(f"bytes_{link}", 0) for link in LINKS)


def test_a_round_without_participants_reports_no_visits_hops_or_bytes() -> None:
    done = run(
        "preset=astraea", *SMALL, *MEDIATORS, *COMES_AND_GOES, "clients.availability.probability=0.1", "rounds=10"
    )
    empty = [record for record in done.records if not record["participants"]]
    visited = [record for record in done.records if record["participants"]]
    assert 0 < len(empty) < len(done.records) - 1 and done.records.index(empty[0]) > 0, "both kinds shall occur"
    for record in empty:
        assert (record["visits"], record["hops"], record["mediators"]) == (0, 0, 0)
        assert counted(record) == record["bytes_paper_formula"] == 0
        assert record["idle_seconds"] == [0.0]
    for record in visited:
        assert record["visits"] == 2 * record["participants"]


@pytest.mark.parametrize("probability", [1.0, 0.6])
@pytest.mark.parametrize("drop_out", [0.0, 0.4])
def test_who_is_lost_was_sent_a_model_that_never_came_back(probability: float, drop_out: float) -> None:
    """Down: E_m models to every survivor and one to each of the lost; up: the survivors'; mediators: one each."""
    turnout = (
        "clients.availability=bernoulli",
        f"clients.availability.probability={probability}",
        f"clients.failure_rate={drop_out}",
    )
    done = run("preset=astraea", *SMALL, *MEDIATORS, "clients.count=9", *turnout, "rounds=6")
    model = 4 * done.experiment.model.size
    lost = 0
    for record in done.records:
        survivors, asked = record["participants"], record.get("asked", record["participants"])
        counts = 4 * 12 * 10 if record["round"] == 0 else 0  # 12 clients tell their counts of 10 classes
        lost += asked - survivors
        assert record["visits"] == 2 * survivors
        assert record["mediators"] == -(-survivors // 3)
        assert record["bytes_client_up"] == 2 * survivors * model + counts
        assert record["bytes_client_down"] == (2 * survivors + asked - survivors) * model
        assert record["bytes_mediator_up"] == record["bytes_mediator_down"] == record["mediators"] * model
        assert counted(record) - counts - (asked - survivors) * model == astraea_formula(model // 4, survivors, 3, 2)
    assert (lost > 0) == (drop_out > 0)


def test_in_a_star_too_who_is_lost_was_sent_a_model() -> None:
    done = run("preset=fedavg", *SMALL, "clients.count=9", "clients.failure_rate=0.4", "rounds=4")
    values = done.experiment.model.size
    assert any(record["asked"] > record["participants"] for record in done.records)
    for record in done.records:
        assert record["asked"] == 9
        assert record["bytes_client_down"] == 9 * 4 * values
        assert record["bytes_client_up"] == record["participants"] * 4 * values
        assert record["bytes_paper_formula"] == fedavg_formula(values, record["participants"])


def test_rows_drawn_for_nobody_leave_mediators_without_visits_but_with_their_own_models() -> None:
    done = run(
        "preset=astraea-mediator", *SMALL, *MEDIATORS, "clients.count=9", "samples.sampler=bernoulli",
        "samples.budget=6", "clients.failure_rate=0.3", "rounds=4",
    )  # fmt: skip
    model = 4 * done.experiment.model.size
    assert any(record["visits"] < 2 * record["participants"] for record in done.records)
    for record in done.records[1:]:
        answers = 4 * 12 if done.experiment.config.samples.asked == "all" else 4 * record["participants"]
        assert record["bytes_client_up"] == record["visits"] * model + answers
        assert record["bytes_mediator_up"] == record["mediators"] * model


@pytest.mark.slow
def test_a_simulated_visit_costs_what_mpi_carries_in_a_hop(tmp_path: Path) -> None:
    """A model with buffers: d values and Adam's two moments of the trainable ones; in MPI, weight and steps besides.

    The opening round takes a step of SGD, which has no moments.
    """
    settings = (
        "preset=astraea", *SMALL[:1], *SMALL[3:], *MEDIATORS, "clients.count=6", "topology.keep_optimizer=true",
        "model.name=tests.end_to_end.user_models:normed", "rounds=3", "clients.sampler=stratified",
        "clients.sampler.initial_step=true", "clients.sampler.features=label-histogram", "clients.sampler.clustering=kmeans",
        "clients.sampler.strata=2", "clients.sampler.within_stratum=uniform",
    )  # fmt: skip
    job = run_mpi(3, ["-m", "fedmpi", "train", *choices(*settings), "--out", tmp_path / "run"])
    assert job.returncode == 0, job.stderr
    experiment = Experiment.connect(load_config(None, [*settings]))
    model = experiment.model
    experiment.close()
    records, summary = curve(tmp_path / "run"), json.loads((tmp_path / "run" / "summary.json").read_text())
    assert records[0]["opening"] and model.size > model.trainable
    relayed = 0
    for record in records:
        visit = 4 * (model.size + 2 * model.trainable * (record["round"] > 0))
        assert record["hops"] > 0 and record["bytes_client_down"] == record["visits"] * visit
        relayed += record["hops"] * (visit + 16)
    assert summary["mpi_bytes"]["relay"] == relayed


def without_ranks(records: list[Record]) -> list[dict[str, Any]]:
    """What the records say whatever the number of ranks."""
    known = ("round", "participants", "available", "mediators", "visits", "kl_mediators", "samples", "steps")
    return [{key: record[key] for key in known} for record in records]


@pytest.mark.slow
def test_static_groups_with_changing_availability_survive_a_resume_and_any_number_of_ranks(tmp_path: Path) -> None:
    """Undisturbed on one rank and on three; stopped after round 3 and resumed on one and on three: the same bits."""
    settings = ("preset=astraea", *STATIC, "rounds=6", "server.exact=true", "local.optimizer=sgd", "local.lr=0.1")
    whole, cut, resumed, three = (tmp_path / name for name in ("whole", "cut", "resumed", "three"))
    run_into(whole, *settings)
    run_into(cut, *settings, stop_after=3)
    assert len(curve(cut)) < 4
    shutil.copytree(cut, resumed)
    run_into(cut, *settings, resume=True)
    for folder, more in ((three, ()), (resumed, ("--resume",))):
        job = run_mpi(3, ["-m", "fedmpi", "train", *choices(*QUIET, *settings), "--out", folder, *more])
        assert job.returncode == 0, job.stderr
    expected, model = without_ranks(curve(whole)), load_file(whole / "model.safetensors")
    there = [record["participants"] for record in expected]
    assert there[2] == there[3] != there[4], "as many others on both sides of the stop, then fewer or more"
    for folder in (cut, resumed, three):
        assert without_ranks(curve(folder)) == expected, folder
        for name, value in load_file(folder / "model.safetensors").items():
            assert torch.equal(value, model[name]), (folder, name)
