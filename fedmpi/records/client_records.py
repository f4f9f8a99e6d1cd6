"""Clients' state beside a checkpoint: one safetensors file that rank 0 writes piece by piece.

It contains `clients` int64 (c,) and `records` (c, vectors, d) in the same order. Writing and reading need at most
PIECE_BYTES of memory, and a run may resume with another number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_inner_folder, whole_file
from fedmpi.common.types import AnyArray, Ints
from fedmpi.local.client_state import ClientState
from fedmpi.mpi import Cluster

PIECE_BYTES = 64 << 20
"""Largest size of the records that rank 0 has in memory."""
TYPES = {"F32": np.dtype(np.float32), "F64": np.dtype(np.float64)}
LENGTH_BYTES = 8


def save_records(cluster: Cluster, state: ClientState, path: Path | None) -> str:
    """Write the records of all ranks to one file; collective."""
    wanted = cluster.broadcast([np.array([path is not None])] if cluster.is_server else None)
    if not wanted[0][0]:
        return ""
    at_once = _records_at_once(state.record_bytes, cluster.size)
    clients = cluster.gather(state.clients)
    pieces, steps = state.pieces(at_once), cluster.maximum(-(-len(state) // at_once))
    with ExitStack() as stack:
        digest, file = hashlib.sha256(), None
        if path is not None and clients is not None:
            make_inner_folder(path.parent)
            file = stack.enter_context(whole_file(path))
            for part in _head(_in_order(clients, at_once, steps), state):
                _write(file, digest, part)
        empty = np.empty((0, len(state.names), state.values), state.dtype)
        for _ in range(steps):
            gathered = cluster.gather(next(pieces, (None, empty))[1])
            for records in gathered or ():
                if file is not None and records.size:
                    _write(file, digest, np.ascontiguousarray(records).data.cast("B"))
    return digest.hexdigest() if file is not None else ""


def load_records(cluster: Cluster, state: ClientState, path: Path | None, owned: range) -> Ints:
    """Load the records of this rank's clients from a file that rank 0 reads; return all its clients; collective."""
    state.clear()
    everybody = [np.empty(0, np.int64)]
    pieces = _read(path, state) if cluster.is_server else iter(())
    while True:
        piece = cluster.broadcast(next(pieces, [np.empty(0, np.int64)]) if cluster.is_server else None)
        everybody.append(piece[0])
        if not piece[0].size:
            return np.concatenate(everybody)
        for client, record in zip(piece[0].tolist(), piece[1], strict=True):
            if client in owned:
                state.put(client, record.copy())


def _records_at_once(record_bytes: int, ranks: int) -> int:
    return max(1, PIECE_BYTES // max(1, ranks * record_bytes))


def _in_order(clients: list[Ints], at_once: int, steps: int) -> Ints:
    """Return the clients in the order of their gathered records: a piece of every rank, then the next one."""
    parts = [own[step * at_once : (step + 1) * at_once] for step in range(steps) for own in clients]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _head(clients: Ints, state: ClientState) -> Iterator[bytes]:
    """Yield the head of a safetensors file: the length of its table, the table, and the clients."""
    size, end = len(clients) * state.record_bytes, clients.nbytes
    kind = next(name for name, dtype in TYPES.items() if dtype == state.dtype)
    table = {
        "__metadata__": {"vectors": json.dumps(state.names)},
        "clients": {"dtype": "I64", "shape": [len(clients)], "data_offsets": [0, end]},
        "records": {
            "dtype": kind,
            "shape": [len(clients), len(state.names), state.values],
            "data_offsets": [end, end + size],
        },
    }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    yield len(text).to_bytes(LENGTH_BYTES, "little")
    yield text
    yield clients.astype("<i8").tobytes()


def _write(file: BinaryIO, digest: Any, part: bytes | memoryview) -> None:
    file.write(part)
    digest.update(part)


def _read(path: Path | None, state: ClientState) -> Iterator[list[AnyArray]]:
    """Yield pieces of a file: clients (c,), at least one, and their records (c, vectors, d)."""
    if path is None:
        return
    with open(path, "rb") as file:
        table = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
        _check(path, table, state)
        clients = np.frombuffer(file.read(8 * table["clients"]["shape"][0]), "<i8")
        at_once = _records_at_once(state.record_bytes, 1)
        for first in range(0, len(clients), at_once):
            some = clients[first : first + at_once]
            records = np.frombuffer(file.read(len(some) * state.record_bytes), state.dtype)
            yield [some.astype(np.int64), records.reshape(len(some), len(state.names), state.values)]


def _check(path: Path, table: Mapping[str, Any], state: ClientState) -> None:
    """Reject records of another algorithm or model."""
    names = tuple(json.loads(table["__metadata__"]["vectors"]))
    shape, dtype = tuple(table["records"]["shape"][1:]), TYPES[table["records"]["dtype"]]
    if names != state.names or shape != (len(state.names), state.values) or dtype != state.dtype:
        raise UserError(
            f"{path} keeps {', '.join(names)} with {shape[1]} values for each client, but local.algorithm now declares "
            f"{', '.join(state.names)} with {state.values}: choose another --out"
        )
