"""The shard writer: faithful, byte-identical, whole or absent, careful with folders."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep.writer as writer
from data_prep.holdout import balanced_rows, hold_out_validation
from data_prep.partitions import Partition
from data_prep.raw import RawDataset, measure
from data_prep.writer import write_shards
from fedmpi import UserError
from fedmpi.common.apportionment import offsets_of
from fedmpi.common.files import LOCK
from fedmpi.common.streams import Purpose, Streams
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST, PREPARING
from tests.data.conftest import validation_of
from tests.data_prep.command import drawn

ROWS, CLASSES = 500, 10
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 1, 4, 4), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(0, CLASSES, ROWS)
RAW = RawDataset(
    "pictures", "image", CLASSES, tuple("abcdefghij"), (1, 4, 4), "uint8", lambda rows: IMAGES[rows], LABELS,
    np.arange(ROWS), np.arange(40), (0.5,), (0.3,), skipped=2,
)  # fmt: skip


def made_of(name: str = "dirichlet", clients: int = 23, **options: float) -> Partition:
    options = options or {"alpha": 0.3} if name == "dirichlet" else options
    return drawn(name, LABELS, CLASSES, clients, Streams(0).generator(Purpose.PARTITION), **options)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_what_is_written_is_what_was_partitioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", 7 * 16)  # many chunks, each read front to back
    made = made_of()

    def read(rows: np.ndarray) -> np.ndarray:
        assert len(rows) <= 7 and (np.diff(rows) > 0).all()
        return IMAGES[rows]

    raw = replace(RAW, read=read)
    manifest = write_shards(raw, made, tmp_path / "out", 4, 0, "the command")
    store = open_store(tmp_path / "out", verify=True)
    assert json.dumps(store.manifest.as_dict(), indent=1) + "\n" == (tmp_path / "out" / MANIFEST).read_text()
    for client in range(made.clients):
        rows = made.rows[made.offsets[client] : made.offsets[client + 1]]
        x, y = store.client(client)
        np.testing.assert_array_equal(x, IMAGES[rows])
        np.testing.assert_array_equal(y, LABELS[rows])
    assert manifest.command == "the command" and manifest.skipped == 2 and manifest.dropped == 0
    assert manifest.partition_options["alpha"] == 0.3 and manifest.seed == 0
    np.testing.assert_array_equal(store.test()[0], IMAGES[:40])


def test_the_stored_types_are_the_smallest_faithful_ones(tmp_path: Path) -> None:
    write_shards(RAW, made_of("iid", 1), tmp_path / "out", 1, 0, "c")
    with h5py.File(tmp_path / "out" / "train-00000.h5") as h5:
        assert (h5["x"].dtype, h5["y"].dtype, h5["class_counts"].dtype) == (np.uint8, np.uint8, np.uint8)
        assert h5["class_counts"][:].max() > 40 and all(h5[name].chunks is None for name in h5)
    raw = replace(RAW, y=np.zeros(ROWS, np.int64))
    write_shards(raw, Partition(np.arange(ROWS), np.array([0, ROWS]), "given", {}), tmp_path / "big", 1, 0, "c")
    with h5py.File(tmp_path / "big" / "train-00000.h5") as h5:
        assert h5["class_counts"].dtype == np.uint16 and h5["class_counts"][0, 0] == ROWS


def test_user_names_words_and_further_arrays_are_stored_beside(tmp_path: Path) -> None:
    names = tuple(f"usér{i}" for i in range(50))
    tokens = np.arange(ROWS * 3, dtype=np.int32).reshape(ROWS, 3) % 5
    vectors = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    raw = replace(
        RAW, task="text", feature_shape=(3,), dtype="int32", mean=(), std=(), read=lambda rows: tokens[rows],
        users=np.arange(ROWS) % 50, user_names=names,
        vocabulary=("<pad>", "<unk>", "été", "b", "c"), vectors=vectors, extras={"more": vectors[:2]},
    )  # fmt: skip
    made = drawn("user", LABELS, CLASSES, 20, Streams(0).generator(Purpose.PARTITION), raw.users)
    write_shards(raw, made, tmp_path / "out", 3, 0, "c")
    store = open_store(tmp_path / "out", verify=True)
    assert made.users is not None and store.client_ids.tolist() == [names[user] for user in made.users]
    assert store.vocabulary == raw.vocabulary and store.description.vocabulary == 5
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "vectors.npy"), vectors)
    np.testing.assert_array_equal(store.extras["more"], vectors[:2])
    x, _ = store.client(0)
    np.testing.assert_array_equal(x, tokens[made.rows[: made.sizes[0]]])


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.floats(0, 0.99), st.integers(0, 2**32))
def test_holding_out_splits_without_loss(sizes, fraction, seed) -> None:
    rows, offsets = np.random.default_rng(0).permutation(sum(sizes)), offsets_of(np.array(sizes))
    kept, kept_offsets, held, held_offsets = hold_out_validation(rows, offsets, fraction, np.random.default_rng(seed))
    assert sorted([*kept, *held]) == sorted(rows) and kept_offsets[-1] == len(kept) and held_offsets[-1] == len(held)
    assert ((np.diff(kept_offsets) > 0) == (np.array(sizes) > 0)).all()
    for client in range(len(sizes)):
        parts = kept[slice(*kept_offsets[client : client + 2])], held[slice(*held_offsets[client : client + 2])]
        assert sorted(np.concatenate(parts)) == sorted(rows[slice(*offsets[client : client + 2])])


def test_validation_samples_know_their_clients(tmp_path: Path) -> None:
    made = made_of("lognormal", 40, mean=3.0)
    manifest = write_shards(RAW, made, tmp_path / "out", 3, 0, "c", val_fraction=0.25)
    store = open_store(tmp_path / "out", verify=True)
    offsets = store.validation_offsets
    assert store.sizes.min() >= 1 and (np.abs(store.sizes - 0.75 * made.sizes) <= 1).all()
    dropped = ROWS - len(made.rows)  # rows that are held out are not left out by the partition
    assert manifest.dropped == dropped and store.samples + store.part_samples("val") + dropped == ROWS > dropped > 0
    assert manifest.val is not None and manifest.val.clients == made.clients and offsets is not None
    for client in range(made.clients):
        part = validation_of(store, client)
        assert len(part[1]) == offsets[client + 1] - offsets[client]
        images, labels = (np.concatenate(pair) for pair in zip(part, store.client(client), strict=True))
        mine = made.rows[made.offsets[client] : made.offsets[client + 1]]
        assert sorted(map(bytes, images)) == sorted(map(bytes, IMAGES[mine]))
        assert sorted(labels) == sorted(LABELS[mine])
    with h5py.File(tmp_path / "out" / "val.h5") as h5:
        assert h5["client_ids"][:].tolist() == store.client_ids.tolist()


def test_normalization_is_that_of_the_rows_left_for_training(tmp_path: Path) -> None:
    vectors = np.random.default_rng(3).normal(5, 2, (ROWS, 6)).astype(np.float32)
    raw = replace(
        RAW, task="vector", feature_shape=(6,), dtype="float32", mean=(), std=(), read=lambda rows: vectors[rows],
        fit=measure,
    )  # fmt: skip
    mean = raw.fitted().mean
    assert mean == pytest.approx(vectors.mean(0, dtype=float), abs=1e-12)
    write_shards(raw, made_of(), tmp_path / "plain", 2, 0, "c")
    assert open_store(tmp_path / "plain").description.mean == pytest.approx(mean, abs=1e-12)
    write_shards(raw, made_of(), tmp_path / "out", 2, 0, "c", val_fraction=0.5)
    store = open_store(tmp_path / "out")
    left = np.concatenate([store.client(client)[0] for client in range(store.clients)]).astype(float)
    assert store.description.mean == pytest.approx(left.mean(0), abs=1e-12)
    assert store.description.std == pytest.approx(left.std(0), abs=1e-9) and store.description.mean != mean


def test_a_balanced_test_part_has_equal_class_totals(tmp_path: Path) -> None:
    assert balanced_rows(np.array([0, 1, 1, 1, 0, 3]), 4).tolist() == [0, 1, 5]
    made = made_of("astraea", 10, variant="LTRF2")  # type: ignore[arg-type]
    write_shards(replace(RAW, test=np.arange(ROWS)), made, tmp_path / "out", 2, 0, "c")
    totals = np.bincount(open_store(tmp_path / "out").test()[1], minlength=CLASSES)
    assert np.ptp(totals) == 0 and totals[0] == np.bincount(LABELS).min()
    fewer = made_of("astraea", 10, variant="LTRF2", test_total=2 * CLASSES)  # type: ignore[arg-type]
    write_shards(replace(RAW, test=np.arange(ROWS)), fewer, tmp_path / "fewer", 2, 0, "c")
    assert np.bincount(open_store(tmp_path / "fewer").test()[1]).tolist() == [2] * CLASSES


def test_a_preparation_that_fails_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    out, calls = tmp_path / "out", 0

    def failing(rows: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return IMAGES[rows]

    with pytest.raises(KeyboardInterrupt):
        write_shards(replace(RAW, read=failing), made_of(), out, 4, 0, "c")
    assert not list(out.iterdir())
    (out / PREPARING).touch()
    (out / "train-00002.h5").write_bytes(b"left by a process that was killed")
    with pytest.raises(UserError, match="interrupted"):
        open_store(out)
    write_shards(RAW, made_of(), out, 2, 0, "c")
    assert set(digests(out)) == {MANIFEST, "test.h5", "train-00000.h5", "train-00001.h5"}
    assert open_store(out, verify=True).samples == ROWS


def test_two_preparations_never_write_to_one_folder_at_once(tmp_path: Path) -> None:
    out, refused = tmp_path / "out", []

    def meanwhile(rows: np.ndarray) -> np.ndarray:
        if not refused:
            with pytest.raises(UserError, match=rf"in use by process {os.getpid()} ") as error:
                write_shards(RAW, made_of(), out, 4, 1, "another", overwrite=True)
            refused.append(error)
        return IMAGES[rows]

    write_shards(replace(RAW, read=meanwhile), made_of(), out, 2, 0, "c")
    assert refused and open_store(out, verify=True).manifest.command == "c"
    assert not (out / LOCK).exists()
    write_shards(RAW, made_of(), out, 2, 0, "c", overwrite=True)


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "train-00000.h5").write_text("somebody's")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds something else"):
            write_shards(RAW, made_of(), tmp_path, 2, 0, "c", overwrite=overwrite)
    assert (tmp_path / "train-00000.h5").read_text() == "somebody's" and len(list(tmp_path.iterdir())) == 1
    write_shards(RAW, made_of(), tmp_path / "out", 5, 0, "c")
    (tmp_path / "out" / "my notes.txt").write_text("mine")
    write_shards(RAW, made_of(), tmp_path / "out", 2, 0, "c", overwrite=True)
    assert len(open_store(tmp_path / "out", verify=True).shard_starts) == 3
    assert (tmp_path / "out" / "my notes.txt").exists() and not (tmp_path / "out" / "train-00004.h5").exists()


@pytest.mark.parametrize(
    ("raw", "arguments", "words"),
    [
        (replace(RAW, y=LABELS + 1), {}, "training targets .* 10, none of the 10 classes"),
        (replace(RAW, task="text"), {}, "vocabulary"),
    ],
)
def test_impossible_arguments_are_rejected_before_anything_is_written(tmp_path, raw, arguments, words) -> None:
    with pytest.raises(UserError, match=words):
        write_shards(raw, made_of(), tmp_path / "out", **{"shards": 2, "seed": 0, "command": "c", **arguments})
    assert not (tmp_path / "out").exists()
