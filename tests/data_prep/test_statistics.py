"""What data_prep reports of a partition agrees with what fedmpi inspect finds in the shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.partitions import base, class_count_blocks, partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi.common.streams import Purpose, Streams
from fedmpi.describe.data import inspect_folder, measure

LABELS = np.random.default_rng(0).integers(0, 7, 900)


def test_the_report_before_writing_equals_the_inspection_after(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(base, "CELLS", 50)  # many blocks
    made = partition("dirichlet", LABELS, 7, 40, Streams(0).generator(Purpose.PARTITION), alpha=0.2)
    x = np.zeros((900, 2), np.float32)
    raw = RawDataset(
        "v", "vector", 7, tuple("abcdefg"), (2,), "float32", (), (), LABELS, None, None,
        lambda rows: x[rows], x[:7], LABELS[:7], 0, "", "",
    )  # fmt: skip
    write_shards(raw, made, tmp_path / "out", 3, 0, "c")
    before = measure(made.sizes, lambda: class_count_blocks(made, LABELS, 7))
    after = inspect_folder(tmp_path / "out").measures
    for name in ("clients", "samples", "size_quartiles", "classes_per_client"):
        assert getattr(before, name) == getattr(after, name)
    for name in ("gini", "kl_to_global", "kl_to_uniform", "label_emd"):
        np.testing.assert_allclose(getattr(before, name), getattr(after, name))
    np.testing.assert_array_equal(before.class_totals, np.bincount(LABELS))


def test_blocks_count_every_row_once() -> None:
    made = partition("iid", LABELS, 7, 13, Streams(0).generator(Purpose.PARTITION))
    counts = np.concatenate(list(class_count_blocks(made, LABELS, 7)))
    assert counts.shape == (13, 7)
    np.testing.assert_array_equal(counts.sum(axis=1), made.sizes)
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(LABELS))
