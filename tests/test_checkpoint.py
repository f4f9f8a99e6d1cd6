"""Checkpoints are complete or absent, the newest readable one counts, and only a few are kept."""

from pathlib import Path

import pytest
import torch

from fedmpi.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint, write_whole
from fedmpi.errors import UserError


def saved(folder: Path, next_round: int, keep: int = 2) -> Checkpoint:
    tensors = {"model": torch.arange(5.0) + next_round, "server.m": torch.ones(5)}
    checkpoint = Checkpoint(next_round, tensors, {"settled": next_round - 1, "unsettled": {"round": next_round - 1}})
    save_checkpoint(folder, checkpoint, keep)
    return checkpoint


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path):
    written = saved(tmp_path, 7)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.next_round, found.header) == (7, written.header)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in written.tensors.items())


def test_only_the_newest_are_kept(tmp_path: Path):
    for next_round in (5, 10, 15, 100):
        saved(tmp_path, next_round)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-00000015.safetensors",
        "round-00000100.safetensors",
    ]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    saved(tmp_path, 5)
    saved(tmp_path, 10)
    newest = tmp_path / "round-00000010.safetensors"
    newest.write_bytes(newest.read_bytes()[:40])
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.next_round == 5
    assert str(newest) in caplog.text


def test_when_no_checkpoint_can_be_read_the_user_is_told(tmp_path: Path):
    saved(tmp_path, 5)
    (tmp_path / "round-00000005.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint"):
        newest_checkpoint(tmp_path)


def test_a_folder_without_checkpoints_has_none(tmp_path: Path):
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def broken(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
