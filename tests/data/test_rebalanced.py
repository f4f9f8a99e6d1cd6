"""Rebalancing as a run uses it: stored and virtual copies are the same run, errors, and which samples weigh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.augment import write_augmented
from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi import UserError
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.data.augmentation import WarpRanges
from fedmpi.data.shards import open_folder
from fedmpi.data.statistics import kl_divergence
from tests.end_to_end.astraea_runs import run_here

ALPHA = 0.67
COHORT = ("clients.count=4", "topology.clients_per_mediator=2", "data.source={folder}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Eight clients with random images of 1 x 6 x 6 in three unequal classes, and the same with copies (seed 0)."""
    folder = tmp_path_factory.mktemp("shards")
    generator = np.random.default_rng(1)
    labels = generator.choice(3, 90, p=[0.1, 0.25, 0.65])
    images = generator.integers(0, 256, (90, 1, 6, 6)).astype(np.uint8)
    raw = RawDataset(
        name="noise", task="image", classes=3, class_names=tuple("abc"), feature_shape=(1, 6, 6), dtype="uint8",
        mean=(0.5,), std=(0.2,), labels=labels, users=None, user_names=None, read=lambda rows: images[rows],
        test_x=images[:9], test_y=labels[:9], skipped=0, licence="none", citation="none",
    )  # fmt: skip
    partition = Partition(np.arange(90), np.array([0, 5, 15, 25, 35, 50, 60, 75, 90]), "given", {}, users=None)
    write_shards(raw, partition, folder / "plain", 2, 0, "made by a test")
    write_augmented(folder / "plain", folder / "augmented", ALPHA)
    return folder / "plain", folder / "augmented"


def settings(folder: Path, *more: str) -> list[str]:
    return ["preset=astraea", *(setting.format(folder=folder) for setting in COHORT), *more]


@pytest.mark.parametrize("weights", ["augmented", "original"])
def test_a_run_on_stored_copies_is_the_run_on_virtual_ones(
    tmp_path: Path, folders: tuple[Path, Path], weights: str
) -> None:
    plain, augmented = folders
    more = f"rebalance.weights={weights}"
    virtual = run_here(tmp_path / "virtual", *settings(plain, more))
    stored = run_here(tmp_path / "stored", *settings(augmented, more, "rebalance.mode=stored"))
    assert torch.equal(virtual.model, stored.model)
    same = ("train_loss", "samples", "kl_mediators", "kl_client_mean", "kl_client_before_mean", "bytes_client_up")
    for one, other in zip(virtual.records, stored.records, strict=True):
        assert [one[key] for key in same] == [other[key] for key in same]
    one, other = virtual.summary["rebalancing"], stored.summary["rebalancing"]
    assert one["stored_bytes"] == 0 and other["stored_bytes"] == one["bytes"] == one["copies"] * (36 + 8) > 0
    before, after = (open_folder(folder).class_counts().sum(axis=0) for folder in folders)
    assert one["class_totals_before"] == before.tolist() and one["class_totals"] == after.tolist()
    assert one["kl_global_before"] == pytest.approx(kl_divergence(before))
    assert one["kl_global"] == pytest.approx(kl_divergence(after)) and one["kl_global"] < one["kl_global_before"]
    assert one["copies"] == after.sum() - before.sum()
    different = ("mode", "stored_bytes")
    assert {k: v for k, v in one.items() if k not in different} == {
        k: v for k, v in other.items() if k not in different
    }


@pytest.mark.parametrize(
    "which, more, reason",
    [
        (0, ["rebalance.mode=stored"], "data.source holds none"),
        (1, [], "would be augmented twice"),
        (1, ["rebalance.mode=stored", "rebalance.alpha=1.0"], "augmented with alpha = 0.67, but rebalance.alpha = 1.0"),
        (1, ["rebalance.mode=stored", "rebalance.copies=ratio-minus-one"], "augmented with copies = ratio"),
    ],
)
def test_what_does_not_fit_the_shards_is_rejected(
    folders: tuple[Path, Path], which: int, more: list[str], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        Experiment.connect(load_config(None, settings(folders[which], *more)))


def test_the_ranges_of_the_configuration_reach_the_copies(folders: tuple[Path, Path]) -> None:
    names = ("rotation", "shear", "shift", "zoom")
    still = experiment(folders[0], *(f"rebalance.{name}=0" for name in names))
    moved, default = experiment(folders[0], "rebalance.shift=0.3"), experiment(folders[0])
    client = int(np.argmax(default.data.sizes - open_folder(folders[0]).sizes))
    images = [one.data.load(client)[0] for one in (still, moved, default)]
    originals = len(open_folder(folders[0]).client(client)[1])
    assert all(torch.equal(images[0][:originals], one[:originals]) for one in images)
    unwarped = {tuple(image.flatten().tolist()) for image in images[0][:originals]}
    assert all(tuple(image.flatten().tolist()) in unwarped for image in images[0][originals:])
    assert not torch.equal(images[1], images[2])
    assert WarpRanges(**{name: getattr(default.config.rebalance, name) for name in names}) == WarpRanges()


def experiment(folder: Path, *more: str) -> Experiment:
    threads = torch.get_num_threads()
    try:
        return Experiment.connect(load_config(None, settings(folder, *more)))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def plan_of_all() -> Iterator[Plan]:
    yield Plan(0, 0.1, np.arange(8), np.ones(8), per_sample=True, normalize=True, probability=0.5)


@pytest.mark.parametrize("sampling", [[], ["samples.sampler=bernoulli", "samples.budget=60"]])
def test_copies_weigh_or_not_as_configured(folders: tuple[Path, Path], plan_of_all: Plan, sampling: list[str]) -> None:
    sizes = open_folder(folders[0]).sizes
    for weights in ("augmented", "original"):
        one = experiment(folders[0], *sampling, f"rebalance.weights={weights}")
        tasks = one.trainer.worker.tasks(plan_of_all, np.arange(8))
        effective = one.data.sizes
        for task in tasks:
            rows = np.arange(effective[task.client]) if task.rows is None else task.rows
            counted = rows if weights == "augmented" else rows[rows < sizes[task.client]]
            assert task.coefficient == len(counted)
        assert any(task.coefficient < effective[task.client] for task in tasks) == (
            weights == "original" or bool(sampling)
        )


def test_one_gradient_of_all_rows_weighs_as_the_clients_do(folders: tuple[Path, Path]) -> None:
    """The merged path of sampled rows and the sequential one agree when only originals weigh."""
    original = "rebalance.weights=original"
    merged = trained(folders[0], original, "local.engine=auto")
    one_by_one = trained(folders[0], original, "local.engine=sequential")
    assert torch.allclose(merged, one_by_one, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(merged, trained(folders[0], "local.engine=auto"), rtol=1e-4, atol=1e-6)


def trained(folder: Path, *more: str) -> torch.Tensor:
    """The model of two rounds of FedSampling on rebalanced data, averaged by samples."""
    common = [
        "preset=fedsampling", f"data.source={folder}", "samples.budget=60", "samples.size.max_size=50", "rounds=2",
        "server.weights=samples", "rebalance=true",
    ]  # fmt: skip
    threads = torch.get_num_threads()
    experiment = Experiment.connect(load_config(None, [*common, *more]))
    simulation = Simulation(experiment, None)
    assert simulation.run() == "finished"
    experiment.close()
    torch.set_num_threads(threads)
    return simulation.model
