"""Checkpoints are complete or absent, the newest readable one counts, and only a few are kept."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from fedmpi import UserError
from fedmpi.records.checkpoint import (
    Checkpoint,
    clients_file,
    file_digest,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)


def saved(folder: Path, next_round: int, keep: int = 2) -> Checkpoint:
    tensors = {"model": torch.arange(5.0) + next_round, "server.m": torch.ones(5)}
    checkpoint = Checkpoint(next_round, tensors, {"settled": next_round - 1, "unsettled": {"round": next_round - 1}})
    save_checkpoint(folder, checkpoint, keep)
    return checkpoint


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    written = saved(tmp_path, 7)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.next_round, found.header) == (7, written.header)
    for tensors in (found.tensors, load_file(tmp_path / "round-00000007.safetensors")):  # as other tools read it
        assert all(torch.equal(tensors[name], tensor) for name, tensor in written.tensors.items())


def test_only_the_newest_are_kept_and_vectors_of_clients_as_long_as_their_checkpoint(tmp_path: Path):
    for next_round in (5, 10, 15, 100):
        clients_file(tmp_path, next_round).write_bytes(b"kept")
        saved(tmp_path, next_round)
    kept = [f"{kind}-{number:08d}.safetensors" for kind in ("clients", "round") for number in (15, 100)]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


FLIPS = 120
RICH = {"round": 6, "lr": 0.1, "said": 'a name with "checksum":"' + "0" * 64 + '" and é'}


def rich(folder: Path, next_round: int) -> Path:
    """A checkpoint with tensors of several types and sizes, and a header that could mislead a search for the digest."""
    generator = torch.Generator().manual_seed(next_round)
    tensors = {
        "model": torch.randn(700, generator=generator),
        "server.m": torch.randn(700, generator=generator),
        "strata": torch.arange(40),
        "balance": torch.rand(3, generator=generator, dtype=torch.float64),
        "empty": torch.empty(0),
    }
    return save_checkpoint(folder, Checkpoint(next_round, tensors, {"settled": 6, "unsettled": RICH}), keep=3)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_no_bit_of_a_checkpoint_can_flip_unnoticed(tmp_path: Path):
    """120 places drawn with a fixed seed, all of the length of the header, every 101st of the header."""
    rich(tmp_path, 5)
    newest = rich(tmp_path, 10)
    whole = newest.read_bytes()
    drawn = np.random.default_rng(12).choice(8 * len(whole), FLIPS, replace=False).tolist()
    header = 8 * (8 + int.from_bytes(whole[:8], "little"))
    for bit in [*drawn, *range(64), *range(64, header, 101)]:
        newest.write_bytes(whole)
        flip(newest, bit)
        with pytest.raises(ValueError, match=r"checksum|header|version"):
            read_checkpoint(newest)
    newest.write_bytes(whole)
    assert read_checkpoint(newest).header["unsettled"] == RICH


@pytest.mark.parametrize(
    "change",
    [
        lambda content, other: content[:-1],
        lambda content, other: content + b"\0",
        lambda content, other: b"",
        lambda content, other: content[:-800] + other[-800:],
        lambda content, other: save({"model": torch.ones(3)}),
    ],
)
def test_a_checkpoint_of_other_length_or_mixed_from_two_is_damaged(tmp_path: Path, change):
    newest, other = rich(tmp_path, 10), rich(tmp_path, 5)
    newest.write_bytes(change(newest.read_bytes(), other.read_bytes()))
    with pytest.raises(ValueError, match=r"checksum|header"):
        read_checkpoint(newest)


def test_damaged_checkpoints_are_set_aside_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rich(tmp_path, 5)
    for next_round in (10, 15):
        flip(rich(tmp_path, next_round), 9000)
    with caplog.at_level(logging.WARNING, "fedmpi"):
        found = newest_checkpoint(tmp_path)
    assert found is not None and found.next_round == 5
    for next_round in (10, 15):
        assert f"round-{next_round:08d}.safetensors is damaged" in caplog.text
    assert {record.name for record in caplog.records} == {"fedmpi"}, "the log that users see"
    assert f"going on from {tmp_path / 'round-00000005.safetensors'} instead, at round 5" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-00000005.safetensors",
        "round-00000010.safetensors.damaged",
        "round-00000015.safetensors.damaged",
    ]


def test_clients_state_that_is_gone_or_differs_damages_its_checkpoint(tmp_path: Path):
    tensors = {"model": torch.ones(3)}
    for next_round in (5, 10):
        beside = clients_file(tmp_path, next_round)
        beside.write_bytes(b"kept %d" % next_round)
        save_checkpoint(tmp_path, Checkpoint(next_round, tensors, {"clients": file_digest(beside)}), keep=2)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.next_round == 10
    clients_file(tmp_path, 10).write_bytes(b"kept 11")
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.next_round == 5
    clients_file(tmp_path, 5).unlink()
    with pytest.raises(UserError, match="all checkpoints"):
        newest_checkpoint(tmp_path)
