"""Checkpoints are complete or absent, the newest readable one counts, and only a few are kept."""

import logging
import os
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save, save_file

import fedmpi
from fedmpi import UserError
from fedmpi.records.checkpoint import (
    Checkpoint,
    clients_file,
    file_digest,
    load_model,
    model_file,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from tests.end_to_end.runs import records

FLIPS = 120
UNSETTLED = {"round": 6, "lr": 0.1, "said": 'a name with "checksum":"' + "0" * 64 + '" and é'}
"""A record that could mislead a search for the digest."""


def saved(folder: Path, next_round: int, clients: bytes = b"kept") -> Checkpoint:
    """Write a checkpoint with tensors of several types and sizes, and its clients' state; the newest two are kept."""
    generator = torch.Generator().manual_seed(next_round)
    tensors = {
        "model": torch.randn(700, generator=generator),
        "strata": torch.arange(40),
        "balance": torch.rand(3, generator=generator, dtype=torch.float64),
        "empty": torch.empty(0),
    }
    clients_file(folder, next_round).write_bytes(clients)
    digest = file_digest(clients_file(folder, next_round))
    checkpoint = Checkpoint(next_round, tensors, {"settled": 6, "unsettled": UNSETTLED, "clients": digest})
    save_checkpoint(folder, checkpoint, keep=2)
    return checkpoint


def file_of(folder: Path, next_round: int) -> Path:
    return folder / f"round-{next_round:08d}.safetensors"


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    written = saved(tmp_path, 7)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.next_round, found.header) == (7, written.header)
    for tensors in (found.tensors, load_file(file_of(tmp_path, 7))):  # as other tools read it
        assert all(torch.equal(tensors[name], tensor) for name, tensor in written.tensors.items())


@pytest.mark.slow  # torch.compile takes seconds to import
def test_models_are_saved_without_the_prefixes_of_compilers_and_loaded_with_or_without(tmp_path: Path):
    compiled = partial(torch.compile, backend="eager")
    layer, path = torch.nn.Linear(3, 2), tmp_path / "model.safetensors"
    outer = torch.nn.DataParallel(torch.nn.Sequential(compiled(layer), torch.nn.Flatten()))
    own = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})  # a user's own name
    assert list(own.state_dict()) == sorted(load(model_file(own)), reverse=True)
    path.write_bytes(model_file(outer))
    assert sorted(load_file(path)) == ["0.bias", "0.weight"]
    for state in ({}, outer.state_dict()):  # a file with prefixes, too
        if state:
            save_file({name: value.clone() + 1 for name, value in state.items()}, path)
        for model in (compiled(torch.nn.Sequential(torch.nn.Linear(3, 2))), torch.nn.Sequential(torch.nn.Linear(3, 2))):
            load_model(model, path)
            assert torch.equal(next(model.parameters()), layer.weight + bool(state))


def test_only_the_newest_are_kept_and_vectors_of_clients_as_long_as_their_checkpoint(tmp_path: Path):
    for next_round in (5, 10, 15, 100):
        saved(tmp_path, next_round)
    kept = [f"{kind}-{number:08d}.safetensors" for kind in ("clients", "round") for number in (15, 100)]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_no_bit_of_a_checkpoint_can_flip_unnoticed(tmp_path: Path):
    """120 places drawn with a fixed seed, all of the length of the header, every 101st of the header."""
    saved(tmp_path, 10)
    newest = file_of(tmp_path, 10)
    whole = newest.read_bytes()
    drawn = np.random.default_rng(12).choice(8 * len(whole), FLIPS, replace=False).tolist()
    header = 8 * (8 + int.from_bytes(whole[:8], "little"))
    for bit in [*drawn, *range(64), *range(64, header, 101)]:
        newest.write_bytes(whole)
        flip(newest, bit)
        with pytest.raises(ValueError):
            read_checkpoint(newest)
    newest.write_bytes(whole)
    assert read_checkpoint(newest).header["unsettled"] == UNSETTLED


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
    saved(tmp_path, 5)
    saved(tmp_path, 10)
    newest = file_of(tmp_path, 10)
    newest.write_bytes(change(newest.read_bytes(), file_of(tmp_path, 5).read_bytes()))
    with pytest.raises(ValueError):
        read_checkpoint(newest)


@pytest.mark.parametrize("damage", ["checkpoint", "clients differ", "clients are gone"])
def test_damaged_checkpoints_are_set_aside_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
):
    def hurt(next_round: int) -> None:
        if damage == "checkpoint":
            flip(file_of(tmp_path, next_round), 9000)
        elif damage == "clients differ":
            flip(clients_file(tmp_path, next_round), 3)
        else:
            clients_file(tmp_path, next_round).unlink()

    saved(tmp_path, 5)
    saved(tmp_path, 10)
    hurt(10)
    with caplog.at_level(logging.WARNING, "fedmpi"):
        found = newest_checkpoint(tmp_path)
    assert found is not None and found.next_round == 5
    [record] = caplog.records
    assert record.name == "fedmpi" and f"{file_of(tmp_path, 10)} is damaged" in record.getMessage()
    kept = [path.name for path in tmp_path.glob("round-*")]
    assert sorted(kept) == ["round-00000005.safetensors", "round-00000010.safetensors.damaged"]
    hurt(5)
    for _ in range(2):
        with pytest.raises(UserError, match="all checkpoints"):
            newest_checkpoint(tmp_path)


# Checkpoints are written beside the rounds

SETTINGS = {
    "rounds": 6,
    "checkpoint.every": 2,
    "checkpoint.keep": 9,
    "logging.tensorboard": False,
    "local.engine": "sequential",
    "server.optimizer": "adam",
}


def test_rounds_continue_while_the_disk_stalls_and_the_checkpoint_is_that_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first checkpoint, due after round 1, comes to the disk only in round 3, when model and record are others."""
    run, fsync, go, stalled = tmp_path / "RUN", os.fsync, threading.Event(), []

    def slow(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).name.startswith(".round-") and not go.is_set():
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

    fedmpi.run("fedavg", SETTINGS, out=tmp_path / "WHOLE")
    monkeypatch.setattr("os.fsync", slow)
    fedmpi.run("fedavg", SETTINGS, out=run, stop=release)
    assert stalled == ["fedmpi-checkpoint_0"]
    for one, other in zip(*(sorted((tmp_path / n / "checkpoints").iterdir()) for n in ("RUN", "WHOLE")), strict=True):
        found, wanted = read_checkpoint(one), read_checkpoint(other)
        assert found.next_round == wanted.next_round
        assert found.tensors.keys() == wanted.tensors.keys() >= {"model", "server.m"}
        assert all((found.tensors[name] == wanted.tensors[name]).all() for name in wanted.tensors)
        assert found.header["unsettled"]["round"] == found.next_round - 1 == found.header["settled"]
        assert "test_loss" not in found.header["unsettled"]
