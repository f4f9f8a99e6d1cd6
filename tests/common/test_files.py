"""Files are whole or absent: their content reaches the disk before their name, the name before anybody counts on it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from fedmpi import UserError
from fedmpi.common.files import make_folder, read_plain, refuse_unwritable, sync_folder, write_whole
from fedmpi.config import load_config
from fedmpi.records.checkpoint import Checkpoint, save_checkpoint
from fedmpi.records.recorder import Recorder


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Files that are synced, renamed, made and deleted, in order, by their names at that moment."""
    seen: list[tuple[str, Path]] = []
    fsync, replace, mkdir = os.fsync, os.replace, os.mkdir

    def synced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        seen.append(("sync", path))
        fsync(handle)

    def replaced(source: Path, target: Path) -> None:
        seen.append(("rename", Path(target)))
        replace(source, target)

    def made(path: Path, *more: int) -> None:
        mkdir(path, *more)
        seen.append(("make", Path(path)))

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("os.replace", replaced)
    monkeypatch.setattr("os.mkdir", made)
    return seen


def test_the_content_is_synced_before_the_name_and_the_folder_after_it(tmp_path: Path, order: list):
    write_whole(tmp_path / "file", b"some", memoryview(b" words"))
    assert order == [("sync", tmp_path / ".file.partial"), ("rename", tmp_path / "file"), ("sync", tmp_path)]
    assert (tmp_path / "file").read_bytes() == b"some words"


def test_all_is_written_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr("os.fsync", lambda handle: (sizes.append(os.fstat(handle).st_size), fsync(handle)))
    write_whole(tmp_path / "file", b"x" * 100)
    assert sizes[0] == 100


def test_folders_that_are_made_are_synced_in_the_one_above(tmp_path: Path, order: list):
    make_folder(tmp_path / "runs" / "mine")
    synced = [path for what, path in order if what == "sync"]
    assert set(synced) == {tmp_path, tmp_path / "runs"}
    assert order.index(("make", tmp_path / "runs" / "mine")) < order.index(("sync", tmp_path / "runs"))


def test_the_folder_of_the_checkpoints_is_on_the_disk_with_the_first_of_them(tmp_path: Path, order: list):
    path = save_checkpoint(tmp_path / "checkpoints", Checkpoint(5, {"model": torch.ones(3)}, {}), keep=2)
    assert order[-3:] == [("sync", path.with_name(f".{path.name}.partial")), ("rename", path), ("sync", path.parent)]
    assert ("sync", tmp_path) in order


@pytest.mark.parametrize("call", ["os.replace", "os.fsync"])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def broken(*where: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(call, broken)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True), (errno.ENOSPC, True)])
def test_a_file_system_that_cannot_sync_folders_is_no_error_but_a_failing_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
):
    def broken(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", broken)
    if fails:
        with pytest.raises(OSError, match=os.strerror(number)):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)


def test_records_are_on_the_disk_before_the_checkpoint_that_counts_on_them(tmp_path: Path, order: list):
    run = tmp_path / "RUN"
    recorder = Recorder(run, load_config(None, ["preset=fedavg", "logging.tensorboard=false"]), resume=False)
    recorder.resume()
    recorder.write({"round": 0})
    order.clear()
    recorder.checkpoint(1, {"model": torch.ones(3)}, {"settled": 1})
    recorder.saved()
    recorder.close()
    assert order[:2] == [("sync", run / "metrics.jsonl"), ("sync", run)]
    assert order[-2][0] == "rename" and order[-2][1].parent == run / "checkpoints"


def test_what_is_no_plain_file_is_rejected_and_not_kept_open(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(OSError, match="it is no plain file"):
            read_plain(path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("lacking", [os.W_OK, os.X_OK])
def test_a_folder_that_cannot_be_made_is_rejected_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: int
):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(UserError, match=rf"cannot write {folder} \({tmp_path}/link is no folder\)"):
            refuse_unwritable(folder)
    refuse_unwritable(tmp_path / "new" / "below", writing=True)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & lacking)  # root may do all
    with pytest.raises(UserError, match=rf"\({tmp_path} may not be written\)"):
        refuse_unwritable(tmp_path / "new" / "below", writing=True)
