"""ClientArrays written to shards: a run reads values that are bit-identical to those in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.data.opening import open_store
from tests.data.validation import validation_of

RNG = np.random.default_rng(9)
ROWS = 90


def images(**more: Any) -> fedmpi.ClientArrays:
    x = RNG.integers(0, 256, (ROWS, 1, 6, 6)).astype(np.uint8)
    y, owner = np.arange(ROWS) % 3, np.array([f"c{row * row % 7}" for row in range(ROWS)])
    given: dict[str, Any] = {"test": (x[:12], y[:12]), "name": "squares"}
    return fedmpi.ClientArrays(x, y, owner, **(given | more))


def others() -> dict[str, fedmpi.ClientArrays]:
    """Data of every kind of features and targets."""
    owner = np.arange(ROWS) % 5
    vectors, tokens = RNG.normal(size=(ROWS, 4)), RNG.integers(0, 11, (ROWS, 6))
    after = np.where(RNG.random((ROWS, 6)) < 0.3, -1, RNG.integers(0, 11, (ROWS, 6)))
    several, numbers = RNG.random((ROWS, 3)) < 0.4, RNG.normal(size=(ROWS, 2))
    x, y = images().x[:ROWS], np.arange(ROWS) % 3
    held = (x[:30], y[:30], np.array([f"c{row % 3 + 0}" for row in (0, 1, 2) * 10]))
    made = {
        "images": images(),
        "held out by client": images(val=(held[0], held[1], np.repeat(["c0", "c2"], 15))),
        "held out": images(val=held[:2]),
        "empty clients": fedmpi.ClientArrays(vectors, y, owner, clients=9, test=(vectors, y), mean=2.0, std=0.5),
        "tokens": fedmpi.ClientArrays(tokens, after, owner, test=(tokens, after), task="text", vocabulary=13),
        "labels": fedmpi.ClientArrays(vectors, several, owner, test=(vectors, several)),
        "numbers": fedmpi.ClientArrays(vectors, numbers, owner, test=(vectors, numbers)),
    }
    return made


@pytest.mark.parametrize("kind", list(others()))
def test_a_store_of_the_folder_is_the_store_in_memory(tmp_path: Path, kind: str) -> None:
    arrays = others()[kind]
    memory, disk = arrays.store, open_store(arrays.save(tmp_path / "shards", shards=3), verify=True)
    assert disk.description == memory.description and disk.name == memory.name
    assert disk.manifest.clients == memory.clients and disk.manifest.dropped == 0
    np.testing.assert_array_equal(disk.client_ids, memory.client_ids)
    np.testing.assert_array_equal(disk.sizes, memory.sizes)
    everything = np.arange(memory.samples)
    for ours, theirs in zip(disk.rows(everything), memory.rows(everything), strict=True):
        assert ours.dtype == theirs.dtype or theirs.dtype == np.int64
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(disk.test(), memory.test(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (disk.validation() is None) == (memory.validation() is None)
    if memory.validation() is not None:
        for ours, theirs in zip(disk.validation(), memory.validation(), strict=True):  # type: ignore[arg-type]
            np.testing.assert_array_equal(ours, theirs)
    if arrays.val_offsets is not None:
        for client in range(memory.clients):
            for ours, theirs in zip(validation_of(disk, client), validation_of(memory, client), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    arrays = images()
    arrays.save(tmp_path / "shards")
    with pytest.raises(UserError, match="--overwrite|overwrite"):
        arrays.save(tmp_path / "shards")
    assert arrays.save(tmp_path / "shards", shards=1, overwrite=True) == tmp_path / "shards"
    assert len(open_store(tmp_path / "shards").shard_starts) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(UserError, match="holds something else"):
        arrays.save(tmp_path / "mine")
    with pytest.raises(UserError, match="shards = 0 is impossible"):
        arrays.save(tmp_path / "new", shards=0)
