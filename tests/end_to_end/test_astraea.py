"""Astraea in whole runs: traffic as counted and by the paper's formulas, limits that are FedAvg, combinations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi import UserError
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.updates.traffic import MEGABYTE, astraea_formula, cost_to_target, fedavg_formula
from tests.end_to_end.astraea_runs import SMALL, Run, run_here
from tests.end_to_end.runs import Record, choices, records
from tests.mpi.launch import run_mpi

GAMMA = "topology.clients_per_mediator=3"
LINKS = ("client_up", "client_down", "mediator_up", "mediator_down")


def link_bytes(record: Record) -> int:
    return sum(record.get(f"bytes_{link}", 0) for link in LINKS)


def test_fedavg_sends_two_models_a_client(tmp_path: Path) -> None:
    run = run_here(tmp_path / "run", "preset=fedavg")
    for record in run.records:
        assert link_bytes(record) == record["bytes_paper_formula"] == fedavg_formula(run.values, 7)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_counted_traffic_is_that_of_the_papers_formula(tmp_path: Path, epochs: int) -> None:
    """2 |w| (⌈c/γ⌉ + E_m c), c = 7, γ = 3, and once the class counts and the copies per class."""
    run = run_here(tmp_path / "run", "preset=astraea", GAMMA, f"topology.epochs={epochs}", "rounds=2")
    first, second = run.records
    assert second["visits"] == 7 * epochs
    assert link_bytes(second) == astraea_formula(run.values, 7, 3, epochs)
    assert second["bytes_paper_formula"] == astraea_formula(run.values, 7, 3)
    assert (link_bytes(second) == second["bytes_paper_formula"]) == (epochs == 1)
    assert second["bytes_mediator_up"] == second["bytes_mediator_down"] == 3 * 4 * run.values
    assert link_bytes(first) - link_bytes(second) == 2 * 4 * run.clients * run.classes


def test_size_answers_and_probes_are_on_top(tmp_path: Path) -> None:
    """Participants answer with their size and learn K and Ñ; label histograms are all class counts, in every round."""
    run = run_here(
        tmp_path / "run", "preset=fedstas", "clients.count=7", "clients.sampler.features=label-histogram",
        "clients.sampler.strata=3", "samples.budget=4000", "clients.sampler.within_stratum=uniform",
        "topology=mediators", GAMMA, "server.weights=samples",
    )  # fmt: skip
    for record in run.records:
        models = astraea_formula(run.values, 7, 3, 1)
        answers = 4 * 7 + 2 * 4 * 7
        histograms = 4 * run.clients * run.classes
        first = histograms if record["round"] == 0 else 0
        assert link_bytes(record) == models + answers + histograms + first


def test_participants_without_sampled_rows_are_not_visited(tmp_path: Path) -> None:
    run = run_here(tmp_path / "run", "preset=astraea-mediator", GAMMA, "samples.sampler=bernoulli", "samples.budget=8")
    assert any(record["visits"] < 14 for record in run.records)
    for record in run.records[1:]:
        answers = 4 * run.clients + 2 * 4 * 7
        assert link_bytes(record) == 2 * 4 * run.values * (record["visits"] + 3) + answers


LOCAL = ["local.lr=0.01", "local.epochs=1", "local.batch_size=20", "server.weights=samples"]
LIMIT = ["topology=mediators", "topology.clients_per_mediator=1", "topology.epochs=1"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_client_a_mediator_one_epoch_and_no_augmentation_is_fedavg_to_the_bit(
    tmp_path: Path, optimizer: str
) -> None:
    common = ["preset=fedavg", *LOCAL, f"local.optimizer={optimizer}", "server.exact=true"]
    fedavg, limit = run_here(tmp_path / "fedavg", *common), run_here(tmp_path / "limit", *common, *LIMIT)
    assert torch.equal(fedavg.model, limit.model)
    for star, mediated in zip(fedavg.records, limit.records, strict=True):
        assert all(star[key] == mediated[key] for key in ("train_loss", "test_accuracy", "samples", "steps"))


def test_the_limit_is_fedavg_to_rounding_without_exact_sums(tmp_path: Path) -> None:
    common = ["preset=fedavg", *LOCAL, "model.activation=tanh"]
    fedavg, limit = run_here(tmp_path / "fedavg", *common), run_here(tmp_path / "limit", *common, *LIMIT)
    assert torch.linalg.vector_norm(fedavg.model - limit.model) <= 1e-5 * torch.linalg.vector_norm(fedavg.model)


@pytest.mark.parametrize("change", ["topology.clients_per_mediator=2", "topology.epochs=2"])
def test_the_limit_is_sharp(tmp_path: Path, change: str) -> None:
    common = ["preset=fedavg", *LOCAL, "server.exact=true", "rounds=2"]
    fedavg, near = run_here(tmp_path / "fedavg", *common), run_here(tmp_path / "near", *common, *LIMIT, change)
    assert torch.linalg.vector_norm(fedavg.model - near.model) > 1e-3 * torch.linalg.vector_norm(fedavg.model)


def test_strata_sampling_and_a_server_optimizer_go_with_mediators(tmp_path: Path) -> None:
    run = run_here(
        tmp_path / "run", "preset=fedstas", "clients.sampler.strata=3", "samples.budget=200", "topology=mediators",
        GAMMA, "topology.epochs=2", "topology.scheduling=exchange", "rebalance=true",
        "server.optimizer=adam", "server.optimizer.lr=0.01", "local.lr=0.05",
    )  # fmt: skip
    for record in run.records:
        assert sum(record["allocation"]) == 7 and record["mediators"] == 3
        assert record["sampling_probability"] < 1 and record["kl_mean"] < record["kl_client_mean"]
    assert torch.isfinite(run.model).all()


def test_divergences_of_mediators_and_clients_before_and_after_are_recorded(tmp_path: Path) -> None:
    run = run_here(tmp_path / "run", "preset=astraea", GAMMA)
    for record in run.records:
        assert len(record["kl_mediators"]) == record["mediators"] == 3
        assert record["kl_mean"] == pytest.approx(np.mean(record["kl_mediators"]))
        assert record["kl_max"] == max(record["kl_mediators"])
        for name in ("kl", "kl_client", "kl_client_before"):
            box = record[f"{name}_quartiles"]
            assert box == sorted(box) and len(box) == 5 and box[-1] == record[f"{name}_max"]
        assert record["kl_client_before_mean"] != record["kl_client_mean"] > record["kl_mean"]
        assert len(record["busy_seconds"]) == len(record["idle_seconds"]) == 1


def test_the_first_record_and_the_summary_tell_the_augmentation(tmp_path: Path) -> None:
    run = run_here(tmp_path / "run", "preset=astraea-aug")
    rebalancing = run.records[0]["rebalancing"]
    assert rebalancing == run.summary["rebalancing"]
    before, after = np.array(rebalancing["class_totals_before"]), np.array(rebalancing["class_totals"])
    np.testing.assert_array_equal(after > before, before < before.mean())
    assert (
        rebalancing["copies"] == (after - before).sum()
        and rebalancing["overhead"] == rebalancing["copies"] / before.sum()
    )
    assert rebalancing["bytes"] == rebalancing["copies"] * (8 * 8 + 8) and rebalancing["stored_bytes"] == 0
    assert all("rebalancing" not in record for record in run.records[1:])


def test_the_summary_has_rounds_and_megabytes_to_the_target(tmp_path: Path) -> None:
    run = run_here(tmp_path / "run", "preset=astraea", GAMMA, "rounds=6", "evaluation.target_accuracy=0.3")
    accuracies = [record["test_accuracy"] for record in run.records]
    cost = cost_to_target(accuracies, [link_bytes(record) for record in run.records], 0.3)
    assert cost is not None and 1 < cost.rounds < 6, "the target shall lie on the way"
    assert (run.summary["rounds_to_target"], run.summary["megabytes_to_target"]) == cost
    assert run.summary["bytes_total"] == sum(map(link_bytes, run.records)) > cost.megabytes * MEGABYTE
    never = run_here(tmp_path / "never", "preset=astraea", GAMMA, "rounds=2", "evaluation.target_accuracy=1.0")
    assert never.summary["rounds_to_target"] is None and never.summary["megabytes_to_target"] is None


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Record], dict]:
    folder = tmp_path_factory.mktemp("astraea") / "run"
    settings = choices("preset=astraea", *SMALL, GAMMA, "topology.keep_optimizer=true", "server.exact=true")
    job = run_mpi(3, ["-m", "fedmpi", "train", *settings, "--out", folder])
    assert job.returncode == 0, job.stderr
    return records(folder), json.loads((folder / "summary.json").read_text())


def test_what_mpi_moved_stands_beside_the_simulated_bytes(three_ranks: tuple[list[Record], dict]) -> None:
    """A hop is a model, Adam's two moments, and 16 bytes of weight and step number."""
    rounds, summary = three_ranks
    hops, values = sum(record["hops"] for record in rounds), summary["parameters"]
    assert hops > 0
    assert summary["mpi_bytes"]["relay"] == hops * (3 * 4 * values + 16)
    assert summary["mpi_bytes"]["total"] == sum(n for kind, n in summary["mpi_bytes"].items() if kind != "total")
    assert summary["bytes_total"] == sum(summary[f"bytes_{link}"] for link in LINKS)


