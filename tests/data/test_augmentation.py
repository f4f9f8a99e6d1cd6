"""Astraea's augmentation (Algorithm 2): numbers of copies, their warps, and runs on stored and virtual copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedmpi
from data_prep.writer import write_augmented
from fedmpi import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import load_config
from fedmpi.config.tables import RebalanceTable
from fedmpi.core.experiment import Experiment
from fedmpi.data.augmentation import (
    AugmentedStore,
    check_images,
    copies_of,
    copies_per_sample,
    rebalance,
    source_rows,
    warp,
    warps_of,
)
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription
from fedmpi.data.shards import ShardStore, open_folder
from fedmpi.data.source import ClientData
from fedmpi.data.statistics import kl_divergence
from tests.end_to_end.in_process import SMALL, run

READINGS = ("ratio", "ratio-minus-one")
STREAMS = Streams(5)
ALPHA = 0.67


# How many copies


def population(seed: int, clients: int, classes: int) -> list[np.ndarray]:
    """Labels of some clients with skewed class totals; the last class may be missing altogether."""
    generator = np.random.default_rng(seed)
    law = generator.dirichlet(np.full(classes, 0.5))
    return [generator.choice(classes, generator.integers(1, 30), p=law) for _ in range(clients)]


def test_a_class_below_the_mean_gets_the_ratio_to_the_mean_and_the_others_get_nothing() -> None:
    totals = np.array([2, 8, 20])  # mean 10
    np.testing.assert_allclose(copies_per_sample(totals, 1.0, "ratio"), [5.0, 1.25, 0.0])
    np.testing.assert_allclose(copies_per_sample(totals, 1.0, "ratio-minus-one"), [4.0, 0.25, 0.0])
    np.testing.assert_allclose(copies_per_sample(totals, 0.5, "ratio"), [np.sqrt(5), np.sqrt(1.25), 0.0])
    np.testing.assert_array_equal(copies_per_sample(totals, 0.0, "ratio"), [1.0, 1.0, 0.0])
    np.testing.assert_array_equal(copies_per_sample(totals, 0.0, "ratio-minus-one"), [0.0, 0.0, 0.0])
    # The mean counts a missing class, which gets no copies: it is 6 here, not the 8 of the classes that exist.
    np.testing.assert_allclose(copies_per_sample(np.array([0, 4, 8, 12]), 1.0, "ratio"), [0, 1.5, 0, 0])


def test_the_fractional_part_is_a_bernoulli_draw_of_every_sample() -> None:
    """Frequency of the extra copy over 20,000 samples. False-alarm rate 6e-7 (five standard deviations)."""
    copies = np.array([2.3, 0.0])
    numbers = copies_of(np.zeros(20_000, np.int64), copies, Streams(5), client=4)
    assert set(np.unique(numbers)) == {2, 3}
    assert abs((numbers == 3).mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 20_000)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("alpha", [0.0, 0.67, 2.0])
def test_the_counts_of_the_server_are_those_of_the_clients_copies(alpha: float, reading: str) -> None:
    labels, streams = population(seed=3, clients=12, classes=6), Streams(3)
    counts = np.array([np.bincount(y, minlength=6) for y in labels])
    result = rebalance(counts, alpha, reading, streams)
    for client, y in enumerate(labels):
        rows = source_rows(y, result.copies, streams, client)
        np.testing.assert_array_equal(counts[client] + np.bincount(y[rows], minlength=6), result.class_counts[client])
        assert (result.sizes[client], result.added[client]) == (len(y) + len(rows), len(rows))
    assert result.added.sum() > 0 or alpha == 0


# How a copy is warped


def one_map(**ranges: float) -> np.ndarray:
    """The first map of a client whose ranges are all zero but the given ones, for images of 10 x 20 pixels."""
    zero = {"rotation": 0.0, "shear": 0.0, "shift": 0.0, "zoom": 0.0}
    return warps_of(1, 10, 20, RebalanceTable(**{**zero, **ranges}), STREAMS, 0)[0]


def drawn() -> np.ndarray:
    """The six numbers in [-1, 1) behind `one_map`: rotation, shear, two zooms, two shifts."""
    return STREAMS.generator(Purpose.AUGMENT_WARP, 0, 0).random(6) * 2 - 1


def test_a_quarter_turn_turns_the_image() -> None:
    # The upper left corner (-1, -1) reads (1, -1), the upper right one: counter-clockwise.
    images = torch.arange(2 * 16, dtype=torch.float32).reshape(2, 1, 4, 4)
    quarter = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]).expand(2, 2, 3)
    torch.testing.assert_close(warp(images, quarter), torch.rot90(images, 1, (2, 3)))


def test_rotation_keeps_lengths_in_pixels_even_if_the_image_is_no_square() -> None:
    # Output pixels one step apart to the right are read one step apart along the turned axis. From -1 to 1 there are
    # 20 pixels along x, 10 along y.
    matrix, angle = one_map(rotation=40), np.deg2rad(40 * drawn()[0])
    to_pixels = np.diag([10, 5]) @ matrix[:, :2] @ np.diag([1 / 10, 1 / 5])
    np.testing.assert_allclose(to_pixels, [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def test_shift_is_a_share_of_each_side_zoom_scales_both_axes_and_shear_slants_the_vertical_one() -> None:
    amount, slant = 0.25 * drawn()[4:], np.deg2rad(30 * drawn()[1])
    np.testing.assert_allclose(one_map(shift=0.25), [[1, 0, 2 * amount[0]], [0, 1, 2 * amount[1]]])
    np.testing.assert_allclose(one_map(zoom=0.5), [[1 + 0.5 * drawn()[2], 0, 0], [0, 1 + 0.5 * drawn()[3], 0]])
    np.testing.assert_allclose(one_map(shear=30), [[1, -np.sin(slant) / 2, 0], [0, np.cos(slant), 0]])


def test_each_image_has_its_own_warp_whatever_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(30, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    maps = torch.from_numpy(warps_of(30, 28, 28, RebalanceTable(), STREAMS, 3))
    together = warp(images, maps)
    monkeypatch.setattr("fedmpi.data.augmentation.IMAGES_AT_ONCE", 7)
    assert torch.equal(together, warp(images, maps))
    assert torch.equal(together[11:12], warp(images[11:12], maps[11:12]))
    assert not torch.equal(together, images)


def test_images_are_warped_a_little_by_default() -> None:
    warps = RebalanceTable()
    assert (warps.rotation, warps.shear, warps.shift, warps.zoom) == (15, 10, 0.1, 0.1)


def test_text_is_rejected() -> None:
    with pytest.raises(UserError, match="copies of images.*'text'"):
        check_images(DataDescription((30,), "int32", 4, "text", 1000, (), ()))


# Samples and their copies


@pytest.fixture(scope="module")
def digits() -> ShardStore:
    return open_store("digits:clients=30,alpha=0.3")


def test_rows_are_the_same_however_they_are_read(digits: ShardStore) -> None:
    rebalancing = rebalance(digits.class_counts(), 0.67, "ratio", STREAMS)
    store = AugmentedStore(digits, rebalancing, STREAMS, RebalanceTable())
    keeping, reading = (ClientData(store, resident_bytes=budget) for budget in (1 << 20, 0))
    offsets, generator = store.offsets, np.random.default_rng(0)
    asked = {client: generator.permutation(int(store.sizes[client]))[:7] for client in (4, 2, 9)}
    asked[3] = np.arange(store.sizes[3])
    keeping.load(4)
    positions = np.concatenate([offsets[client] + rows for client, rows in asked.items()])
    for data in (keeping, reading):
        parts = [data.load(client, rows) for client, rows in asked.items()]
        for together, some in zip(data.load_positions(positions), zip(*parts, strict=True), strict=True):
            assert torch.equal(together, torch.cat(some))
    assert torch.equal(reading.load(4)[0][torch.from_numpy(asked[4])], reading.load(4, asked[4])[0])


def image_folder(folder: Path) -> Path:
    """Eight named clients with random images of 3 x 6 x 7 in four unequal classes, two shards."""
    generator = np.random.default_rng(2)
    y = generator.choice(4, 160, p=[0.05, 0.15, 0.3, 0.5])
    x = generator.integers(0, 256, (160, 3, 6, 7)).astype(np.uint8)
    owner = np.repeat(list("abcdefgh"), [5, 25, 20, 20, 20, 30, 5, 35])
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.2)
    return fedmpi.ClientArrays(x, y, owner, test=(x[:9], y[:9]), mean=mean, std=std).save(folder, shards=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Such a folder, and the same with copies (seed 0)."""
    folder = tmp_path_factory.mktemp("shards")
    write_augmented(image_folder(folder / "plain"), folder / "augmented", RebalanceTable(alpha=ALPHA))
    return folder / "plain", folder / "augmented"


