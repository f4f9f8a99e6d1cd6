"""A full disk is one sentence that names the folder, and nothing half-written is left."""

from __future__ import annotations

import errno
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_prep.__main__ import fetch
from data_prep.formats.idx import read_idx
from data_prep.raw import Source
from fedmpi import UserError
from tests.data_prep.command import main
from tests.mpi.launch import finish_job, start_job

WRITE = os.write
WORDS = ["digits", "--partition", "iid", "--clients", "6", "--shards", "3", "--val", "0.1", "--seed", "0", "--out"]


def prepare(out: Path, *more: str) -> int:
    return main([*WORDS, str(out), *more])


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr that is no progress."""
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    return said[0]


@contextmanager
def files_at_most(length: int) -> Iterator[None]:
    """Limit the length of files, as a full disk does; this needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# The output folder


class FullDisk:
    """Writes of HDF5 files that fail from a certain one on, all files counted together."""

    def __init__(self, first_to_fail: int):
        self.writes, self.first_to_fail = 0, first_to_fail

    def write(self, file: int, data: bytes) -> int:
        self.writes += os.readlink(f"/proc/self/fd/{file}").endswith(".h5.partial")
        if self.writes >= self.first_to_fail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return WRITE(file, data)


def test_at_whatever_write_the_disk_is_full_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    counting = FullDisk(sys.maxsize)
    monkeypatch.setattr("data_prep.output.os.write", counting.write)
    assert prepare(tmp_path / "whole") == 0
    assert counting.writes > 30
    for number in range(1, counting.writes + 1, 7):
        monkeypatch.setattr("data_prep.output.os.write", FullDisk(number).write)
        capsys.readouterr()
        assert prepare(tmp_path / "out") == 2, number
        assert f"writing to {tmp_path / 'out'} failed (No space left on device): about " in sentence(capsys)
        assert not list((tmp_path / "out").iterdir()), number
    monkeypatch.setattr("data_prep.output.os.write", WRITE)
    assert prepare(tmp_path / "out") == 0  # a later preparation takes the folder
    for file in (tmp_path / "whole").glob("*.h5"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


def test_the_program_ends_in_order_on_a_full_disk(tmp_path: Path):
    """HDF5 tries again at the end of the process to write what it could not, and crashed then."""
    limited = ["bash", "-c", 'ulimit -f 20; exec "$@"', "_", "env", "PYTHONDONTWRITEBYTECODE=1"]
    ended = finish_job(start_job([*limited, sys.executable, "-m", "data_prep", *WORDS, str(tmp_path)]), 100)
    assert ended.returncode == 2, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(said) == 1 and f"writing to {tmp_path} failed (File too large)" in said[0]
    assert not list(tmp_path.iterdir())


# The temporary folder


@pytest.mark.parametrize("limit", [0, 1_500_000])
def test_a_full_temporary_folder_is_distinguished_from_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 2000, 28, 28) + bytes(2000 * 784))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with files_at_most(limit), pytest.raises(UserError) as refusal:
        read_idx(path, 3)
    said = str(refusal.value)
    assert f"the temporary folder {tmp_path / 'scratch'} is full. Make room" in said and "set TMPDIR" in said
    assert "fetch it again" not in said


def test_a_download_that_does_not_fit_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def retrieve(*where: object, **options: object) -> None:
        (tmp_path / "unpacked").mkdir()
        (tmp_path / "unpacked" / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pooch.retrieve", retrieve)
    with pytest.raises(UserError, match=f"cannot store set.zip in {tmp_path}: No space left on device; make room"):
        fetch("set", (Source("https://example.org/set.zip", "md5:0"),), tmp_path)
    assert not list(tmp_path.iterdir())