def test_every_rank_tells_its_busy_and_idle_time(three_ranks: tuple[list[Record], dict]) -> None:
    for record in three_ranks[0]:
        assert len(record["busy_seconds"]) == len(record["idle_seconds"]) == 3
        assert record["idle_seconds"][0] == 0 and all(seconds > 0 for seconds in record["busy_seconds"][1:])


def test_the_ranks_change_nothing_but_times_and_hops(tmp_path: Path, three_ranks: tuple[list[Record], dict]) -> None:
    exact = "server.exact=true"
    alone: Run = run_here(tmp_path / "run", "preset=astraea", GAMMA, "topology.keep_optimizer=true", exact)
    for one, three in zip(alone.records, three_ranks[0], strict=True):
        assert one["visits"] == three["visits"] and link_bytes(one) == link_bytes(three)
        assert one["kl_mediators"] == three["kl_mediators"]
        assert one["train_loss"] == pytest.approx(three["train_loss"], rel=1e-12)


def test_text_is_refused(tmp_path: Path) -> None:
    labels = np.arange(60) % 3
    tokens = np.random.default_rng(0).integers(1, 9, (60, 5)).astype(np.int32)
    raw = RawDataset(
        name="words", task="text", classes=3, class_names=tuple("abc"), feature_shape=(5,), dtype="int32", mean=(),
        std=(), labels=labels, users=None, user_names=None, read=lambda rows: tokens[rows], test_x=tokens[:9],
        test_y=labels[:9], skipped=0, licence="none", citation="none", vocabulary=tuple("abcdefghij"),
    )  # fmt: skip
    partition = Partition(np.arange(60), np.array([0, 20, 40, 60]), "given", {}, users=None)
    write_shards(raw, partition, tmp_path / "shards", 2, 0, "made by a test")
    config = load_config(None, ["preset=astraea", f"data.source={tmp_path}/shards", "clients.count=2"])
    with pytest.raises(UserError, match=r"copies of images.*task 'text': set rebalance = false"):
        Experiment.connect(config)
