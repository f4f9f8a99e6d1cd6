"""Augmented copies: what the warp does to an image, and that copies made on the fly and stored ones are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.augment import augment, write_augmented
from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi import UserError
from fedmpi.common.streams import Streams
from fedmpi.data.augmentation import AugmentedStore, WarpRanges, rebalance, source_rows, warp, warps_of
from fedmpi.data.opening import open_store
from fedmpi.data.shards import ShardStore, open_folder
from fedmpi.data.source import ClientData

STREAMS = Streams(5)
NONE = WarpRanges(0, 0, 0, 0)


@pytest.fixture(scope="module")
def digits() -> ShardStore:
    return open_store("digits:clients=30,alpha=0.3")


def augmented(store: ShardStore, resident_bytes: int = 0, ranges: WarpRanges | None = None) -> ClientData:
    rebalancing = rebalance(store.class_counts(), 0.67, "ratio", STREAMS)
    return ClientData(AugmentedStore(store, rebalancing, STREAMS, ranges), resident_bytes=resident_bytes)


def one_map(**ranges: float) -> np.ndarray:
    """The first map of a client whose ranges are all zero but the given ones, for images of 10 x 20 pixels."""
    zero = {"rotation": 0.0, "shear": 0.0, "shift": 0.0, "zoom": 0.0}
    return warps_of(1, 10, 20, WarpRanges(**{**zero, **ranges}), STREAMS, 0)[0]


def drawn() -> np.ndarray:
    """The six numbers in [-1, 1) behind `one_map`: rotation, shear, two zooms, two shifts."""
    from fedmpi.common.streams import Purpose

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


def test_outside_an_image_its_border_is_repeated() -> None:
    images = torch.full((1, 1, 6, 6), 77, dtype=torch.uint8)
    assert torch.equal(warp(images, torch.tensor([[[3.0, 0, 1.5], [0, 3.0, -1.5]]])), images)


def test_each_image_has_its_own_warp_whatever_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(30, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    maps = torch.from_numpy(warps_of(30, 28, 28, WarpRanges(), STREAMS, 3))
    together = warp(images, maps)
    monkeypatch.setattr("fedmpi.data.augmentation.IMAGES_AT_ONCE", 7)
    assert torch.equal(together, warp(images, maps))
    assert torch.equal(together[11:12], warp(images[11:12], maps[11:12]))
    assert not torch.equal(together, images)


def test_stored_samples_come_first_and_copies_keep_their_label(digits: ShardStore) -> None:
    data, plain = augmented(digits), ClientData(digits)
    result = rebalance(digits.class_counts(), 0.67, "ratio", STREAMS)
    assert result.added.sum() > 0
    for client in range(digits.clients):
        x, y = data.load(client)
        own_x, own_y = plain.load(client)
        assert torch.equal(x[: len(own_y)], own_x) and torch.equal(y[: len(own_y)], own_y)
        assert len(y) == data.sizes[client]
        np.testing.assert_array_equal(np.bincount(y.numpy(), minlength=10), result.class_counts[client])


def test_unwarped_copies_are_their_originals(digits: ShardStore) -> None:
    data, result = augmented(digits, ranges=NONE), rebalance(digits.class_counts(), 0.67, "ratio", STREAMS)
    client = int(result.added.argmax())
    x, y = data.load(client)
    n = int(digits.sizes[client])
    rows = torch.from_numpy(source_rows(y[:n].numpy(), result.copies, STREAMS, client))
    assert torch.equal(x[n:], x[rows])


@pytest.mark.parametrize("resident_bytes", [0, 1 << 20])
def test_rows_are_the_same_however_they_are_read(digits: ShardStore, resident_bytes: int) -> None:
    data, reference = augmented(digits, resident_bytes), augmented(digits)
    data.load(4)
    generator = np.random.default_rng(0)
    rows = [generator.permutation(int(data.sizes[client]))[:7] for client in (4, 2, 9)]
    offsets = np.cumsum(np.concatenate(([0], data.sizes)))
    every = np.arange(offsets[2], offsets[3])
    x, y = data.load_positions(np.concatenate((offsets[4] + rows[0], every, offsets[9] + rows[2])))
    parts = [data.load(4, rows[0]), data.load(2), data.load(9, rows[2])]
    assert torch.equal(x, torch.cat([part[0] for part in parts]))
    assert torch.equal(y, torch.cat([part[1] for part in parts]))
    assert torch.equal(data.load_positions(offsets[9] + rows[2])[0], reference.load(9, rows[2])[0])
    assert torch.equal(reference.load(4)[0][torch.from_numpy(rows[0])], parts[0][0])


def image_folder(tmp_path: Path, names: tuple[str, ...] | None = None, val: float = 0.0) -> Path:
    """Eight clients with random images of 3 x 6 x 7 in four unequal classes, two shards."""
    generator = np.random.default_rng(2)
    labels = generator.choice(4, 160, p=[0.05, 0.15, 0.3, 0.5])
    images = generator.integers(0, 256, (160, 3, 6, 7)).astype(np.uint8)
    raw = RawDataset(
        name="noise", task="image", classes=4, class_names=tuple("abcd"), feature_shape=(3, 6, 7), dtype="uint8",
        mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.2), labels=labels, users=None, user_names=names,
        read=lambda rows: images[rows], test_x=images[:9], test_y=labels[:9], skipped=0, licence="none",
        citation="none",
    )  # fmt: skip
    offsets = np.array([0, 5, 30, 50, 70, 90, 120, 125, 160])
    partition = Partition(np.arange(160), offsets, "given", {}, users=None if names is None else np.arange(8))
    write_shards(raw, partition, tmp_path / "plain", 2, 0, "made by a test", val_fraction=val)
    return tmp_path / "plain"


@pytest.mark.parametrize("names", [None, tuple("hgfedcba")])
def test_stored_copies_are_those_made_on_the_fly(tmp_path: Path, names: tuple[str, ...] | None) -> None:
    folder = image_folder(tmp_path, names)
    result = write_augmented(folder, tmp_path / "augmented", 0.67, seed=5)
    virtual, stored_store = augmented(open_folder(folder)), open_folder(tmp_path / "augmented")
    stored = ClientData(stored_store)
    np.testing.assert_array_equal(stored.sizes, virtual.sizes)
    np.testing.assert_array_equal(stored_store.class_counts(), result.class_counts)
    added, samples = result.added.sum(), open_folder(folder).samples
    assert result.overhead == pytest.approx(added / samples) and stored_store.samples == samples + added > samples
    assert stored_store.client_ids.tolist() == open_folder(folder).client_ids.tolist()
    for client in range(8):
        for ours, theirs in zip(stored.load(client), virtual.load(client), strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(stored.test()[0], virtual.test()[0])


def test_a_validation_part_is_not_lost_silently(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="validation part"):
        write_augmented(image_folder(tmp_path, val=0.1), tmp_path / "augmented", 0.67)


def test_a_folder_is_not_augmented_into_itself(tmp_path: Path) -> None:
    folder = image_folder(tmp_path)
    with pytest.raises(UserError, match="another --out"):
        write_augmented(folder, tmp_path / "." / "plain", 0.67, overwrite=True)
    assert open_folder(folder).samples == 160


def test_the_command_reports_the_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    augment(image_folder(tmp_path), tmp_path / "augmented", alpha=1.0, copies="ratio-minus-one")
    copies = open_folder(tmp_path / "augmented").samples - 160
    assert f"160 samples and {copies} copies, storage overhead {copies / 160:.1%}" in capsys.readouterr().out


def test_text_is_rejected() -> None:
    from fedmpi.data.augmentation import check_images
    from fedmpi.data.schema import DataDescription

    with pytest.raises(UserError, match="copies of images.*'text'"):
        check_images(DataDescription((30,), "int32", 4, "text", 1000, (), ()))


@pytest.mark.parametrize("wrong", [{"zoom": 1.0}, {"rotation": -1.0}, {"shear": 90.0}])
def test_impossible_ranges_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="warp ranges"):
        WarpRanges(**wrong)
