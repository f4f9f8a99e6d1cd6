"""State of clients between rounds: whole wherever it is stored, and only for clients that have been selected."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from fedmpi import UserError
from fedmpi.local.client_state import ClientState
from fedmpi.mpi import Cluster
from fedmpi.records import checkpoint
from fedmpi.records.checkpoint import load_records, save_records

RECORD = 2 * 5 * 4
"""Bytes of two vectors of five values."""


def state_with(room: int, folder: Path | None = None, dtype: torch.dtype = torch.float32) -> ClientState:
    """Two vectors of five values for each client, `room` of them in memory."""
    size = RECORD if dtype == torch.float32 else 2 * RECORD
    state = ClientState(("a", "b"), 5, dtype, memory=room * size + 1)
    state.folder = folder
    return state


def vectors_of(client: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    a = torch.arange(5, dtype=dtype) + 100 * client
    return {"a": a, "b": -a}


def assert_holds(state: ClientState, clients: list[int], dtype: torch.dtype = torch.float32) -> None:
    for client in clients:
        found = state.read(client)
        assert all(torch.equal(found[name], vector) for name, vector in vectors_of(client, dtype).items()), client


@pytest.mark.parametrize("room", [0, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_records_are_the_same_in_memory_and_in_the_file(room: int, dtype: torch.dtype, tmp_path: Path) -> None:
    state = state_with(room, tmp_path, dtype)
    clients = [7, 1, 900_000, 4, 5, 2]
    for client in clients:
        assert not state.read(client)["a"].any()
        state.write(client, {name: vector * 2 for name, vector in vectors_of(client, dtype).items()})
    for client in reversed(clients):
        state.write(client, vectors_of(client, dtype))
    assert_holds(state, clients, dtype)
    assert state.clients.tolist() == sorted(clients) and len(state) == 6
    assert all(client in state for client in clients) and 3 not in state
    assert len(state._places) == max(0, 6 - room)
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_places_of_dropped_records_are_used_again(tmp_path: Path) -> None:
    state = state_with(2, tmp_path)
    for client in range(8):
        state.write(client, vectors_of(client))
    for client in (0, 3, 5):
        state.drop(client)
        assert client not in state and not state.read(client)["b"].any()
    for client in (10, 11, 12):
        state.write(client, vectors_of(client))
    assert_holds(state, [1, 2, 4, 6, 7, 10, 11, 12])
    assert sorted(state._places.values()) == list(range(6))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_grow_is_said_in_one_sentence(tmp_path: Path) -> None:
    state = state_with(1, tmp_path)
    with (
        files_of_at_most(3 * RECORD),
        pytest.raises(UserError, match="state_memory could not be kept in"),
    ):
        for client in range(9):
            state.write(client, vectors_of(client))


@pytest.mark.parametrize("piece", [1, 2 * RECORD])
def test_a_file_of_records_is_read_as_it_was_written(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", piece)
    cluster, state, path = Cluster(None, "none"), state_with(2, tmp_path), tmp_path / "deep" / "clients.safetensors"
    for client in (9, 2, 5, 30, 1):
        state.write(client, vectors_of(client))
    assert len(save_records(cluster, state, path)) == 64
    held = load_file(path)
    assert held["clients"].tolist() == [1, 2, 5, 9, 30] and held["records"].shape == (5, 2, 5)
    back = state_with(2, tmp_path)
    back.write(77, vectors_of(77))
    assert load_records(cluster, back, path, range(2, 30)).tolist() == [1, 2, 5, 9, 30]
    assert back.clients.tolist() == [2, 5, 9]
    assert_holds(back, [2, 5, 9])


def test_records_of_another_algorithm_are_rejected(tmp_path: Path) -> None:
    cluster, path = Cluster(None, "none"), tmp_path / "clients.safetensors"
    save_records(cluster, state_with(2), path)
    other = ClientState(("a", "c"), 5, torch.float32, 1e6)
    with pytest.raises(UserError, match="keeps a, b with 5 values .* now declares a, c with 5"):
        load_records(cluster, other, path, range(9))