def test_stored_copies_are_those_made_on_the_fly(folders: tuple[Path, Path]) -> None:
    plain, stored_store = (open_folder(folder) for folder in folders)
    result = rebalance(plain.class_counts(), ALPHA, "ratio", Streams(0))
    virtual, stored = ClientData(AugmentedStore(plain, result, Streams(0), RebalanceTable())), ClientData(stored_store)
    np.testing.assert_array_equal(stored_store.class_counts(), result.class_counts)
    assert result.overhead == pytest.approx(result.added.sum() / plain.samples)
    assert stored_store.samples == plain.samples + result.added.sum() > plain.samples
    assert stored_store.client_ids.tolist() == plain.client_ids.tolist()
    for client in range(8):
        for ours, theirs in zip(stored.load(client), virtual.load(client), strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(stored.test()[0], virtual.test()[0])


# Runs


def settings(folder: Path, *more: str) -> list[str]:
    return ["preset=astraea", "clients.count=4", "topology.clients_per_mediator=2", f"data.source={folder}", *more]


@pytest.mark.parametrize("weights", ["augmented", "original"])
def test_a_run_on_stored_copies_is_the_run_on_virtual_ones(folders: tuple[Path, Path], weights: str) -> None:
    plain, augmented = folders
    more = f"rebalance.weights={weights}"
    virtual = run(*SMALL, *settings(plain, more))
    stored = run(*SMALL, *settings(augmented, more, "rebalance.mode=stored"))
    assert torch.equal(virtual.model, stored.model)
    same = ("train_loss", "samples", "kl_mediators", "kl_client_mean", "kl_client_before_mean", "bytes_client_up")
    for one, other in zip(virtual.records, stored.records, strict=True):
        assert [one[key] for key in same] == [other[key] for key in same]
    one, other = virtual.summary["rebalancing"], stored.summary["rebalancing"]
    assert one["stored_bytes"] == 0 and other["stored_bytes"] == one["bytes"] == one["copies"] * (3 * 6 * 7 + 8) > 0
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
