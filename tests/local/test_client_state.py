"""State of clients between rounds: whole wherever it is stored, and only for clients that have been selected."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
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
    state = ClientState(("a", "b"), 5, dtype, memory=room * RECORD * (dtype.itemsize // 4) + 1)
    state.folder = folder
    return state


def record_of(client: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    a = torch.arange(5, dtype=dtype) + 100 * client
    return torch.stack([a, -a])


def write(state: ClientState, *clients: int, dtype: torch.dtype = torch.float32) -> None:
    for client in clients:
        state.put(client, np.asfortranarray(record_of(client, dtype)))


def holds(state: ClientState, clients: list[int], dtype: torch.dtype = torch.float32) -> bool:
    return all(np.array_equal(state.record(client), record_of(client, dtype)) for client in clients)


@pytest.mark.parametrize("room", [0, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_records_are_the_same_in_memory_and_in_the_file(room: int, dtype: torch.dtype, tmp_path: Path) -> None:
    state, clients = state_with(room, tmp_path, dtype), [7, 1, 900_000, 4, 5, 2]
    for client in clients:
        assert not state.record(client).any()
        given = 2 * record_of(client, dtype).numpy()
        state.put(client, given)
        assert np.shares_memory(state.record(client), given) == (len(state) <= room)
    write(state, *reversed(clients), dtype=dtype)
    assert holds(state, clients, dtype) and state.clients.tolist() == sorted(clients) and len(state) == 6
    assert all(client in state for client in clients) and 3 not in state
    assert len(state._places) == max(0, 6 - room)
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_places_of_dropped_records_are_used_again(tmp_path: Path) -> None:
    state = state_with(2, tmp_path)
    write(state, *range(8))
    for client in (0, 3, 5):
        state.drop(client)
        assert client not in state and not state.record(client).any()
    write(state, 10, 11, 12)
    assert holds(state, [1, 2, 4, 6, 7, 10, 11, 12]) and sorted(state._places.values()) == list(range(6))


def test_a_file_that_cannot_grow_is_said_in_one_sentence(tmp_path: Path) -> None:
    before, state = resource.getrlimit(resource.RLIMIT_FSIZE), state_with(1, tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * RECORD, before[1]))
    try:
        with pytest.raises(UserError, match="state_memory could not be kept in"):
            write(state, *range(9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("piece", [1, 2 * RECORD])
def test_a_file_of_records_is_read_as_it_was_written(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", piece)
    cluster, state, path = Cluster(None, "none"), state_with(2, tmp_path), tmp_path / "deep" / "clients.safetensors"
    write(state, 9, 2, 5, 30, 1)
    assert len(save_records(cluster, state, path)) == 64
    held = load_file(path)
    assert held["clients"].tolist() == [1, 2, 5, 9, 30] and held["records"].shape == (5, 2, 5)
    back = state_with(2, tmp_path)
    write(back, 77)
    assert load_records(cluster, back, path, range(2, 30)).tolist() == [1, 2, 5, 9, 30]
    assert back.clients.tolist() == [2, 5, 9] and holds(back, [2, 5, 9])
    with pytest.raises(UserError, match="keeps a, b with 5 values .* now declares a, c with 5"):
        load_records(cluster, ClientState(("a", "c"), 5, torch.float32, 1e6), path, range(9))
