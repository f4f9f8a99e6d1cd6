"""Checkpoints are written beside the rounds: the same ones, a disk that stalls holds up no round before the next."""

from __future__ import annotations

import errno
import os
import threading
import time
from itertools import count
from pathlib import Path

import pytest

import fedmpi
from fedmpi.common.errors import RunFailure
from fedmpi.records.checkpoint import read_checkpoint
from tests.end_to_end.runs import records

SETTINGS = {"rounds": 6, "checkpoint.every": 2, "logging.tensorboard": False, "local.engine": "sequential"}
ADAM = {"server.optimizer": "adam", "server.optimizer.lr": 0.01}


def of_checkpoint(path: str) -> bool:
    return Path(path).name.startswith(".round-")


def test_rounds_continue_while_the_disk_stalls_and_the_checkpoint_is_that_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first checkpoint, due after round 1, comes to the disk only in round 3, when model and record are others."""
    run, fsync, go, stalled = tmp_path / "RUN", os.fsync, threading.Event(), []

    def slow(handle: int) -> None:
        if of_checkpoint(os.readlink(f"/proc/self/fd/{handle}")) and not go.is_set():
            stalled.append(threading.current_thread().name)
            assert go.wait(60)
        fsync(handle)

    asked = count()

    def release() -> bool:
        if next(asked) == 3:
            deadline = time.monotonic() + 60
            while not stalled and time.monotonic() < deadline:  # rounds are quick, a busy machine's threads are not
                time.sleep(0.01)
            assert not (run / "checkpoints" / "round-00000002.safetensors").exists()
            assert [one["round"] for one in records(run)] == [0, 1, 2]
            go.set()
        return False

    whole = {**SETTINGS, **ADAM, "checkpoint.keep": 9}
    fedmpi.run("fedavg", whole, out=tmp_path / "WHOLE")
    monkeypatch.setattr("os.fsync", slow)
    fedmpi.run("fedavg", whole, out=run, stop=release)
    assert stalled == ["fedmpi-checkpoint_0"]
    for one, other in zip(*(sorted((tmp_path / n / "checkpoints").iterdir()) for n in ("RUN", "WHOLE")), strict=True):
        found, wanted = read_checkpoint(one), read_checkpoint(other)
        assert found.next_round == wanted.next_round
        assert found.tensors.keys() == wanted.tensors.keys() >= {"model", "server.m"}
        assert all((found.tensors[name] == wanted.tensors[name]).all() for name in wanted.tensors)
        assert found.header["unsettled"]["round"] == found.next_round - 1 == found.header["settled"]
        assert "test_loss" not in found.header["unsettled"]


@pytest.mark.parametrize("last", [False, True], ids=["by the next round", "before the run is called finished"])
def test_a_checkpoint_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool):
    run, fsync = tmp_path / "RUN", os.fsync

    def full(handle: int) -> None:
        name = os.readlink(f"/proc/self/fd/{handle}")
        if of_checkpoint(name) and ("00000006" in name or not last):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunFailure, match=rf"writing to the run folder {run} failed \(No space left on device\)"):
        fedmpi.run("fedavg", SETTINGS, out=run)
    monkeypatch.setattr("os.fsync", fsync)
    assert len(records(run)) <= (6 if last else 4)
    assert not (run / "summary.json").exists() and not list(run.rglob("*.partial"))
    assert fedmpi.run("fedavg", SETTINGS, out=run, resume=True).ending == "finished"
