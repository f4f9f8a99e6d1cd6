"""The shard writer: faithful, byte-identical, whole or absent, careful with folders."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep.writer as shard
import data_prep.writer as writer
from data_prep.datasets import DATASETS
from data_prep.holdout import balanced_rows, hold_out_validation
from data_prep.partitions import Partition, partition
from data_prep.raw import RawDataset, ReadOptions, Tally, measured
from data_prep.writer import write_shards
from fedmpi import UserError
from fedmpi.common.apportionment import offsets_of
from fedmpi.common.streams import Purpose, Streams
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST, PREPARING, ShardFile, shard_name
from fedmpi.records.hold import FOLDER, Hold
from tests.mpi.launch import REPOSITORY

ROWS, CLASSES = 500, 10
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 1, 4, 4), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(0, CLASSES, ROWS)
RAW = RawDataset(
    "pictures", "image", CLASSES, tuple("abcdefghij"), (1, 4, 4), "uint8", (0.5,), (0.3,), LABELS, None, None,
    lambda rows: IMAGES[rows], IMAGES[:40], LABELS[:40], 2, "free", "nobody",
)  # fmt: skip


def drawn(name: str = "dirichlet", clients: int = 23, **options: float) -> Partition:
    options = options or {"alpha": 0.3} if name == "dirichlet" else options
    return partition(name, LABELS, CLASSES, clients, Streams(0).generator(Purpose.PARTITION), **options)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_what_is_written_is_what_was_partitioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "CHUNK_BYTES", 7 * 16)  # many chunks
    made = drawn()
    manifest = write_shards(RAW, made, tmp_path / "out", 4, 0, "the command")
    store = open_store(tmp_path / "out", verify=True)
    for client in range(made.clients):
        rows = made.rows[made.offsets[client] : made.offsets[client + 1]]
        x, y = store.client(client)
        np.testing.assert_array_equal(x, IMAGES[rows])
        np.testing.assert_array_equal(y, LABELS[rows])
    assert manifest.command == "the command" and manifest.skipped == 2 and manifest.dropped == 0
    assert manifest.partition_options["alpha"] == 0.3 and manifest.seed == 0
    np.testing.assert_array_equal(store.test()[0], IMAGES[:40])


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_shards(RAW, drawn(), tmp_path / name, 3, 0, "c", val_fraction=0.2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two") and len(digests(tmp_path / "one")) == 6


def test_the_stored_types_are_the_smallest_faithful_ones(tmp_path: Path) -> None:
    write_shards(RAW, drawn("iid", 1), tmp_path / "out", 1, 0, "c")
    with h5py.File(tmp_path / "out" / "train-00000.h5") as h5:
        assert (h5["x"].dtype, h5["y"].dtype, h5["class_counts"].dtype) == (np.uint8, np.uint8, np.uint8)
        assert h5["class_counts"][:].max() > 40 and all(h5[name].chunks is None for name in h5)
    raw = replace(RAW, labels=np.zeros(ROWS, np.int64))
    write_shards(raw, Partition(np.arange(ROWS), np.array([0, ROWS]), "given", {}), tmp_path / "big", 1, 0, "c")
    with h5py.File(tmp_path / "big" / "train-00000.h5") as h5:
        assert h5["class_counts"].dtype == np.uint16 and h5["class_counts"][0, 0] == ROWS


def test_shards_hold_nearly_equal_samples_and_at_least_a_client(tmp_path: Path) -> None:
    manifest = write_shards(RAW, drawn("iid", 100), tmp_path / "out", 7, 0, "c")
    samples = [file.samples for file in manifest.train]
    assert len(samples) == 7 and max(samples) - min(samples) <= 10
    assert len(write_shards(RAW, drawn("iid", 3), tmp_path / "few", 7, 0, "c").train) == 3


def test_user_names_words_and_further_arrays_are_stored_beside(tmp_path: Path) -> None:
    names = tuple(f"usér{i}" for i in range(50))
    tokens = np.arange(ROWS * 3, dtype=np.int32).reshape(ROWS, 3) % 5
    vectors = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    raw = replace(
        RAW, task="text", feature_shape=(3,), dtype="int32", mean=(), std=(), read=lambda rows: tokens[rows],
        test_x=tokens[:40], users=np.arange(ROWS) % 50, user_names=names,
        vocabulary=("<pad>", "<unk>", "été", "b", "c"), vectors=vectors, extras={"more": vectors[:2]},
    )  # fmt: skip
    made = partition("user", LABELS, CLASSES, 20, Streams(0).generator(Purpose.PARTITION), raw.users)
    write_shards(raw, made, tmp_path / "out", 3, 0, "c")
    store = open_store(tmp_path / "out", verify=True)
    assert made.users is not None and store.client_ids.tolist() == [names[user] for user in made.users]
    assert store.vocabulary == raw.vocabulary and store.description.vocabulary == 5
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "vectors.npy"), vectors)
    np.testing.assert_array_equal(store.extras["more"], vectors[:2])
    x, _ = store.client(0)
    np.testing.assert_array_equal(x, tokens[made.rows[: made.sizes[0]]])


def test_validation_takes_its_share_of_every_client_and_empties_none(tmp_path: Path) -> None:
    made = drawn()
    manifest = write_shards(RAW, made, tmp_path / "out", 2, 0, "c", val_fraction=0.25)
    store = open_store(tmp_path / "out")
    x, _ = store.validation() or ((), ())
    kept, _ = store.rows(np.arange(store.samples))
    assert manifest.val is not None and manifest.val.samples == len(x)
    assert len(x) + store.samples == ROWS and abs(len(x) - 125) <= 23
    assert sorted(map(bytes, np.concatenate([x, kept]))) == sorted(map(bytes, IMAGES))
    assert store.sizes.min() >= 1 and (np.abs(store.sizes - 0.75 * made.sizes) <= 1).all()


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


def test_a_validation_part_that_small_clients_leave_too_small_is_reported(tmp_path: Path) -> None:
    """80 clients of one sample and one of 420: half of the 420 are held out, 42 % of all."""
    small = Partition(np.arange(ROWS), offsets_of(np.array([1] * 80 + [420])), "iid", {}, notes=("drawn",))
    notes = write_shards(RAW, small, tmp_path / "small", 2, 0, "c", val_fraction=0.5).notes
    note = "the validation part is 42.0% of the samples, not 50.0%: every client keeps a sample to train on"
    assert notes[:2] == (note, "drawn")
    for number, fraction in enumerate((0.0, 0.5)):
        made = write_shards(RAW, drawn("iid", 5), tmp_path / f"{number}", 2, 0, "c", val_fraction=fraction)
        assert not any("validation part is" in text for text in made.notes)


def test_validation_samples_know_their_clients(tmp_path: Path) -> None:
    made = drawn()
    manifest = write_shards(RAW, made, tmp_path / "out", 3, 0, "c", val_fraction=0.25)
    store = open_store(tmp_path / "out", verify=True)
    offsets = store.validation_offsets
    assert manifest.val is not None and manifest.val.clients == made.clients and offsets is not None
    for client in range(made.clients):
        part = store.validation_of(client)
        assert part is not None and len(part[1]) == offsets[client + 1] - offsets[client]
        images, labels = (np.concatenate(pair) for pair in zip(part, store.client(client), strict=True))
        mine = made.rows[made.offsets[client] : made.offsets[client + 1]]
        assert sorted(map(bytes, images)) == sorted(map(bytes, IMAGES[mine]))
        assert sorted(labels) == sorted(LABELS[mine])
    with h5py.File(tmp_path / "out" / "val.h5") as h5:
        assert h5["client_ids"][:].tolist() == store.client_ids.tolist()


def rewrite_validation(folder: Path, offsets: np.ndarray | None) -> None:
    """val.h5 with other offsets, or, as older versions wrote it, without any."""
    path = folder / "val.h5"
    with h5py.File(path, "a") as h5:
        del h5["offsets"]
        if offsets is not None:
            h5["offsets"] = offsets
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["val"] |= {"bytes": path.stat().st_size, "clients": 0}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_validation_part_that_does_not_know_its_clients_stays_readable(tmp_path: Path) -> None:
    write_shards(RAW, drawn(), tmp_path / "out", 3, 0, "c", val_fraction=0.25)
    rewrite_validation(tmp_path / "out", None)
    store = open_store(tmp_path / "out")
    assert store.validation_offsets is None and store.validation_of(0) is None
    part = store.validation()
    assert part is not None and len(part[1]) == store.part_samples("val") > 0


def test_validation_offsets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_shards(RAW, drawn(), tmp_path / "out", 3, 0, "c", val_fraction=0.25)
    right = open_store(tmp_path / "out").validation_offsets
    assert right is not None
    back = right.copy()
    back[1], back[2] = right[-1], 0
    for wrong in (right[:-1], right + 1, np.append(right[:-1], right[-1] + 1), back):
        rewrite_validation(tmp_path / "out", wrong)
        said = "do not describe its" if len(wrong) == len(right) else r"is int64 \(\d+,\) but the manifest says"
        with pytest.raises(UserError, match=rf"val.h5 {said}"):
            _ = open_store(tmp_path / "out").validation_offsets


@pytest.mark.parametrize(("law", "clients", "options"), [("dirichlet", 23, {}), ("lognormal", 40, {"mean": 3.0})])
def test_rows_held_out_are_not_counted_as_left_out_by_the_partition(tmp_path: Path, law, clients, options) -> None:
    made = drawn(law, clients, **options)
    plain = write_shards(RAW, made, tmp_path / "plain", 2, 0, "c")
    manifest = write_shards(RAW, made, tmp_path / "out", 2, 0, "c", val_fraction=0.25)
    assert manifest.val is not None and manifest.val.samples > 10
    assert manifest.dropped == plain.dropped == ROWS - len(made.rows)
    assert manifest.samples + manifest.val.samples + manifest.dropped == ROWS


def test_normalization_is_that_of_the_rows_left_for_training(tmp_path: Path) -> None:
    vectors = np.random.default_rng(3).normal(5, 2, (ROWS, 6)).astype(np.float32)
    raw = measured(
        replace(
            RAW, task="vector", feature_shape=(6,), dtype="float32", mean=(), std=(), read=lambda rows: vectors[rows],
            test_x=vectors[:40],
        )
    )  # fmt: skip
    assert raw.mean == pytest.approx(vectors.mean(0, dtype=float), abs=1e-12)
    write_shards(raw, drawn(), tmp_path / "plain", 2, 0, "c")
    assert open_store(tmp_path / "plain").description.mean == pytest.approx(raw.mean, abs=1e-12)
    write_shards(raw, drawn(), tmp_path / "out", 2, 0, "c", val_fraction=0.5)
    store = open_store(tmp_path / "out")
    left = np.concatenate([store.client(client)[0] for client in range(store.clients)]).astype(float)
    assert store.description.mean == pytest.approx(left.mean(0), abs=1e-12)
    assert store.description.std == pytest.approx(left.std(0), abs=1e-9) and store.description.mean != raw.mean


def test_rows_that_the_partition_leaves_out_still_count_for_the_normalization(tmp_path: Path) -> None:
    """Without validation it is that of the whole training part, and validation takes only its own rows away."""
    raw = measured(RAW)
    write_shards(raw, drawn("lognormal", 40, mean=3.0), tmp_path / "out", 2, 0, "c", val_fraction=0.4)
    store = open_store(tmp_path / "out")
    part = store.validation()
    assert part is not None
    expected = (IMAGES.sum(dtype=float) - part[0].sum(dtype=float)) / 255 / (16 * (ROWS - len(part[0])))
    assert store.description.mean == pytest.approx((expected,), abs=1e-12)


def test_the_vocabulary_is_that_of_the_rows_left_for_training(tmp_path: Path) -> None:
    rows = "".join(f'"{4 * (row % 2)}","1","d","q","u{row % 7}","word{row} everywhere"\n' for row in range(140))
    (tmp_path / "training.csv").write_text(rows)
    (tmp_path / "testdata.csv").write_text('"0","1","d","q","v","word3 everywhere"\n')
    (tmp_path / "vectors.txt").write_text("".join(f"word{row} {row} 1\n" for row in range(140)))
    options = ReadOptions(length=3, vectors=tmp_path / "vectors.txt")
    raw = DATASETS["sentiment140"].read(tmp_path, options, Tally())
    made = partition("user", raw.labels, 2, None, Streams(0).generator(Purpose.PARTITION), raw.users)
    write_shards(raw, made, tmp_path / "out", 2, 0, "c", val_fraction=0.5)
    store = open_store(tmp_path / "out")
    words, (held, _) = store.vocabulary, store.validation() or ((), ())
    assert len(raw.vocabulary) == 2 + 141 and len(words) == 2 + 1 + store.samples == store.description.vocabulary
    x, _ = store.rows(np.arange(store.samples))
    assert {words[code] for code in x[:, 0]} == set(words) - {"<pad>", "<unk>", "everywhere"}
    assert len(held) > 60 and (held[:, 0] == 1).all() and {words[code] for code in held[:, 1]} == {"everywhere"}
    vectors = np.load(tmp_path / "out" / "vectors.npy")
    assert [f"word{number:g}" for number in vectors[2:, 0] if number][:5] == [w for w in words[2:] if w[-1] != "e"][:5]


def test_a_balanced_test_part_has_equal_class_totals(tmp_path: Path) -> None:
    assert balanced_rows(np.array([0, 1, 1, 1, 0, 3]), 4).tolist() == [0, 1, 5]
    made = drawn("astraea", 10, variant="LTRF2")  # type: ignore[arg-type]
    write_shards(replace(RAW, test_x=IMAGES, test_y=LABELS), made, tmp_path / "out", 2, 0, "c")
    totals = np.bincount(open_store(tmp_path / "out").test()[1], minlength=CLASSES)
    assert np.ptp(totals) == 0 and totals[0] == np.bincount(LABELS).min()
    fewer = drawn("astraea", 10, variant="LTRF2", test_total=2 * CLASSES)  # type: ignore[arg-type]
    write_shards(replace(RAW, test_x=IMAGES, test_y=LABELS), fewer, tmp_path / "fewer", 2, 0, "c")
    assert np.bincount(open_store(tmp_path / "fewer").test()[1]).tolist() == [2] * CLASSES


def test_an_interrupted_preparation_leaves_no_manifest_and_can_be_repeated(tmp_path: Path) -> None:
    out, calls = tmp_path / "out", 0

    def failing(rows: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return IMAGES[rows]

    with pytest.raises(KeyboardInterrupt):
        write_shards(replace(RAW, read=failing), drawn(), out, 4, 0, "c")
    assert {path.name for path in out.iterdir()} == {PREPARING, "train-00000.h5", "train-00001.h5"}
    with pytest.raises(UserError, match="interrupted"):
        open_store(out)
    (out / "train-00002.h5.partial").write_bytes(b"left by a process that was killed")
    write_shards(RAW, drawn(), out, 2, 0, "c")
    assert set(digests(out)) == {MANIFEST, "test.h5", "train-00000.h5", "train-00001.h5"}
    assert open_store(out, verify=True).samples == ROWS


@pytest.mark.parametrize("file", ["train-00001.h5", "val.h5", "test.h5"])
def test_what_is_ended_between_filling_a_file_and_completing_it_leaves_nothing_half_done(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, complete = shard._fill_shard, shard.complete

    def end_at(name: str) -> None:
        if name == file:
            raise KeyboardInterrupt

    def filled(plan: shard.ShardPlan, index: int, *others: Any) -> Any:
        hashes = fill(plan, index, *others)
        end_at(shard_name(index))
        return hashes

    def completed(path: Path, *others: int, **more: int) -> ShardFile:
        end_at(path.name)
        return complete(path, *others, **more)

    monkeypatch.setattr(shard, "_fill_shard", filled)
    for module in (shard, writer):
        monkeypatch.setattr(module, "complete", completed)
    with pytest.raises(KeyboardInterrupt):
        write_shards(RAW, drawn(), tmp_path / "out", 4, 0, "c", val_fraction=0.2)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert "train-00000.h5" in left and not any(file in name for name in left)


def test_a_prepared_folder_is_kept_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_shards(RAW, drawn(), out, 5, 0, "c")
    before = digests(out)
    with pytest.raises(UserError, match="--overwrite"):
        write_shards(RAW, drawn(), out, 2, 0, "c")
    assert digests(out) == before
    (out / "my notes.txt").write_text("mine")
    write_shards(RAW, drawn(), out, 2, 0, "c", overwrite=True)
    assert len(open_store(out, verify=True).shard_starts) == 3 and (out / "my notes.txt").exists()
    assert not (out / "train-00004.h5").exists()


def test_two_preparations_never_write_to_one_folder_at_once(tmp_path: Path) -> None:
    out, refused = tmp_path / "out", []

    def meanwhile(rows: np.ndarray) -> np.ndarray:
        for overwrite in (False, True):
            with pytest.raises(UserError, match=rf"in use by process {os.getpid()} ") as error:
                write_shards(RAW, drawn(), out, 4, 1, "another", overwrite=overwrite)
            refused.append(error)
        return IMAGES[rows]

    write_shards(replace(RAW, read=meanwhile), drawn(), out, 2, 0, "c")
    assert refused and open_store(out, verify=True).manifest.command == "c"
    assert not (out / FOLDER).exists()
    write_shards(RAW, drawn(), out, 2, 0, "c", overwrite=True)


def test_a_folder_that_was_prepared_since_it_was_looked_at_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: Path) -> Hold:
        monkeypatch.setattr("data_prep.output.Hold", Hold)
        write_shards(RAW, drawn(), folder, 2, 0, "the first")
        return Hold(folder)

    monkeypatch.setattr("data_prep.output.Hold", late)
    with pytest.raises(UserError, match="holds a prepared data set already"):
        write_shards(RAW, drawn(), tmp_path / "out", 2, 0, "the second")
    assert open_store(tmp_path / "out", verify=True).manifest.command == "the first"
    assert not (tmp_path / "out" / FOLDER).exists()


def test_the_folder_of_a_preparation_that_was_killed_can_be_taken(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = "import os, sys; from data_prep.output import claim; kept = claim(Path(sys.argv[1]), False); os._exit(9)"
    words = [sys.executable, "-c", f"from pathlib import Path; {program}", str(out)]
    assert subprocess.run(words, cwd=REPOSITORY).returncode == 9
    assert {path.name for path in out.iterdir()} == {FOLDER, PREPARING}
    write_shards(RAW, drawn(), out, 2, 0, "c")
    assert set(digests(out)) == {MANIFEST, "test.h5", "train-00000.h5", "train-00001.h5"}


def test_a_preparation_that_lost_its_folder_writes_no_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def losing(rows: np.ndarray) -> np.ndarray:
        (out / FOLDER).unlink(missing_ok=True)
        return IMAGES[rows]

    with pytest.raises(UserError, match="was removed"):
        write_shards(replace(RAW, read=losing), drawn(), out, 2, 0, "c")
    assert not (out / MANIFEST).exists()


def test_a_folder_that_holds_something_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "train-00000.h5").write_text("somebody's")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds something else"):
            write_shards(RAW, drawn(), tmp_path, 2, 0, "c", overwrite=overwrite)
    assert (tmp_path / "train-00000.h5").read_text() == "somebody's" and len(list(tmp_path.iterdir())) == 1


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="--out"):
        write_shards(RAW, drawn(), tmp_path / "out", 2, 0, "c")


@pytest.mark.parametrize(
    ("raw", "arguments", "words"),
    [
        (RAW, {"shards": 0}, "--shards"),
        (RAW, {"val_fraction": 1.0}, "--val"),
        (replace(RAW, test_y=np.full(40, 10)), {}, "test labels from 10 to 10"),
        (replace(RAW, task="text"), {}, "vocabulary"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_written(tmp_path, raw, arguments, words) -> None:
    with pytest.raises(UserError, match=words):
        write_shards(raw, drawn(), tmp_path / "out", **{"shards": 2, "seed": 0, "command": "c", **arguments})
    assert not (tmp_path / "out").exists()


def test_progress_counts_bytes_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_shards(RAW, drawn(), tmp_path / "out", 3, 0, "c", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (ROWS * 16, ROWS * 16) and len(seen) == 3 and seen == sorted(seen)


def test_the_source_is_read_in_bounded_chunks_front_to_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "CHUNK_BYTES", 100 * 16)
    asked: list[np.ndarray] = []

    def read(rows: np.ndarray) -> np.ndarray:
        asked.append(rows)
        return IMAGES[rows]

    write_shards(replace(RAW, read=read), drawn(), tmp_path / "out", 1, 0, "c")
    assert all(len(rows) <= 100 and (np.diff(rows) > 0).all() for rows in asked)
