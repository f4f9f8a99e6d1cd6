"""Vectors kept for clients between rounds: in memory up to a limit, above it in a file of this rank.

Only clients that have been selected have vectors: a population of 10⁶ with 10⁴ selected clients costs 10⁴ records.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints

log = logging.getLogger("fedmpi")


class ClientState:
    """Kept vectors of one rank's clients.

    A record (all vectors of a client) stays where it was first written: in memory up to the limit, else in a temporary
    file without a name, which vanishes with the process.
    """

    def __init__(self, names: Sequence[str], values: int, dtype: torch.dtype, memory: float):
        self.names, self.values = tuple(names), values
        self.dtype: np.dtype[np.generic] = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        self.record_bytes = len(self.names) * values * self.dtype.itemsize
        self.room = int(memory // self.record_bytes) if self.record_bytes else 0
        self.folder: Path | None = None
        self._kept: dict[int, AnyArray] = {}
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._file: BufferedRandom | None = None

    def __len__(self) -> int:
        return len(self._kept) + len(self._places)

    def __contains__(self, client: int) -> bool:
        return client in self._kept or client in self._places

    @property
    def clients(self) -> Ints:
        """Return the clients that have a record, sorted."""
        return np.sort(np.fromiter((*self._kept, *self._places), np.int64, len(self)))

    def record(self, client: int) -> AnyArray:
        """Return a client's record (vectors, d), zeros if it has none; not a copy if it is in memory."""
        if client in self._kept:
            return self._kept[client]
        record = np.zeros((len(self.names), self.values), self.dtype)
        if client in self._places:
            with self._at(self._places[client]) as file:
                if file.readinto(record.data.cast("B")) < self.record_bytes:
                    raise OSError("the file ends too early")
        return record

    def put(self, client: int, record: AnyArray) -> None:
        """Store a record (vectors, d); in memory, the record itself is stored and not a copy."""
        if client in self._kept or (client not in self._places and len(self._kept) < self.room):
            self._kept[client] = np.ascontiguousarray(record, self.dtype)
            return
        if client not in self._places:  # without free places, those from 0 on are all taken
            self._places[client] = self._free.pop() if self._free else len(self._places)
        with self._at(self._places[client]) as file:
            file.write(np.ascontiguousarray(record, self.dtype).data.cast("B"))

    def drop(self, client: int) -> None:
        """Delete a client's record."""
        if self._kept.pop(client, None) is None and client in self._places:
            self._free.append(self._places.pop(client))

    def clear(self) -> None:
        """Delete all records."""
        self._kept, self._places, self._free = {}, {}, []
        self.close()

    def pieces(self, records: int) -> Iterator[tuple[Ints, AnyArray]]:
        """Yield all records in client order, at most so many at a time: clients (c,) and records (c, vectors, d)."""
        clients = self.clients
        for first in range(0, len(clients), max(records, 1)):
            some = clients[first : first + max(records, 1)]
            yield some, np.stack([self.record(client) for client in some.tolist()])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def _at(self, place: int) -> Iterator[BufferedRandom]:
        """Open the file at a record's place; report a file that cannot be written or read in one sentence."""
        folder = self.folder if self.folder is not None and self.folder.is_dir() else Path(tempfile.gettempdir())
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
                log.info("client state beyond %d records goes to a temporary file in %s", self.room, folder)
            self._file.seek(place * self.record_bytes)
            yield self._file
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"the clients' state above cluster.state_memory could not be kept in {folder} "
                f"({error.strerror or error}). Make room there, or raise cluster.state_memory"
            ) from error
